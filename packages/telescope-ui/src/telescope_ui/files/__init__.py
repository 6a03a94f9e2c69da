"""The files of a run as they are read while they are still written, and what is damaged in them."""
