"""Types, protocols, errors and small helpers that every other folder of core uses."""
