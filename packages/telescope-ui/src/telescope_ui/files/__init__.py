"""The files of a run, read while they are still written, and damage in them."""
