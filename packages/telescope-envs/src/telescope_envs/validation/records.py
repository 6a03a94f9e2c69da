"""The report of a validation: checks with their outcomes, evidence and fixes.

Publishing and the registry read the report back, so these are pydantic records. Its digest is that
of its canonical JSON: sorted keys, no spaces, UTF-8.
"""

import json
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from telescope_envs.records.files import sha256_of

FORMAT_VERSION = 1
EXAMPLES_FROM = "examples_from"
"""Fact with the source of examples, if it is not the declared one."""
FIXTURE_ROWS = "fixture rows"
SETTINGS = "settings"
"""Fact with the given settings of the environment as JSON, without secrets."""


class Level(StrEnum):
    """A group of checks. Each level makes sense only if the ones before it have passed."""

    STATIC = "static"
    """The files: no code of the environment runs."""
    LOAD = "load"
    """Importing it, building it, reading examples."""
    REWARD = "reward"
    """Playing rollouts with scripted answers."""
    LEAKAGE = "leakage"
    """The prompts of the policy, its tools, and leftovers of a rollout."""


class Severity(StrEnum):
    """Effect of a finding on the verdict."""

    FAIL = "fail"
    """The environment cannot be published."""
    WARN = "warn"
    """The environment can be published, but not with `--strict`."""


class Outcome(StrEnum):
    """The outcome of a check."""

    PASS = "pass"
    """It was completed, without findings."""
    WARN = "warn"
    """It has a finding that does not prevent publishing the environment."""
    FAIL = "fail"
    """It has a finding that prevents publishing the environment."""
    INCONCLUSIVE = "not conclusive"
    """Too little of it could be tried, and that need not be the environment's fault; `reason` says
    how much. It never counts as a pass, nor as a failure."""
    NOT_RUN = "not run"
    """It could not run, or was not requested, for the given `reason`. It never counts as a pass."""
    NOT_APPLICABLE = "not applicable"
    """There is nothing to check, such as the tools of an environment without tools."""


class Verdict(StrEnum):
    """The report in one word."""

    PASS = "pass"
    """Every applicable, requested check was completed, without findings."""
    WARN = "warn"
    """Only checks of severity warn have findings."""
    INCONCLUSIVE = "not conclusive"
    """Nothing failed, but a check that was asked for is not conclusive. It cannot be published on
    this report; validating again may decide it."""
    FAIL = "fail"
    """A check of severity fail has a finding, or a requested check could not run."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class Evidence(_Record):
    """One finding of a check."""

    text: str
    example_id: str = ""
    """The id of the example of the finding."""
    completion: str = ""
    """The scripted answer of the policy, shortened."""


class CheckResult(_Record):
    """One check with its findings."""

    id: str
    level: Level
    severity: Severity
    outcome: Outcome
    reason: str = ""
    """Reason why it did not run, is not conclusive, or does not apply."""
    evidence: tuple[Evidence, ...] = ()
    fix: str = ""
    """Advice; empty unless there is a finding."""


class Report(_Record):
    """All findings of one validation."""

    format: int = FORMAT_VERSION
    policy: str
    """Version of the policy, the table of checks."""
    environment: str
    """`owner/name`, or the requested name if its id cannot be read."""
    version: str = ""
    wheel_sha256: str = ""
    """sha256 of the wheel that was validated; empty if there is none."""
    core_version: str = ""
    """Version of telescope-core, which played the rollouts."""
    python: str = ""
    level: Level
    """The last requested level."""
    num_examples: int
    """Number of examples of each split to check."""
    created_at: datetime
    verdict: Verdict
    checks: tuple[CheckResult, ...]
    facts: dict[str, float | str] = {}
    """Measurements such as `rollouts_per_second`, which do not affect the verdict."""

    @property
    def is_complete(self) -> bool:
        """Whether every level was requested, as publishing requires."""
        return self.level is Level.LEAKAGE

    @property
    def checked_on(self) -> str:
        """`fixture rows` if rows of the author's own stood in for datasets; else empty."""
        return str(self.facts.get(EXAMPLES_FROM, ""))

    @property
    def canonical_json(self) -> bytes:
        """The bytes whose digest a registry keeps."""
        plain = self.model_dump(mode="json")
        return json.dumps(
            plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()

    @property
    def sha256(self) -> str:
        """Digest of `canonical_json`."""
        return sha256_of(self.canonical_json)

    def found(self, outcome: Outcome) -> list[CheckResult]:
        """Return the checks with one outcome."""
        return [check for check in self.checks if check.outcome is outcome]


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    return Report.model_json_schema(mode="serialization")


def verdict_of(checks: tuple[CheckResult, ...], *, asked: tuple[Level, ...]) -> Verdict:
    """Return the verdict of `checks`; a requested check that did not run is a failure."""
    outcomes = {check.outcome for check in checks}
    is_owed = any(check.level in asked and check.outcome is Outcome.NOT_RUN for check in checks)
    if Outcome.FAIL in outcomes or is_owed:
        return Verdict.FAIL
    if Outcome.INCONCLUSIVE in outcomes:
        return Verdict.INCONCLUSIVE
    return Verdict.WARN if Outcome.WARN in outcomes else Verdict.PASS
