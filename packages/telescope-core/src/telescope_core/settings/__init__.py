"""Settings from files and flags as one validated model, in the process that a person started."""
