"""Listing and searching a registry of 10,000 releases, as commands and as functions.

A registry of 2,000 environments with 5 releases each and a status record each is written into a
temporary folder. Commands are timed whole, from the start of the process to its end. The peer of
reading is the same rows made the plain way, each index line through the pydantic record; the second
one is `json`. The peer of the commands is `pip index versions`, pip's own look into an index, on a
simple index of the same folder, for one name.
Run: python benchmarks/bench_hub.py
"""
