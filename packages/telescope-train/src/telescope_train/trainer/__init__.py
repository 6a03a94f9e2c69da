"""The trainer ranks: the work of one rank, and calls to all of them over Ray."""
