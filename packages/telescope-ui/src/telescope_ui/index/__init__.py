"""The index: scalars of rollouts in DuckDB, made from run folders and deletable at any time."""
