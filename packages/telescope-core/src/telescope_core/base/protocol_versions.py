"""The range of environment protocol versions that this telescope-core supports."""

PROTOCOL_MIN = 1
"""Oldest supported version."""
PROTOCOL_MAX = 1
"""Newest supported version."""
