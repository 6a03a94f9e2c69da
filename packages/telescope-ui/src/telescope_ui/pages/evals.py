"""Evals, of a run or alone: points with intervals, paired verdicts, changed examples."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.evals.comparison import Comparison, Difference, compare_results
from telescope_core.evals.result import EvalResult, RewardSoFar, TaskScore
from telescope_core.reports.differences import cautions, sentence
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.parameters import EvalParameters, EvalRolloutsParameters
from telescope_ui.files.damage import answering
from telescope_ui.files.database import Database
from telescope_ui.files.eval_files import (
    EvalKey,
    EvalPlace,
    EvalRow,
    estimate,
    eval_key,
    eval_keys,
    key_of,
    main_estimate,
    problems_of,
    result_of,
    row_in,
    rows_of,
    texts_of,
)
from telescope_ui.index import queries
from telescope_ui.index.block_tables import block_files
from telescope_ui.index.one_eval import OneEval
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.search import LIMIT_S, excerpt
from telescope_ui.pages.happened import eval_points
from telescope_ui.pages.judged import eval_problems
from telescope_ui.pages.rollout import (
    Calls,
    calls_among,
    calls_of,
    extent_of_moments,
    reward_parts,
    row_answer,
    timeline_around,
)

_OF_POINT = ("state", "reason", "time_s", "num_scored", "num_failed", "duration_s", "version")


def evals_page(run: OneRun) -> JsonObject:
    """Return all evals of a run, by name and in the order of the weights."""
    noted = {(_name(point), str(point.get("tag"))): point for point in eval_points(run)}
    folder_of = {_key(folder, noted): folder for folder in eval_keys(run.path)}
    everything = {EvalKey(*key) for key in noted} | set(folder_of)
    by_name: dict[str, list[JsonObject]] = {}
    results: dict[str, list[tuple[str, EvalResult]]] = {}
    for key in sorted(everything, key=lambda key: (key.order, key)):
        folder = folder_of.get(key)
        result = None if folder is None else result_of(EvalPlace(run.path, folder))
        before = results.setdefault(key.name, [])
        point = _point(run, folder, key, noted=noted.get(key), result=result)
        point["versus_first"] = point["versus_previous"] = None
        if folder is not None and result is not None:
            if before:
                point["versus_first"] = _verdict(before[0], result)
                point["versus_previous"] = _verdict(before[-1], result)
            before.append((folder, result))
        by_name.setdefault(key.name, []).append(point)
    return {
        "page": "evals",
        "run": run.brief(),
        "evals": [{"name": name, "points": found} for name, found in sorted(by_name.items())],
        "problems": [*eval_problems(run).values(), *run.eval_points.problems()],
    }


def _name(point: JsonObject) -> str:
    return str(point.get("name"))


def _key(folder: str, noted: Mapping[tuple[str, str], JsonObject]) -> EvalKey:
    """Return the key of an eval by its name in the settings, as far as that is known.

    The name of a folder has no path: an eval of `./envs.py:Sums` is in `envs.py-Sums-before`.
    """
    own = key_of(folder)
    for point in noted.values():
        known = point["folder"]
        if known is not None and key_of(known).name == own.name:
            return EvalKey(_name(point), own.tag)
    return own


def _point(
    run: OneRun,
    folder: str | None,
    key: EvalKey,
    *,
    noted: JsonObject | None,
    result: EvalResult | None,
) -> JsonObject:
    found: JsonObject = {name: (noted or {}).get(name) for name in _OF_POINT}
    address = None if folder is None else run.address("evals", folder)
    found |= {"tag": key.tag, "folder": folder, "address": address, "measure": None}
    found |= {**dict.fromkeys(("mean", "low", "high", "num_tasks", "reward")), "pass_at": {}}
    if result is None:
        return found
    if noted is None:
        found |= {"state": "done", "duration_s": result.duration_s}
        found |= {"num_scored": result.num_scored, "num_failed": result.num_failed}
    pass_at = {str(k): estimate(value) for k, value in sorted(result.pass_at.items())}
    found |= {**main_estimate(result), "reward": estimate(result.reward), "pass_at": pass_at}
    return found


def _verdict(before: tuple[str, EvalResult], after: EvalResult) -> JsonObject | None:
    compared = compared_or_none(before[1], after)
    return None if compared is None else {**verdict(compared.main), "against": before[0]}


def compared_or_none(before: EvalResult, after: EvalResult) -> Comparison | None:
    """Return the comparison of two evals; None if they have no example in common."""
    try:
        return compare_results(before, after)
    except ConfigError:
        return None


def verdict(one: Difference) -> JsonObject:
    """Return a paired difference, and a sentence about it."""
    derived = {"change": one.change, "is_shown": one.is_shown, "sentence": sentence(one)}
    return {**asdict(one), **derived}


class _Shown(NamedTuple):
    """An eval on a page."""

    run: OneRun
    """The run of the eval; the eval itself if it belongs to no run."""
    folder: str
    """Folder among the evals of the run; empty for an eval without one."""

    @property
    def name(self) -> str:
        """Name by which it is chosen."""
        return self.folder or self.run.key

    @property
    def title(self) -> str:
        """Name that it was given, which another one may have too."""
        return self.folder or self.run.path.name

    @property
    def place(self) -> EvalPlace:
        return EvalPlace(self.run.path, self.folder)

    def address(self, *parts: object) -> str:
        """Return the address of the eval, or of a page below it."""
        return self.run.address(*(("evals", self.folder) if self.folder else ()), *parts)

    def first_rollouts(self) -> dict[str, tuple[str, str]]:
        """Return (group, address of its first rollout) of each example."""
        found: dict[str, tuple[str, str]] = {}
        for placed in rows_of(self.place):
            row = placed.row
            if row.example_id not in found:
                address = self.address("rollouts", row.group_id, row.index)
                found[row.example_id] = row.group_id, address
        return found


def eval_page(run: OneRun, folder: str, asked: EvalParameters) -> JsonObject:
    """Return one eval of a run, beside another of the same name."""
    key = eval_key(run.path, folder)
    keys = eval_keys(run.path)
    others = [
        (_Shown(run, name), other.order < key.order)
        for name, other in keys.items()
        if name != folder and other.name == key.name
    ]
    # An eval that was stopped and played again has two points, and the last one counts.
    point = {one["folder"]: one for one in eval_points(run)}.get(folder)
    version = None if point is None else point.get("version")
    return {
        **_page(_Shown(run, folder), others, asked.against),
        **{"folder": folder, "tag": key.tag, "version": version, "settings": {}},
    }


def standalone_eval_page(
    one: OneEval, all_evals: Sequence[OneEval], asked: EvalParameters
) -> JsonObject:
    """Return an eval without a run, beside another of the same environment."""
    own = result_of(one.place)
    others = [
        (_Shown(other, ""), _began(other) < _began(one))
        for other in sorted(all_evals, key=lambda other: (_began(other), other.key))
        for result in [result_of(other.place)]
        if own and result and other is not one and result.environment == own.environment
    ]
    return {
        **_page(_Shown(one, ""), others, asked.against),
        **{"folder": one.key, "tag": "", "version": None, "settings": one.config()},
    }


def _began(one: OneEval) -> str:
    """Return the start time of an eval, for sorting; unknown ones come first."""
    try:
        return one.info().started_at
    except ConfigError:
        return ""


class _Flip(NamedTuple):
    """An example whose share of solved rollouts changed, with its first rollout in both evals."""

    example_id: str
    before: float
    after: float
    change: float
    address_before: str | None
    address_after: str | None


class _Score(NamedTuple):
    """The score of an example in an eval without a result, in the form of a `TaskScore`."""

    example_id: str
    rewards: Sequence[float]
    num_solved: int | None
    num_failed: int


def _page(shown: _Shown, others: Sequence[tuple[_Shown, bool]], asked: str) -> JsonObject:
    """Return a page of an eval; `others`: further evals, and whether they come before it."""
    result = result_of(shown.place)
    against = _against(asked, others)
    other = None if against is None else result_of(against.place)
    compared = None if result is None or other is None else compared_or_none(other, result)
    where = shown.first_rollouts()
    flips: list[_Flip] = []
    if result is not None and other is not None and against is not None and compared is not None:
        flips = _flips(other, result, against.first_rollouts(), where)
    about = None if result is None else asdict(result)
    if about is not None:
        del about["tasks"]
    rows = [placed.row for placed in rows_of(shown.place)]
    so_far = RewardSoFar()
    for row in rows:
        if row.reward is not None:
            so_far.add(row.example_id, row.group_id, row.reward)
    return {
        "page": "eval",
        "run": shown.run.brief(),
        "environment": None if result is None else result.environment,
        "result": about,
        "so_far": {
            "num_rollouts": len(rows),
            "num_scored": so_far.num_scored,
            "reward": so_far.mean,
        },
        "against": None if against is None else against.name,
        "verdicts": []
        if compared is None or against is None
        else [{**verdict(one), "against": against.name} for one in compared.differences],
        "cautions": [] if compared is None else cautions(compared),
        "flips": {"columns": queries.as_columns(_Flip._fields, flips)},
        "num_gained": None if compared is None else sum(one.change > 0 for one in flips),
        "num_lost": None if compared is None else sum(one.change < 0 for one in flips),
        "tasks": {"columns": _tasks(_scores(rows) if result is None else result.tasks, where)},
        "others": [one.name for one, _ in others],
        "titles": {one.name: one.title for one in (shown, *(one for one, _ in others))},
        "address": shown.address(),
        "problems": [
            *problems_of(shown.place),
            *([] if against is None else problems_of(against.place)),
        ],
    }


def _against(asked: str, others: Sequence[tuple[_Shown, bool]]) -> _Shown | None:
    """Return the eval to compare with: the requested one, or else the one before."""
    by_name = {one.name: one for one, _ in others}
    if asked:
        if asked not in by_name:
            raise ParameterError(f"against: {unknown_name('eval', asked, list(by_name))}")
        return by_name[asked]
    earlier = [one for one, is_earlier in others if is_earlier]
    return earlier[-1] if earlier else None


def _share(task: TaskScore) -> float:
    return task.num_solved / len(task.rewards)


def _flips(
    before: EvalResult,
    after: EvalResult,
    old_where: dict[str, tuple[str, str]],
    new_where: dict[str, tuple[str, str]],
) -> list[_Flip]:
    """Return the examples whose solved share changed, those that got worse first."""
    old = {task.example_id: task for task in before.tasks if task.rewards and task.example_id}
    found: list[_Flip] = []
    for task in after.tasks:
        known = old.get(task.example_id)
        if known is None or not task.rewards or _share(known) == _share(task):
            continue
        addresses = (where.get(task.example_id, ("", None))[1] for where in (old_where, new_where))
        shares = (_share(known), _share(task), _share(task) - _share(known))
        found.append(_Flip(task.example_id, *shares, *addresses))
    return sorted(found, key=lambda one: (one.change, one.example_id))


def _scores(rows: Sequence[EvalRow]) -> list[_Score]:
    """Return the scores so far; what counts as solved is known with the result."""
    by_example: dict[str, list[EvalRow]] = {}
    for row in rows:
        by_example.setdefault(row.example_id, []).append(row)
    scores: list[_Score] = []
    for example_id, played in by_example.items():
        rewards = [row.reward for row in played if row.reward is not None]
        scores.append(_Score(example_id, rewards, None, len(played) - len(rewards)))
    return scores


def _tasks(tasks: Iterable[TaskScore | _Score], where: dict[str, tuple[str, str]]) -> JsonObject:
    names = (
        *("example_id", "mean", "num_solved", "num_rollouts", "num_failed", "group_id"),
        "address",
    )
    rows: list[Sequence[object]] = []
    for task in tasks:
        mean = sum(task.rewards) / len(task.rewards) if task.rewards else None
        counts = (task.num_solved, len(task.rewards), task.num_failed)
        rows.append((task.example_id, mean, *counts, *where.get(task.example_id, ("", None))))
    return queries.as_columns(names, rows)


def eval_rollout_page(
    run: OneRun,
    database: Database,
    folder: str,
    key: tuple[str, int],
    *,
    with_tokens: bool,
    known: Calls | None = None,
) -> JsonObject:
    """Return the rollout `key` of an eval: its group, and its number in it.

    `folder` is empty for an eval without a run. `known` are the model calls of many rollouts, where
    they are read together.
    """
    if folder:
        eval_key(run.path, folder)
    shown = _Shown(run, folder)
    group_id, index = key
    row = row_in(shown.place, group_id, index)
    own = ("step IS NULL AND environment = ?", [folder])
    read = partial(calls_of, run, database, row, within=own)
    calls = (
        answering(database.damage, lambda: block_files(run.path, "calls"), read)
        if known is None
        else calls_among(known, row, folder)
    )
    siblings = [one.row for one in rows_of(shown.place) if one.row.group_id == group_id]
    none: dict[str, Any] = {"columns": {}}
    result = result_of(shown.place)
    return {
        "page": "rollout",
        "run": run.brief(),
        **row_answer(run, row, with_tokens=with_tokens),
        "reward_parts": reward_parts(row, {} if result is None else result.reward_weights),
        "calls": {"columns": calls},
        "events": none,
        "siblings": {
            "columns": {
                "index": [one.index for one in siblings],
                "attempt": [1 for _ in siblings],
                "status": [one.status for one in siblings],
                "reward": [one.reward for one in siblings],
                "address": [shown.address("rollouts", one.group_id, one.index) for one in siblings],
            }
        },
        "addresses": {
            **dict.fromkeys(("group", "previous", "next")),
            "timeline": timeline_around(run, extent_of_moments(calls, {"time_s": []})),
            "eval": shown.address(),
            "example": run.address("examples", row.environment, row.example_id) if folder else None,
        },
    }


def eval_rollouts_page(run: OneRun, folder: str, asked: EvalRolloutsParameters) -> JsonObject:
    """Return the rollouts of an eval in which somebody says `q`, ignoring case, from `cursor` on.

    `folder` is empty for an eval without a run. An answer has `limit` hits, or fewer when the time
    of a search has passed.
    """
    if folder:
        eval_key(run.path, folder)
    shown = _Shown(run, folder)
    placed = rows_of(shown.place)
    rest = placed[asked.cursor :]
    wanted = asked.q.lower()
    deadline_s = time.monotonic() + LIMIT_S
    hits: list[Sequence[object]] = []
    at = asked.cursor
    for (row, _, _), texts in zip(rest, texts_of(shown.place, rest), strict=False):
        at += 1
        hit = next((text for text in texts if wanted in text.lower()), None)
        if hit is not None:
            where = shown.address("rollouts", row.group_id, row.index)
            said = excerpt(hit, wanted)
            hits.append(
                (row.example_id, row.group_id, row.index, row.status, row.reward, said, where)
            )
        if len(hits) == asked.limit or time.monotonic() > deadline_s:
            break
    names = ("example_id", "group_id", "index", "status", "reward", "excerpt", "address")
    is_complete = at >= len(placed)
    return {
        "page": "eval_rollouts",
        "run": run.brief(),
        "columns": queries.as_columns(names, hits),
        "search": {
            "next_cursor": None if is_complete else str(at),
            "num_searched": at,
            "num_rollouts": len(placed),
            "is_complete": is_complete,
        },
    }


def example_in_evals(run: OneRun, environment: str, example_id: str) -> list[JsonObject]:
    """Return the results of evals on one example, in the order of the weights."""
    points = {point["folder"]: point for point in eval_points(run)}
    found: list[JsonObject] = []
    for folder, key in eval_keys(run.path).items():
        result = result_of(EvalPlace(run.path, folder))
        if result is None or result.environment != environment:
            continue
        for task in result.tasks:
            if task.example_id == example_id:
                version: int | None = points.get(folder, {}).get("version")
                about: JsonObject = {"folder": folder, "tag": key.tag, "version": version}
                found.append({**about, "rewards": task.rewards, "num_solved": task.num_solved})
    return found
