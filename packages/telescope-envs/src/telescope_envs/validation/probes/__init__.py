"""What runs beside the environment's code, in the environment's own interpreter.

That interpreter may have telescope-core and nothing else of Telescope, so these modules import
core, each other and the standard library alone.
"""
