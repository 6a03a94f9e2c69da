"""The probe of the load level: import, build and read examples, and watch the code meanwhile."""

import asyncio
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from telescope_core.base.protocols import ExampleSource
from telescope_core.base.types import Example, Split
from telescope_core.environments import Environment, ToolEnvironment
from telescope_core.environments.building import class_location
from telescope_core.environments.settings import read_settings
from telescope_core.environments.sources import is_source
from telescope_core.finding.locate import load_environment_class
from telescope_core.probes.answers import Answers, Job
from telescope_core.probes.guards import AUDIT_HOOK, Guard, cut_off_network
from telescope_core.probes.meter import (
    Cut,
    Limits,
    Meter,
    MeteredSpan,
    WaitClock,
    processor_s,
    slowness,
)
from telescope_core.probes.schema_check import schema_problems

_MAX_READ = 2000
"""Most examples to read of a finite split; `_MAX_DRAWN` is that of an endless one."""
_MAX_DRAWN = 200
_READING = Limits(own_s=4.0, wall_s=60.0)
"""Time for one split, after which only the examples that were asked for are read."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_BUILT = ("load.settings", "load.tools", "load.declarations", "load.network", "load.examples")
_READ = ("load.ids", "load.splits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Digests that decide whether two examples are the same problem."""

    split: str
    id: str
    content: str
    """Digest of prompt, answer and info."""
    prompt: str
    """Digest of the prompt."""
    answer: str
    """Digest of the answer, or else of the gold answer; of nothing if there is neither."""
    info: str
    """Digest of the info, which holds the hidden state of a game."""
    has_answer: bool
    """Whether the example itself has an answer, so that its info need not hold it."""


def run_load(job: Job, answers: Answers) -> None:
    """Run the level and report on each of its checks."""
    guard = Guard(writable=[Path(path) for path in job.writable], own_folders=job.own_folders())
    answers.fact("network_cut_by", cut_off_network() if job.cuts_network else AUDIT_HOOK)
    guard.install()
    environment_class = _imported(job, answers, guard)
    if environment_class is None:
        return
    if environment_class.secrets and not job.has_secrets:
        answers.data("needs", {"network": "none", "secrets": list(environment_class.secrets)})
        return
    guard.phase = "build"
    guard.allows_loopback = True
    environment = build(environment_class, answers, job.settings)
    if environment is not None:
        guard.phase = "examples"
        guard.allows_network = not job.cuts_network
        is_declared = environment.network in ("load", "always")
        if job.cuts_network and is_declared:
            secrets = list(environment.secrets)
            answers.data("needs", {"network": environment.network, "secrets": secrets})
            return
        check_declarations(environment, answers)
        read_examples(environment, job.num_examples, answers)
        check_datasets(environment, answers)
        for attempt in () if is_declared else guard.seen("network", "build", "examples"):
            answers.found("load.network", f"{attempt.where} reaches for {attempt.what}")
        answers.passed("load.network")
    guard.phase = ""
    for attempt in guard.seen("write", "import", "build", "examples"):
        answers.found(
            "load.writes", f"{attempt.where or 'a package'} writes {attempt.what} ({attempt.phase})"
        )
    answers.passed("load.writes")


def _imported(job: Job, answers: Answers, guard: Guard) -> type[Environment] | None:
    answers.stage("load.import")
    guard.phase = "import"
    clock = WaitClock()
    began_s, spent_s = time.perf_counter() - clock.waited_s(), processor_s()
    found: list[type[Environment]] = []
    with answers.doing("load.import"):
        found.append(load_environment_class(job.factory))
    answers.data("import_s", processor_s() - spent_s)
    # Time spent waiting for a processor is left out: the machine may be busy with something else.
    answers.data("import_wall_s", time.perf_counter() - clock.waited_s() - began_s)
    answers.data("slowness", slowness())
    guard.phase = ""
    for attempt in guard.seen("network", "import"):
        answers.found("load.network", f"{attempt.where} reaches for {attempt.what} (import)")
    if not found:
        for check in (*_BUILT, *_READ, "load.datasets", "load.writes"):
            answers.not_run(check, "it cannot be imported")
    return next(iter(found), None)


def build(
    environment_class: type[Environment],
    answers: Answers,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Environment | None:
    """Return the environment with `settings` and defaults; None when it cannot be built."""
    built: list[Environment] = []
    with answers.doing("load.settings"):
        for problem in schema_problems(environment_class.Config.model_json_schema()):
            answers.found("load.settings", problem)
        owner = class_location(environment_class)
        built.append(
            environment_class(read_settings(environment_class.Config, settings, owner=owner))
        )
    environment = next(iter(built), None)
    if isinstance(environment, ToolEnvironment):
        with answers.doing("load.tools"):
            environment.function_tools()
    else:
        answers.not_applicable("load.tools", "it has no tools")
    if environment is None:
        for check in (*_BUILT[1:], *_READ, "load.datasets"):
            answers.not_run(check, "it cannot be built")
    return environment


def check_declarations(environment: Environment, answers: Answers) -> None:
    """Check the declared rewards, network and secrets."""
    low, high = environment.reward_min, environment.reward_max
    success = environment.success_threshold
    with answers.doing("load.declarations"):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            answers.found("load.declarations", f"rewards from {low!r} to {high!r} are not a range")
        elif not low < success <= high:
            answers.found(
                "load.declarations",
                f"success_threshold {success!r} is not above {low!r} and at most {high!r}",
            )
        if environment.network not in ("none", "load", "always"):
            answers.found(
                "load.declarations",
                f"network is {environment.network!r}, expected none, load or always",
            )
        for name in environment.secrets:
            if not _SECRET_NAME.fullmatch(name):
                answers.found("load.declarations", f"secret {name!r} is not the name of a variable")


def check_datasets(environment: Environment, answers: Answers) -> None:
    """Check that the datasets of its default settings are pinned."""
    with answers.doing("load.datasets"):
        revisions = environment.dataset_revisions()
        if not revisions:
            answers.not_applicable("load.datasets", "it loads no dataset by default")
        for name, revision in revisions.items():
            if not _COMMIT.fullmatch(revision):
                answers.found("load.datasets", f"{name}: {revision!r} is not a commit")


def read_examples(environment: Environment, num_examples: int, answers: Answers) -> None:
    """Check the ids and splits of all examples of finite splits, and of some of endless ones."""
    problems: list[Problem] = []
    with answers.doing("load.examples"):
        splits = environment.splits()
        if not splits:
            answers.found("load.examples", "it has no splits")
        for split in splits:
            given = environment.examples(split)
            # As it is: players refuse an id that comes twice, and here that is a check of its own.
            source = given if is_source(given) else environment.fetcher.source(split)
            size = source.num_examples
            answers.fact(f"examples_{split}", "endless" if size is None else float(size))
            problems += _read_split(environment, split, source, num_examples, answers)
    if answers.has_found("load.examples") and not problems:
        for check in _READ:
            answers.not_run(check, "no example can be read")
        return
    _check_overlap(problems, answers)
    head = {split: [one for one in problems if one.split == split] for split in Split}
    answers.data(
        "problems",
        [asdict(one) for found in head.values() for one in found[:num_examples]],
    )


def _read_split(
    environment: Environment,
    split: Split,
    source: ExampleSource,
    num_examples: int,
    answers: Answers,
) -> list[Problem]:
    size = source.num_examples
    if size is not None and size < 1:
        answers.found("load.examples", f"split {split} has {size} examples")
        return []
    wanted = max(_MAX_DRAWN, num_examples) if size is None else min(size, _MAX_READ)
    by_id: dict[str, Problem] = {}
    found: list[Problem] = []
    span = MeteredSpan(Meter(), _READING)
    for index in range(wanted):
        if index >= num_examples and (cut := span.cut) is not None:
            if cut is Cut.WALL:
                for check in _READ:
                    answers.inconclusive(
                        check,
                        f"only {index} of {wanted} examples of split {split} could be read in "
                        f"{_READING.wall_s:g} s: reading them waits",
                    )
            break
        example = source.example(index)
        if not _is_example(example, f"{split} {index}", answers):
            return found
        problem = _problem(environment, split, example, asks_gold=index < num_examples)
        other = by_id.setdefault(problem.id, problem)
        # An endless source may start over with the same examples.
        if other is not problem and (size is not None or other.content != problem.content):
            answers.found(
                "load.ids",
                f"two examples of split {split} have this id",
                example_id=problem.id,
            )
        found.append(problem)
    _check_end(source, size, split, answers)
    return found


def _check_end(source: ExampleSource, size: int | None, split: Split, answers: Answers) -> None:
    if size is None:
        return
    try:
        source.example(size)
    except IndexError:
        return
    answers.found(
        "load.examples",
        f"split {split} has {size} examples, but example {size} does not raise IndexError",
    )


def _is_example(example: object, where: str, answers: Answers) -> bool:
    if not isinstance(example, Example):
        answers.found("load.examples", f"example {where} is {example!r:.80}, expected an Example")
        return False
    if not example.id or not example.prompt:
        answers.found(
            "load.examples", f"example {where} has no id or no prompt", example_id=example.id
        )
        return False
    return True


def _problem(
    environment: Environment, split: Split, example: Example, *, asks_gold: bool
) -> Problem:
    prompt = _text(example.prompt)
    info = json.dumps(example.info, sort_keys=True, default=str)
    answer = example.answer or (_gold(environment, example) if asks_gold else "")
    return Problem(
        split=split,
        id=example.id,
        content=_digest(prompt, example.answer, info),
        prompt=_digest(prompt),
        answer=_digest(answer),
        info=_digest(info),
        has_answer=bool(example.answer),
    )


def _gold(environment: Environment, example: Example) -> str:
    """Return the gold answer as text; one that raises is reported by the reward level."""
    try:
        gold = asyncio.run(environment.caller.one("gold_answer", environment.gold_answer, example))
    except Exception:  # noqa: BLE001 - see above
        return ""
    return "" if gold is None else _text(gold)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    parts = cast(Sequence[Any], value)
    return "\n".join(str(getattr(part, "content", part)) for part in parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _check_overlap(problems: Sequence[Problem], answers: Answers) -> None:
    asked = Counter((problem.split, problem.prompt) for problem in problems)

    def question(problem: Problem) -> tuple[str, ...]:
        # A prompt that a split holds several times does not say which problem it is, as in a game
        # of hidden words; what tells its problems apart may stand in the info alone. Elsewhere the
        # info is left out: a row number would hide that one question is in both splits.
        is_told_apart = problem.has_answer and asked[problem.split, problem.prompt] == 1
        return (problem.prompt, problem.answer, "" if is_told_apart else problem.info)

    _report_shared("ids", [(one.id,) for one in problems], problems, answers)
    _report_shared("problems", [question(one) for one in problems], problems, answers)
    answers.passed("load.splits")


def _report_shared(
    what: str, keys: Sequence[tuple[str, ...]], problems: Sequence[Problem], answers: Answers
) -> None:
    """Report examples that share their `what` with an example of another split."""
    seen: dict[tuple[str, ...], Problem] = {}
    shared: Counter[str] = Counter()
    for key, problem in zip(keys, problems, strict=True):
        if seen.setdefault(key, problem).split != problem.split:
            shared[problem.id] += 1
    for example_id in list(shared)[:3]:
        answers.found(
            "load.splits",
            f"the {what} of {len(shared)} of {len(problems)} examples are in two splits, such as "
            "this one",
            example_id=example_id,
        )
