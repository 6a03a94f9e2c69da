"""Checks that find errors before and during a run. Run in the driver and in the ranks."""
