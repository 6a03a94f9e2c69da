"""The verbs of `telescope env`; related verbs share a file."""
