"""Find what went wrong in a run, and since when, from the metrics of its steps: see `diagnose`."""

from telescope_core.diagnosis.history import GrowingHistory, History
from telescope_core.diagnosis.rule import Finding, Kind, Rule
from telescope_core.diagnosis.rules import RULES, diagnose

__all__ = ["RULES", "Finding", "GrowingHistory", "History", "Kind", "Rule", "diagnose"]
