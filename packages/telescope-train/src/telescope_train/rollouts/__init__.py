"""Which examples are played, when, and by whom. Runs in the driver."""
