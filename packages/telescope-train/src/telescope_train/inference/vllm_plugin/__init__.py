"""Telescope's code inside a vLLM server's process. Needs vLLM, so it is imported only there."""
