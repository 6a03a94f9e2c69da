"""Processes of a run, placed by Ray: trainer ranks and inference servers."""
