"""Evals that a run plays itself, with its current weights. Runs in the driver."""
