"""Checks of which settings fit together. Pure; every message says what to change."""
