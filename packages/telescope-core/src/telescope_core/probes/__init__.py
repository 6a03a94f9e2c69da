"""The part of validation that runs beside the environment's code, in its own interpreter.

Telescope-core may be the only part of Telescope that this interpreter has, so these modules import
only core, each other and the standard library.
"""
