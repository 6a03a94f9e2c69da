"""`telescope env check-grader`: find answers close to the right one that the grader accepts."""

from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict

from telescope_core.base.errors import ConfigError
from telescope_core.probes.completions import GOLD
from telescope_core.probes.near_gold import NEAR_GOLD
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.levels import Trial, check_load, run_probes
from telescope_envs.validation.processes import Subject
from telescope_envs.validation.records import Outcome, Verdict
from telescope_envs.validation.runner import ValidationOptions, trials
from telescope_envs.validation.static import check_static, version_in


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
    `not conclusive`: no answer of another value could be tried, or less than half of them."""
    num_examples: int
    kinds: tuple[GradedKind, ...]
    wrong: tuple[dict[str, Any], ...]
    """Each wrongly judged answer, with the right one, its example and its reward."""
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
    num_near = sum(one["kind"] != GOLD for one in played)
    is_enough = num_near > 0 and 2 * len(played) >= told["num_planned"]
    return GraderReport(
        environment=subject.label,
        version=version_in(subject.metadata),
        verdict=Verdict.FAIL if wrong else Verdict.PASS if is_enough else Verdict.INCONCLUSIVE,
        num_examples=told["num_examples"],
        kinds=tuple(kind for kind in kinds if kind.num_tried),
        wrong=wrong,
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
            "no number or formula, or does not stand in the gold answer"
        )
    missing = [kind.kind for kind in kinds if not kind.num_tried and kind.kind != GOLD]
    if missing and len(missing) < len(NEAR_GOLD):
        said.append(f"{', '.join(missing)}: no answer can be changed in this way")
    left = told["num_planned"] - len(told["played"])
    if left:
        said.append(f"{left} of {told['num_planned']} answers: the time was over")
    return said
