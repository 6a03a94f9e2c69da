"""Checking again what is installed, one file per thing that is compared."""
