"""The rules of a registry: what a wheel may hold, and what may be published or must be found."""
