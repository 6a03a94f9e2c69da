"""Checks that find what is wrong before and during a run. Runs in the driver and in the ranks."""
