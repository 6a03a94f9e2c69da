"""Run other programs for an environment, within limits and without leftovers."""
