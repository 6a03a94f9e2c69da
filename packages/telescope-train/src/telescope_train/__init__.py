"""Telescope train."""
