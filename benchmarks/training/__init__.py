"""Throughput of packed training: the model shapes, and what a step costs in FLOPs."""
