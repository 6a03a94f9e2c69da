"""Inference servers, and token-exact requests to them."""
