"""Where the metrics of a run go beside its folder; each tracker is found by its entry point."""
