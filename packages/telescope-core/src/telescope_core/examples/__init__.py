"""The examples of an environment: ready-made sources, and rows of tables made into examples.

They are read in the process that holds the environment.
"""

from telescope_core.examples.sources import GeneratedSource, ListSource, SplitSource, split_of

__all__ = ["GeneratedSource", "ListSource", "SplitSource", "split_of"]
