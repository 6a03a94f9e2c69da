"""Types, protocols, errors and what all other rooms need, in every process of Telescope."""
