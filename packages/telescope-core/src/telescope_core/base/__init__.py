"""Types, protocols, errors and helpers for all other folders, in every process of Telescope."""
