"""Destinations for the metrics of a run besides its folder; each tracker has an entry point."""
