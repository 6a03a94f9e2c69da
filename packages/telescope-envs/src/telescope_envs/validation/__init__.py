"""Validating environments: a report of checks with evidence, under a versioned policy."""

from telescope_envs.validation.policy import CHECKS, POLICY_VERSION, Check
from telescope_envs.validation.records import (
    CheckResult,
    Evidence,
    Level,
    Outcome,
    Report,
    Severity,
    Verdict,
    report_schema,
)
from telescope_envs.validation.runner import (
    LEVELS,
    ValidationOptions,
    validate_installed,
    validate_project,
    validate_wheel,
)

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "Evidence",
    "LEVELS",
    "Level",
    "Outcome",
    "POLICY_VERSION",
    "Report",
    "Severity",
    "ValidationOptions",
    "Verdict",
    "report_schema",
    "validate_installed",
    "validate_project",
    "validate_wheel",
]
