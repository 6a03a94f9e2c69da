"""What is wrong, before, during and after a run. Runs in the driver and in the ranks."""
