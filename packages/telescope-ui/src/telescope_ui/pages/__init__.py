"""The data of each page: plain functions from a run and parameters to JSON values."""
