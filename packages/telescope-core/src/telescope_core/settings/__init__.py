"""Settings from files and flags as one checked model, in the process that a person started."""
