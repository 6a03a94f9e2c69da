"""Implementations of the store protocols in `registry.store`, one per kind of registry."""
