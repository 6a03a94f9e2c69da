"""Graders that environments share: they decide whether a written answer is right."""
