"""From the name of an environment to its code.

The process that gives the name asks where the code is; the worker imports it.
"""
