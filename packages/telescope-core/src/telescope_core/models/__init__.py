"""Models that an environment asks besides the policy, in the process that holds the environment."""
