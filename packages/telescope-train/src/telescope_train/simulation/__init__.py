"""A run without a machine: the real loop, sampler and pool over modelled servers and ranks.

Time is virtual (`virtual_time`), so waiting costs nothing and equal seeds give equal histories.
"""
