"""Evals that a run plays itself, on the weights of the moment. Runs in the driver."""
