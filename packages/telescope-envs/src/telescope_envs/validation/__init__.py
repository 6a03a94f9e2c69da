"""Validation of environments: a report of checks with evidence, under a versioned policy."""

from telescope_envs.validation.policy import CHECKS, POLICY_VERSION, Check
from telescope_envs.validation.processes import Subject
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
    GraderReport,
    ValidationOptions,
    check_grader,
    installed_subject,
    project_subject,
    validate_installed,
    validate_project,
    validate_wheel,
)
from telescope_envs.validation.runner import validate as validate_subject

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "Evidence",
    "GraderReport",
    "LEVELS",
    "Level",
    "Outcome",
    "POLICY_VERSION",
    "Report",
    "Severity",
    "Subject",
    "ValidationOptions",
    "Verdict",
    "check_grader",
    "installed_subject",
    "project_subject",
    "report_schema",
    "validate_installed",
    "validate_project",
    "validate_subject",
    "validate_wheel",
]
