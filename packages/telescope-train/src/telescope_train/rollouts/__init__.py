"""Choose examples, their lead over the trainer, and play them. Runs in the driver."""
