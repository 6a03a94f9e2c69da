"""Turns messages into tokens and back with the model's chat template. Runs in the driver."""
