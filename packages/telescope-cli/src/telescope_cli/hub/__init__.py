"""`telescope hub`: one file for each family of its verbs."""
