"""A small registry server: one data folder with records in SQLite and wheels in files.

Accessing the data needs only the core dependencies; serving it needs `telescope-envs[serve]`.
"""
