"""A small registry server: one folder of data, SQLite for the records, files for the wheels.

The data needs nothing but the standard library; serving it needs `telescope-envs[serve]`.
"""
