"""Installing environments into virtual environments of their own, one file per part of the way."""
