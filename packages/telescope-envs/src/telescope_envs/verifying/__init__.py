"""Checking installed environments again, with one module per kind of comparison."""
