"""A small run whose processes are killed at random moments."""
