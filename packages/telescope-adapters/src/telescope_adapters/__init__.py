"""Environments of other frameworks played as ours, and ours served to them in `serving`.

`frameworks` lists what `SCHEME:ID` names. Each adapter imports its framework late, in its own
virtual environment, and takes only the versions that it was tested with.
"""
