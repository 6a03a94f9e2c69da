"""One GRPO step of Telescope and of TRL's `GRPOTrainer`: the task, the two sides, the report."""
