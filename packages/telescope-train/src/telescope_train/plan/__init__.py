"""Before a run: settings from files and flags, whether they can work, and the dry run.

Runs in the driver and imports neither torch nor transformers nor ray.
"""
