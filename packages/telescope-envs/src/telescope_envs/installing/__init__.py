"""Installing environments into their own virtual environments, with one module per part."""
