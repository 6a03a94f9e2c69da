"""The verbs of `telescope eval`: play an eval, and show or compare what was played."""
