"""The verbs of `telescope hub`; related verbs share a file."""
