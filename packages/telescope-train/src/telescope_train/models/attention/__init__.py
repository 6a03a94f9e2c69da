"""Attention over rows of packed samples. Runs in the ranks."""
