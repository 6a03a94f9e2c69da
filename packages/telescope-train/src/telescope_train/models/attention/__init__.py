"""Attention over rows of packed samples; runs in the ranks."""
