"""The trainer ranks: the work of one, and all of them over Ray; in the ranks and the driver."""
