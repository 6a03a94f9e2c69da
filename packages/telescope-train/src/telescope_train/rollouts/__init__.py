"""Which examples are played, how far ahead of the trainer, and by whom. Runs in the driver."""
