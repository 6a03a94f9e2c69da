"""`telescope env`: one file for each family of its verbs."""
