"""Validating a project, a wheel or an installed environment: its levels, in order.

A level that cannot be done because one before it found a failure is reported as not run, with the
reason. The work is in one module for each level; how bad a finding is, is in policy.py.
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from telescope_core.errors import ConfigError, nearest
from telescope_envs.validation import metadata
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.policy import CHECKS, POLICY_VERSION
from telescope_envs.validation.records import Level, Report, verdict_of
from telescope_envs.validation.static import check_static
from telescope_envs.validation.subject import Subject

LEVELS = (Level.STATIC,)
"""In the order in which they are done."""
DEFAULT_EXAMPLES = 16


def _silent(step: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationOptions:
    """How much is done."""

    level: Level = LEVELS[-1]
    """The last level that is done."""
    num_examples: int = DEFAULT_EXAMPLES
    """Examples of each split that are looked at."""
    progress: Callable[[str], None] = _silent
    """Told each step."""


_DEFAULTS = ValidationOptions()


def validate_project(folder: Path, options: ValidationOptions = _DEFAULTS) -> Report:
    """Validate the project in `folder`; it is built first. Raises ConfigError where there is none.

    Everything that is wrong with the environment is in the report.
    """
    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(_no_project(folder))
    return _validate(Subject(label=folder.resolve().name, project=folder.resolve()), options)


def validate_wheel(data: bytes, filename: str, options: ValidationOptions = _DEFAULTS) -> Report:
    """Validate a wheel; what only a project can show, such as its pyproject.toml, is left out."""
    return _validate(Subject(label=filename, wheel_name=filename, wheel=data), options)


def _validate(subject: Subject, options: ValidationOptions) -> Report:
    findings = Findings()
    asked = LEVELS[: LEVELS.index(options.level) + 1]
    blocked = ""
    for level in LEVELS:
        if level not in asked:
            findings.not_run(_checks_of(level), "not asked for")
        elif blocked:
            findings.not_run(_checks_of(level), blocked)
        else:
            options.progress(f"{subject.label}: {level} checks")
            subject = check_static(subject, findings)
            if findings.has_failed(level):
                blocked = f"the {level} level failed"
    checks = findings.results("the level ended before it")
    return Report(
        policy=POLICY_VERSION,
        environment=subject.label,
        version=metadata.version_in(subject.metadata),
        wheel_sha256=hashlib.sha256(subject.wheel).hexdigest() if subject.wheel else "",
        core_version=version("telescope-core"),
        python=platform.python_version(),
        level=options.level,
        num_examples=options.num_examples,
        created_at=datetime.now(UTC).replace(microsecond=0),
        verdict=verdict_of(checks, asked=asked),
        checks=checks,
        facts=findings.facts,
    )


def _checks_of(level: Level) -> list[str]:
    return [check.id for check in CHECKS.values() if check.level is level]


def _no_project(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {str(folder)!r}; give a project folder, a wheel or a name"
    inside = [path.parent.name for path in sorted(folder.glob("*/pyproject.toml"))]
    close = nearest(folder.name, inside) or inside[:3]
    hint = f"; there is one in {', '.join(close)}" if close else ""
    return f"{folder} is no project: it has no pyproject.toml{hint}"
