"""What leaves a run for people: the view in the terminal. Runs in the driver."""
