"""Rollouts as tensors: samples, their weights, and packing them for the ranks. Numpy alone.

Runs in the driver and in the ranks.
"""
