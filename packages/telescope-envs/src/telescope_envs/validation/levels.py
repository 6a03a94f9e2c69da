"""The levels that run the environment's code: their probe processes, and the findings."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from telescope_core.base.secret_names import require_own_secrets, secrets_line, shown_name
from telescope_core.probes.answers import Kind
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.fixture_hub import TOKEN
from telescope_envs.validation.processes import ProbePlace, ProbeReply, Task, make_job, run_together

_HUB_TOKEN = "HF_TOKEN"
MAX_IMPORT_S = 2.0
_LIMITS_S: dict[Kind, float] = {
    "load": 300.0,
    "reward": 900.0,
    "scores": 900.0,
    "leakage": 600.0,
    "grading": 900.0,
}
"""Wall time in seconds, so that a validation ends although something waits forever."""
_ENOUGH = 0.5
"""Share of the answers that both processes must play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An environment that can be imported, and how much of it to check."""

    place: ProbePlace
    factory: str
    num_examples: int
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings to build it with; the others have their defaults."""
    network: str = "none"
    """Network access that it declares."""
    secrets: tuple[str, ...] = ()
    recorded: tuple[str, ...] | None = None
    """Secrets with which its release was published; None = not recorded."""
    tell: Callable[[str], None] = lambda line: None
    """Called with the secrets that it gets, before it gets them."""

    @property
    def environ(self) -> dict[str, str]:
        """The declared secrets that are set here; fixture rows need no real token of the Hub."""
        found = {name: os.environ[name] for name in self.secrets if name in os.environ}
        if self.place.environ and _HUB_TOKEN in self.secrets:
            found[_HUB_TOKEN] = TOKEN
        return found


def check_load(trial: Trial, findings: Findings) -> Trial:
    """Import it, build it and read examples, in two processes.

    Returns the trial with the network and secrets that the environment declares.
    """
    told = run_probes(trial, ("load", 1), ("load", 2), has_secrets=False)
    told[0].tell(findings)
    while needs := told[0].data.get("needs"):
        # Its needs are known only once it is imported or built, so it is run again with them.
        trial = replace(trial, network=needs["network"], secrets=tuple(needs["secrets"]))
        require_own_secrets(trial.secrets, trial.factory)
        if trial.recorded is not None and (more := {*trial.secrets} - {*trial.recorded}):
            names = ", ".join(map(shown_name, sorted(more)))
            text = f"it asks for the secrets {names}, which it was published without"
            findings.found("load.declarations", text)
            return replace(trial, secrets=())
        if trial.secrets:
            trial.tell(secrets_line(trial.factory, trial.secrets, os.environ))
        told = run_probes(trial, ("load", 1), ("load", 2))
        told[0].tell(findings)
    _check_import_time(trial, told, findings)
    if told[1].end:
        record = findings.found if told[1].is_own_end else findings.inconclusive
        record("load.ids", f"in a second process: {told[1].end}")
    elif "problems" in told[0].data:
        _compare_problems(told[0].data["problems"], told[1].data.get("problems", []), findings)
    return trial


def _check_import_time(trial: Trial, told: list[ProbeReply], findings: Findings) -> None:
    times = [one.data for one in told if "import_s" in one.data]
    if not times:
        return
    if _shortest_import_s(times) > MAX_IMPORT_S:
        # The first two imports run at the same time and compile byte code. What counts is an import
        # that finds everything compiled.
        again = run_probes(trial, ("load", 3))
        times += [one.data for one in again if "import_s" in one.data]
    best = min(times, key=lambda time: time["import_s"] / time["slowness"])
    spent_s, slowness = best["import_s"], best["slowness"]
    findings.facts["import_s"] = round(spent_s, 3)
    if spent_s / slowness > MAX_IMPORT_S:
        pace = f", on a machine {slowness:.1f} times as slow as the reference"
        findings.found(
            "load.import_time",
            f"importing {trial.factory.partition(':')[0]} computes for {spent_s:.1f} s, "
            f"expected at most {MAX_IMPORT_S * slowness:.1f}{pace if slowness > 1 else ''}",
        )
    elif (longest := _shortest_import_s(times)) > MAX_IMPORT_S:
        findings.inconclusive(
            "load.import_time",
            f"importing it took {longest:.1f} s, {spent_s:.1f} s of which it computed: it "
            "waits for something, or the machine was busy",
        )
    findings.passed("load.import_time")


def _shortest_import_s(times: list[dict[str, Any]]) -> float:
    """Return the shortest of the imports, by the clock or computing, on the reference machine."""
    return min(max(one["import_s"], one["import_wall_s"]) / one["slowness"] for one in times)


def run_probes(
    trial: Trial, *probes: tuple[Kind, int], has_secrets: bool = True
) -> list[ProbeReply]:
    """Run probes of these kinds, each with its hash seed, at the same time."""
    tasks: list[Task] = []
    cuts_network, size = trial.network == "none", trial.num_examples
    for kind, seed in probes:
        job = make_job(trial.place, kind, trial.factory, size, cuts_network=cuts_network)
        job = replace(job, has_secrets=has_secrets, settings=dict(trial.settings))
        limit_s = _LIMITS_S[kind]
        tasks.append(Task(job=job, hash_seed=seed, environ=trial.environ, limit_s=limit_s))
    return run_together(trial.place, tasks)


def _compare_problems(
    first: list[dict[str, str]], second: list[dict[str, str]], findings: Findings
) -> None:
    if len(first) != len(second):
        findings.found(
            "load.ids", f"{len(first)} examples in one process, {len(second)} in another"
        )
    for one, other in zip(first, second, strict=False):
        text = ""
        if one["id"] != other["id"]:
            text = f"this example of split {one['split']} has id {other['id']!r} in another process"
        elif one["content"] != other["content"]:
            text = "its prompt, answer or info differs in another process"
        if text:
            findings.found("load.ids", text, example_id=one["id"])
    findings.passed("load.ids")


def check_reward(trial: Trial, findings: Findings) -> Trial:
    """Play scripted answers in one process, and some of them in a second one."""
    here, there = run_probes(trial, ("reward", 1), ("scores", 2))
    here.tell(findings)
    first, second = here.data.get("scores"), there.data.get("scores")
    check = "reward.deterministic"
    if there.end and not here.end:
        record = findings.found if there.is_own_end else findings.inconclusive
        record(check, f"in a second process: {there.end}")
    elif first is None or second is None:
        findings.inconclusive(check, "one of the two processes did not play any rollout")
    elif not findings.has_found(check):
        _compare_scores(first, second, findings)
    return trial


def _compare_scores(
    first: dict[str, list[Any]], second: dict[str, list[Any]], findings: Findings
) -> None:
    num_both, num_most = len(first.keys() & second.keys()), max(len(first), len(second))
    if num_both < _ENOUGH * num_most:
        findings.inconclusive(
            "reward.deterministic", f"only {num_both} of {num_most} played in both processes"
        )
    for key, (reward, rewards, example_id, completion) in first.items():
        other = second.get(key)
        if other is not None and [reward, rewards] != other[:2]:
            findings.found(
                "reward.deterministic",
                f"{key.rpartition('/')[2]} answer earns {reward}, but {other[0]} in another one",
                example_id=example_id,
                completion=completion,
            )
    findings.passed("reward.deterministic")


def check_leakage(trial: Trial, findings: Findings) -> Trial:
    """Check the prompts of the policy, the tools, and leftovers of a rollout."""
    (told,) = run_probes(trial, ("leakage", 1))
    told.tell(findings)
    return trial
