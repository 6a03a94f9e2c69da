"""Rollouts as arrays: samples, token weights, and packing for the ranks. Needs numpy only.

Runs in the driver and in the ranks.
"""
