"""Rollouts per second of Telescope and of verifiers: the task, a mock server, the sides."""
