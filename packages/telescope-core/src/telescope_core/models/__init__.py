"""Models that an environment uses besides the policy, in that environment's process."""
