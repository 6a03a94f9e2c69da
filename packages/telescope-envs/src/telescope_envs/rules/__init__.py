"""Rules of a registry: permitted content of wheels, and conditions for publishing and checks."""
