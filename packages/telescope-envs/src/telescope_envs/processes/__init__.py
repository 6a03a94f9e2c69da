"""Running other programs for an environment: within limits, and nothing is left of them."""
