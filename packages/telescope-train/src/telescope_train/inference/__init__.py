"""Inference servers and the token-exact way to talk to them."""
