"""The checkpoints of a run: saving, resuming from and exporting them. Runs in the driver."""
