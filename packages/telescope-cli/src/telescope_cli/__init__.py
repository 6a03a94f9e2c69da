"""Telescope cli."""
