"""The versions of the environment protocol that this telescope-core speaks, both ends included."""

PROTOCOL_MIN = 1
"""Oldest protocol this side still speaks."""
PROTOCOL_MAX = 1
