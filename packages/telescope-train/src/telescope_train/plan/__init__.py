"""Before a run: read settings from files and flags, check them, and show the dry run.

Runs in the driver and imports neither torch nor transformers nor ray.
"""
