"""What a run shows to people: the view in the terminal. Runs in the driver."""
