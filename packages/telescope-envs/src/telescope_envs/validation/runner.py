"""Validate a project, a wheel or an installed environment, level by level.

After a level that failed, the later ones are reported as not run, with the reason. The checks are
in other modules, and policy.py has the severity of each. `check_grader` is `telescope env
check-grader`, which finds answers close to the right one that the grader accepts.
"""

import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from telescope_core.base.errors import ConfigError, nearest, unknown_name
from telescope_core.base.protocols import EnvironmentPlace
from telescope_core.base.secret_names import without_secrets
from telescope_core.finding.schemes import adapted
from telescope_core.probes.completions import GOLD
from telescope_core.probes.near_gold import NEAR_GOLD
from telescope_envs.install.packages import packages_of
from telescope_envs.install.steps import Progress, silent
from telescope_envs.locator import InstalledLocator, module_of, usable_names
from telescope_envs.publish.build import left_out
from telescope_envs.records.files import sha256_of
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.fixture_hub import FOLDER, FixtureHub
from telescope_envs.validation.levels import (
    Trial,
    check_leakage,
    check_load,
    check_reward,
    run_probes,
)
from telescope_envs.validation.policy import CHECKS, POLICY_VERSION
from telescope_envs.validation.processes import Subject, prepare_place
from telescope_envs.validation.records import (
    EXAMPLES_FROM,
    FIXTURE_ROWS,
    SETTINGS,
    Level,
    Outcome,
    Report,
    Verdict,
    verdict_of,
)
from telescope_envs.validation.static import check_static, version_in

LEVELS = (Level.STATIC, Level.LOAD, Level.REWARD, Level.LEAKAGE)
"""The levels, in the order in which they run."""
DEFAULT_EXAMPLES = 16
_TRIED = {Level.LOAD: check_load, Level.REWARD: check_reward, Level.LEAKAGE: check_leakage}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationOptions:
    """Extent of a validation."""

    level: Level = LEVELS[-1]
    """The last level to run."""
    num_examples: int = DEFAULT_EXAMPLES
    """Number of examples of each split to check."""
    allow_sdist: tuple[str, ...] = ()
    """Dependencies that may be built from source if this Python does not have them."""
    fixture_rows: bool = False
    """Whether datasets of the Hub are replaced by the rows in the project's folder fixture-rows, of
    which the report tells."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the environment to check it with, such as the address of a judge, of which the
    report tells. The others have their defaults."""
    progress: Progress = silent
    """Called with each step."""


_DEFAULTS = ValidationOptions()


def validate_project(
    folder: Path,
    options: ValidationOptions = _DEFAULTS,
    *,
    interpreter: str = sys.executable,
) -> Report:
    """Build and validate the project in `folder`; raises ConfigError if there is none.

    Everything that is wrong with the environment is in the report. `interpreter`: as in `Subject`.
    """
    return validate(project_subject(folder, interpreter=interpreter), options)


def project_subject(folder: Path, *, interpreter: str = sys.executable) -> Subject:
    """Return the project in `folder`; raises ConfigError if there is none."""
    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(_no_project(folder))
    place = folder.resolve()
    return Subject(label=place.name, project=place, interpreter=interpreter)


def validate_wheel(data: bytes, filename: str, options: ValidationOptions = _DEFAULTS) -> Report:
    """Validate a wheel, without the checks that need a project, such as its pyproject.toml."""
    return validate(Subject(label=filename, wheel_name=filename, wheel=data), options)


def validate_installed(name: str, options: ValidationOptions = _DEFAULTS) -> Report:
    """Validate the environment `name`: a linked project, or one installed in an interpreter.

    Raises UnknownNameError if no environment of that name is installed.
    """
    return validate(installed_subject(name), options)


def installed_subject(name: str) -> Subject:
    """Return the linked or installed environment `name`; raises UnknownNameError without one.

    Raises ConfigError for one of another framework: the checks are about a package of Telescope.
    """
    if (found := adapted(name)) is not None:
        instead = (
            f"check its tasks with: telescope env validate {name}"
            if found.scheme == "harbor"
            else "linking it checks that it can be built. To see its rewards, play some examples: "
            f"telescope eval {name} --model MODEL --examples 4"
        )
        raise ConfigError(
            f"{name} is an environment of another framework ({found.scheme}:), and the checks read "
            "the package, the declarations and the gold answers of an environment of Telescope; "
            f"{instead}"
        )
    locator = InstalledLocator()
    location = locator.locate(name)
    if location is None:
        hint = locator.hint(name)
        text = f"({hint})" if hint else ""
        raise unknown_name("installed environment", name, usable_names(), text)
    if location.place is EnvironmentPlace.LINKED:
        return project_subject(Path(location.registry))
    found = packages_of(location.interpreter).get(module_of(location).replace("_", "-"))
    metadata = (found.read_text("METADATA") or "") if found is not None else ""
    return Subject(
        label=location.id,
        metadata=metadata.encode(),
        factory=location.factory,
        interpreter=location.interpreter,
        secrets=location.secrets,
    )


def validate(subject: Subject, options: ValidationOptions = _DEFAULTS) -> Report:
    """Validate a project, a wheel or an installation; all errors are in the report."""
    findings = Findings()
    if options.settings:
        findings.facts[SETTINGS] = json.dumps(without_secrets(options.settings), sort_keys=True)
    asked = LEVELS[: LEVELS.index(options.level) + 1]
    options.progress(f"{subject.label}: static checks")
    started_s = time.monotonic()
    subject = check_static(subject, findings)
    findings.facts["static_s"] = round(time.monotonic() - started_s, 2)
    with trials(subject, findings, options) as make_trial:
        _try_out(subject, findings, options, make_trial)
    for level in LEVELS:
        if level not in asked:
            findings.not_run(_checks_of(level), "not asked for")
    checks = findings.results("the level ended before this check")
    return Report(
        policy=POLICY_VERSION,
        environment=subject.label,
        version=version_in(subject.metadata),
        wheel_sha256=sha256_of(subject.wheel) if subject.wheel else "",
        core_version=version("telescope-core"),
        python=platform.python_version(),
        level=options.level,
        num_examples=options.num_examples,
        created_at=datetime.now(UTC).replace(microsecond=0),
        verdict=verdict_of(checks, asked=asked),
        checks=checks,
        facts=findings.facts,
    )


@contextmanager
def trials(
    subject: Subject, findings: Findings, options: ValidationOptions
) -> Generator[Callable[[], Trial | None]]:
    """Yield a function that makes `subject` importable, with its fixture rows if they are wanted.

    The function returns None if a dependency is missing in the place to import it.
    """
    with (
        tempfile.TemporaryDirectory(
            prefix="telescope-validate-", ignore_cleanup_errors=True
        ) as folder,
        _fixtures(subject, Path(folder), options) as environ,
    ):

        def make() -> Trial | None:
            allowed = options.allow_sdist
            place = prepare_place(subject, Path(folder), findings, allow_sdist=allowed)
            if place is None:
                return None
            return Trial(
                place=replace(place, environ=environ),
                factory=subject.factory,
                num_examples=options.num_examples,
                settings=options.settings,
                recorded=subject.secrets,
                tell=options.progress,
            )

        yield make


@contextmanager
def _fixtures(
    subject: Subject, scratch: Path, options: ValidationOptions
) -> Generator[dict[str, str]]:
    """Serve the project's fixture rows; yields the variables with their address, or none."""
    if not options.fixture_rows:
        yield {}
        return
    if subject.project is None or not (subject.project / FOLDER).is_dir():
        where = subject.project or subject.label
        raise ConfigError(
            f"there are no fixture rows for {where}: expected a project with a folder {FOLDER}; "
            "put rows of your own there as OWNER/NAME/FILE, named as in the dataset"
        )
    with FixtureHub(subject.project / FOLDER) as hub:
        yield hub.environ(scratch / "hub")


def _try_out(
    subject: Subject,
    findings: Findings,
    options: ValidationOptions,
    make_trial: Callable[[], Trial | None],
) -> None:
    """Run the levels that run the environment's code, up to the first failure."""
    trial: Trial | None = None
    before = Level.STATIC
    for level, check in _TRIED.items():
        if LEVELS.index(level) > LEVELS.index(options.level):
            return
        if findings.has_failed(before):
            findings.not_run(_checks_of(level), f"the {before} level failed")
            continue
        options.progress(f"{subject.label}: {level} checks")
        started_s = time.monotonic()
        if trial is None:
            trial = make_trial()
            if trial is None:
                findings.not_run(_checks_of(level), "its dependencies are missing")
                before = level
                continue
            if options.fixture_rows:
                findings.facts[EXAMPLES_FROM] = FIXTURE_ROWS
        trial = check(trial, findings)
        if findings.has_found("load.examples") and subject.project is not None:
            for line in left_out(subject.project, subject.files):
                findings.found("load.examples", line)
        findings.facts[f"{level}_s"] = round(time.monotonic() - started_s, 2)
        before = level


def _checks_of(level: Level) -> list[str]:
    return [check.id for check in CHECKS.values() if check.level is level]


def _no_project(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {str(folder)!r}; give a project folder, a wheel or a name"
    inside = [path.parent.name for path in sorted(folder.glob("*/pyproject.toml"))]
    close = nearest(folder.name, inside) or inside[:3]
    hint = f"; there is one in {', '.join(close)}" if close else ""
    return f"{folder} is not a project: it has no pyproject.toml{hint}"


class GradedKind(BaseModel):
    """Judgments of the grader on one kind of answers."""

    model_config = ConfigDict(frozen=True)

    kind: str
    what: str
    """The change to the right answer."""
    num_tried: int
    num_equal: int
    """Number of answers that earned the success threshold or more."""
    num_failed: int
    """Number of answers without a reward, because their rollout failed."""


class GraderReport(BaseModel):
    """Judgments of an environment's grader on gold answers, and on close but wrong ones."""

    model_config = ConfigDict(frozen=True)

    environment: str
    version: str
    verdict: Verdict
    """`fail`: a gold answer is refused, or an answer of another value is taken to be right.
    `not conclusive`: no answer of another value has a reward, or less than half of all or of a
    kind."""
    num_examples: int
    kinds: tuple[GradedKind, ...]
    wrong: tuple[dict[str, Any], ...]
    """Each wrongly judged answer, with the right one, its example and its reward."""
    failed: tuple[dict[str, Any], ...]
    """Each answer without a reward, with the error of its rollout."""
    not_tried: tuple[str, ...]
    """Answers that could not be tried, with reasons."""


def check_grader(subject: Subject, options: ValidationOptions) -> GraderReport:
    """Play gold answers and close ones; raises ConfigError if it cannot be loaded."""
    findings = Findings()
    subject = check_static(subject, findings)
    with trials(subject, findings, options) as make_trial:
        trial = make_trial() if subject.factory else None
        told = _replies(subject, trial, findings, options)
    played: list[dict[str, Any]] = told["played"]
    kinds = tuple(_kind(kind, played) for kind in (GOLD, *NEAR_GOLD))
    wrong = tuple(one for one in played if one["is_solved"] != (one["kind"] == GOLD))
    failed = tuple(one for one in played if one["reward"] is None)
    num_scored = len(played) - len(failed)
    is_enough = (
        any(kind.num_tried for kind in kinds if kind.kind != GOLD)
        and all(2 * kind.num_failed <= kind.num_tried for kind in kinds)
        and 2 * num_scored >= told["num_planned"]
    )
    return GraderReport(
        environment=subject.label,
        version=version_in(subject.metadata),
        verdict=Verdict.FAIL if wrong else Verdict.PASS if is_enough else Verdict.INCONCLUSIVE,
        num_examples=told["num_examples"],
        kinds=tuple(kind for kind in kinds if kind.num_tried),
        wrong=wrong,
        failed=failed,
        not_tried=tuple(_not_tried(told, kinds)),
    )


def _replies(
    subject: Subject, trial: Trial | None, findings: Findings, options: ValidationOptions
) -> dict[str, Any]:
    """Return the played answers; raises ConfigError with the reason if there are none."""
    if trial is not None:
        options.progress(f"{subject.label}: loading it")
        trial = check_load(trial, findings)
        options.progress(f"{subject.label}: playing answers near the right ones")
        (told,) = run_probes(trial, ("grading", 1))
        if "near_gold" in told.data:
            return told.data["near_gold"]
        if told.end:
            findings.found("reward.plays", told.end)
    said = [
        f"{check.id}: {check.evidence[0].text}"
        for check in findings.results("")
        if check.outcome is Outcome.FAIL
    ]
    raise ConfigError(
        f"{subject.label} cannot be played: {'; '.join(said) or 'nothing was reported'}; "
        "correct it, with: telescope env validate"
    )


def _kind(kind: str, played: list[dict[str, Any]]) -> GradedKind:
    mine = [one for one in played if one["kind"] == kind]
    outcomes = Counter((one["is_solved"], one["reward"] is None) for one in mine)
    return GradedKind(
        kind=kind,
        what=NEAR_GOLD.get(kind, "the right answer itself"),
        num_tried=len(mine),
        num_equal=sum(count for (is_solved, _), count in outcomes.items() if is_solved),
        num_failed=sum(count for (_, has_failed), count in outcomes.items() if has_failed),
    )


def _not_tried(told: dict[str, Any], kinds: tuple[GradedKind, ...]) -> list[str]:
    said: list[str] = []
    if told["num_without_gold"]:
        said.append(
            f"{told['num_without_gold']} of {told['num_examples']} examples: no gold answer"
        )
    if told["num_without_near"]:
        said.append(
            f"{told['num_without_near']} of {told['num_examples']} examples: the right answer is "
            "no number, formula or word, or does not stand in the gold answer"
        )
    missing = [kind.kind for kind in kinds if not kind.num_tried and kind.kind != GOLD]
    if missing and len(missing) < len(NEAR_GOLD):
        said.append(f"{', '.join(missing)}: no answer can be changed in this way")
    left = told["num_planned"] - len(told["played"])
    if left:
        said.append(f"{left} of {told['num_planned']} answers: the time was over")
    return said
