"""Transfer of weights from the trainer to the inference servers, in place and versioned."""
