"""Evals that a run itself plays, with its current weights. Runs in the driver."""
