"""Messages to tokens and back, through the model's own chat template. Runs in the driver."""
