"""Helper models: those that an environment uses besides the policy, in its own process."""
