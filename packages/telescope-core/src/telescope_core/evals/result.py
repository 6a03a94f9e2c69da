"""`EvalResult`: the result of an eval, computed from its rollout rows. Pure functions.

Rollouts are of three kinds: scored, failed and missing. A wrong or truncated answer is scored like
any other. A failed rollout has no reward and is never counted as 0; so has one that was canceled,
which counts among the failed ones.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple, TypeVar

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.number_text import counted, format_metric, plural
from telescope_core.base.solved import is_solved
from telescope_core.base.types import (
    ANSWER,
    CLUSTER,
    UNGRADABLE,
    EnvironmentDescription,
    JsonValue,
    MetricRange,
    RolloutStatus,
    Split,
    StopReason,
)
from telescope_core.evals.settings import EvalSettings
from telescope_core.evals.stats import (
    Estimate,
    majority_at_k,
    mean_of_rewards,
    success_rate,
)
from telescope_core.records.rows import RolloutRow

Number = TypeVar("Number", int, float)
TABLE_HEAD = ("measure", "mean", "95% interval", "tasks")
"""Heads of the columns of `table_lines`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The scored rollouts of one example, also of one that a source gave several times."""

    example_id: str
    rewards: tuple[float, ...]
    """Rewards of the rollouts that were scored."""
    num_solved: int
    """Rollouts at or above the success threshold."""
    num_failed: int
    """Rollouts without a reward."""
    cluster: str = ""
    """Cluster of the example; empty if it depends on no other."""
    majority: Mapping[int, float] = field(default_factory=dict[int, float])
    """k -> its maj@k, for each k above 2 that it has the rollouts for; empty if no rollout of the
    eval told its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The numbers of one eval, each with its denominator."""

    environment: str
    environment_version: str
    environment_record: EnvironmentRecord | None = None
    """The environment's code; None in results from before it was recorded."""
    environment_settings: Mapping[str, JsonValue] | None = None
    """The environment's own settings that were given; None where they are not known."""
    chat_template: str = ""
    """Digest of the file of a chat template; empty = the model's own, or the endpoint's."""
    model: str
    settings: EvalSettings
    success_threshold: float
    """Smallest reward that counts as solved in pass@k."""
    reward_min: float
    reward_max: float
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor of each part of the reward in their sum; empty where it is no such sum, and in results
    from before it was recorded."""
    num_tasks: int
    """Number of different examples that were requested, without repeated ones."""
    num_rollouts: int
    """Number of rollouts requested: examples times rollouts per example."""
    num_scored: int
    """Rollouts with a reward."""
    num_failed: int
    """Rollouts without a reward."""
    num_truncated: int
    """Scored rollouts with a turn that was cut by `max_tokens`."""
    stop_reasons: Mapping[StopReason, int] = field(default_factory=dict[StopReason, int])
    """Why a rollout ended -> number of scored rollouts; empty in results from before it was
    counted."""
    num_filtered: int = 0
    """Scored rollouts with a turn that the endpoint's content filter stopped."""
    num_refused: int = 0
    """Scored rollouts in which the endpoint declined to answer."""
    num_retried: int
    """Rollouts scored only after a failed attempt; each retry samples again."""
    num_failed_attempts: int = 0
    """Attempts that failed and were followed by another one."""
    num_ungradable: int | None = None
    """Scored rollouts with an answer that the grader could not read; None where it does not
    count them."""
    split_size: int | None = None
    """Number of examples in the split; None = endless, or not known."""
    num_held_out: int = 0
    """Examples of the environment's other split, which was not played."""
    num_dropped: int = 0
    """Rows of tables that are no examples of the split: they repeat others, or the other split
    holds them out."""
    failures: Mapping[str, int]
    """Reason -> number of rollouts without a reward."""
    reward: Estimate | None
    """Mean reward of scored rollouts; None when there are none."""
    reward_with_failures: Estimate | None
    """Mean reward with each failure counted at the environment's minimum: a lower bound."""
    pass_at: Mapping[int, Estimate | None]
    """k -> pass@k over the tasks with at least k scored rollouts."""
    pass_all: Mapping[int, Estimate | None]
    """k -> pass^k over the same tasks."""
    majority_at: Mapping[int, Estimate | None] = field(default_factory=dict[int, Estimate | None])
    """k -> maj@k over the same tasks, for k above 2: a vote of two is one of one. Empty where no
    rollout told its answer."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Unweighted mean of each part of the reward over examples, as `reward` is; empty in results
    from before it was computed."""
    metrics: Mapping[str, float]
    """Mean of each metric over the scored rollouts that have it."""
    metric_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of those rollouts, for each metric that a scored rollout lacks."""
    metric_ranges: Mapping[str, MetricRange] = field(default_factory=dict[str, MetricRange])
    """Declared limits of each metric, and whether lower is better."""
    mean_completion_tokens: float | None
    """Mean number of completion tokens of scored rollouts, over all their turns. Rollouts with a
    reply whose tokens the endpoint did not count are left out; None if no other is left."""
    mean_prompt_tokens: float | None = 0.0
    """Mean number of prompt tokens of the same rollouts, summed over all their turns."""
    num_prompt_tokens: int | None = None
    """Prompt tokens of all rollouts, also of failed ones; None if those of one are not known, and
    in results from before they were summed."""
    num_completion_tokens: int | None = None
    """Completion tokens likewise."""
    costs: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Metric such as `judge/cost` -> its sum over all rollouts, also over failed ones; None if that
    of one is not known."""
    num_http_retries: int = 0
    """Requests that were sent again because the endpoint was busy or did not answer, also those
    that failed in the end."""
    num_earlier: int = 0
    """Rollouts that were kept from before the eval was resumed."""
    duration_s: float
    """Seconds that the eval took; after it was resumed, without those of earlier sessions."""
    tasks: tuple[TaskScore, ...] = field(default=())

    def __str__(self) -> str:
        """Return its table and counts as lines, as `telescope eval` prints them."""
        lines = [TABLE_HEAD, *table_lines(self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()
            for name, *numbers in lines
        ]
        return "\n".join([self._title, *table, *count_lines(self)])

    def _repr_html_(self) -> str:
        """Return the same as HTML, which notebooks show."""
        rows = [
            f'<tr><td style="text-align:left;white-space:pre">{escape(name)}</td>'
            f"{''.join(f'<td>{text}</td>' for text in numbers)}</tr>"
            for name, *numbers in table_lines(self)
        ]
        notes = "".join(f"<p>{escape(line)}</p>" for line in count_lines(self))
        head = "".join(f"<th>{text}</th>" for text in TABLE_HEAD)
        return (
            f"<table><caption>{escape(self._title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}"
        )

    @property
    def _title(self) -> str:
        name = f"{self.environment} {self.environment_version}".rstrip()
        return f"{name}, model {self.model or 'unnamed'}"


@dataclass(slots=True)
class RewardSoFar:
    """The mean reward of an eval that goes on, over examples as in its result."""

    num_scored: int = 0
    """Rollouts with a reward."""
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    _sum_of_means: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean over examples; None without a reward."""
        return self._sum_of_means / len(self._sums) if self._sums else None

    def add(self, example_id: str, group_id: str, reward: float) -> None:
        """Count a rollout; a group of which the example is not known counts as one of its own."""
        name = f"id:{example_id}" if example_id else f"group:{group_id}"
        total, count = self._sums.get(name, (0.0, 0))
        before = total / count if count else 0.0
        self._sums[name] = (total + reward, count + 1)
        self._sum_of_means += (total + reward) / (count + 1) - before
        self.num_scored += 1


class Count(NamedTuple):
    """A number that qualifies a result, the same in the terminal and in reports."""

    number: int
    text: str
    """The words behind the number."""


def counts_of(result: EvalResult) -> list[Count]:
    """Return how many rollouts ended in each way beside a reward; ways with none are left out.

    The number cut by `max_tokens` is always listed, so that 0 is visible too.
    """
    cut = {
        StopReason.CONTEXT_LENGTH: "ended by the model's context",
        StopReason.MAX_TURNS: "ended by the limit of turns",
        StopReason.TIMEOUT: "ended by a time limit",
    }
    num_missing = result.num_rollouts - result.num_scored - result.num_failed
    counts = [
        Count(num_missing, "missing"),
        Count(result.num_failed_attempts, "played again after a failure"),
        *(Count(result.stop_reasons.get(reason, 0), text) for reason, text in cut.items()),
        Count(result.num_filtered, "stopped by a content filter"),
        Count(result.num_refused, "refused by the model"),
        Count(result.num_ungradable or 0, "with an answer that could not be graded"),
        Count(result.num_http_retries, f"{plural('request', result.num_http_retries)} sent again"),
    ]
    truncated = Count(result.num_truncated, "truncated by max_tokens")
    return [truncated, *(one for one in counts if one.number)]


def reward_parts(result: EvalResult) -> list[tuple[str, str, float]]:
    """Return (name, words about it, mean) of each part of the reward; empty if it has one alone."""
    if len(result.rewards) < 2:
        return []
    weights = result.reward_weights
    return [
        (name, f"weight {weights[name]:g}" if name in weights else "", mean)
        for name, mean in result.rewards.items()
    ]


def metric_lines(result: EvalResult) -> list[tuple[str, str, float]]:
    """Return (name, words about it, mean) of each metric."""
    lines: list[tuple[str, str, float]] = []
    for name, mean in result.metrics.items():
        known, count = result.metric_ranges.get(name), result.metric_counts.get(name)
        about = ["lower is better"] if known is not None and known.lower_is_better else []
        about += [] if count is None else [f"of {count} rollouts"]
        lines.append((name, ", ".join(about), mean))
    return lines


def success_measures(result: EvalResult) -> dict[str, Estimate | None]:
    """Return pass@k, maj@k and pass^k by name, without those that are pass@1 once more."""
    return {
        **{f"pass@{k}": estimate for k, estimate in sorted(result.pass_at.items())},
        **{f"maj@{k}": estimate for k, estimate in sorted(result.majority_at.items())},
        **{f"pass^{k}": estimate for k, estimate in sorted(result.pass_all.items()) if k > 1},
    }


def table_lines(result: EvalResult) -> list[tuple[str, str, str, str]]:
    """Return the lines under `TABLE_HEAD`: all estimates, and the means of parts and metrics."""
    estimates = {"reward": result.reward}
    if result.num_failed:
        estimates["reward, failures at minimum"] = result.reward_with_failures
    parts = [(f"  {name}", about, mean) for name, about, mean in reward_parts(result)]
    return [
        *_lines_of_estimates(estimates),
        *_lines_of_means(parts),
        *_lines_of_estimates(success_measures(result)),
        *_lines_of_means(metric_lines(result)),
    ]


def _lines_of_estimates(
    estimates: Mapping[str, Estimate | None],
) -> Iterator[tuple[str, str, str, str]]:
    for name, one in estimates.items():
        if one is None:
            yield (name, "-", "-", "0")
        else:
            yield (name, one.mean_text, one.interval_text, str(one.num_tasks))


def _lines_of_means(
    means: Sequence[tuple[str, str, float]],
) -> Iterator[tuple[str, str, str, str]]:
    for name, about, mean in means:
        yield (f"{name}{about and f', {about}'}", format_metric(mean), "", "")


def count_lines(result: EvalResult) -> list[str]:
    """Return the lines that count how rollouts ended, and those that were not played."""
    parts = [f"{result.num_scored} of {counted(result.num_rollouts, 'rollout')} scored"]
    if result.num_failed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in result.failures.items())
        parts.append(f"{result.num_failed} failed ({reasons})")
    parts += [f"{one.number} {one.text}" for one in counts_of(result)]
    parts += [f"{number} {text}" for number, text in spent_in(result)]
    parts.append(f"{result.duration_s:.1f} s{duration_note(result)}")
    left = [f"{one.number:,} {one.text}" for one in left_out_of(result)]
    not_played = f"Not played: {'; '.join(left)}" if left else ""
    return [line for line in ("; ".join(parts), clusters_note(result), not_played) if line]


def format_tokens(mean: float | None) -> str:
    """Return a mean number of tokens as text; a dash where the endpoint did not count them."""
    return "-" if mean is None else f"{mean:.0f}"


def spent_in(result: EvalResult) -> list[tuple[str, str]]:
    """Return numbers of what all rollouts used, failed ones included, each with its words.

    A dash stands for a number that is not known.
    """
    tokens = {"prompt": result.num_prompt_tokens, "completion": result.num_completion_tokens}
    return [
        (format_tokens(result.mean_completion_tokens), "tokens each"),
        *(
            ("-" if number is None else f"{number:,}", f"{kind} tokens in all")
            for kind, number in tokens.items()
        ),
        *(
            (
                "-" if cost is None else f"{cost:,.2f}" if cost >= 1000 else f"{cost:.4g}",
                f"{name} in all",
            )
            for name, cost in result.costs.items()
        ),
    ]


def clusters_note(result: EvalResult) -> str:
    """Return a sentence about clusters of examples; empty if the eval has none."""
    found = [one for one in (result.reward, *result.pass_at.values()) if one is not None]
    if not found or not found[0].num_clusters:
        return ""
    return (
        f"The {found[0].num_tasks} scored examples are in {found[0].num_clusters} "
        f"cluster{'s' * (found[0].num_clusters > 1)} of examples that depend on each other; "
        "intervals are over clusters."
    )


def duration_note(result: EvalResult) -> str:
    """Return what stands behind the duration of an eval that was resumed; empty for others."""
    if not result.num_earlier:
        return ""
    return f" since it was resumed with {result.num_earlier:,} rollouts"


def left_out_of(result: EvalResult) -> list[Count]:
    """Return the numbers of examples and rows of the environment that this eval leaves out."""
    other = next(split for split in Split if split is not result.settings.split)
    not_chosen = (result.split_size or 0) - result.settings.num_examples
    counts = [
        Count(
            not_chosen,
            f"other {plural('example', not_chosen)} of the {result.settings.split} split",
        ),
        Count(
            result.num_held_out,
            f"{plural('example', result.num_held_out)} of the {other} split, which --split {other} "
            "plays",
        ),
        Count(
            result.num_dropped,
            f"{plural('row', result.num_dropped)} left out as repeated or held out",
        ),
    ]
    return [one for one in counts if one.number > 0]


def result_of(
    rows: Sequence[RolloutRow],
    settings: EvalSettings,
    description: EnvironmentDescription,
    *,
    model: str,
    duration_s: float,
    num_earlier: int = 0,
) -> EvalResult:
    """Compute the result from `rows`; missing rows are not part of any denominator."""
    scored = [row for row in rows if _is_scored(row)]
    failed = [row for row in rows if not _is_scored(row)]
    groups = _by_task(rows)
    ks = [k for k in settings.ks if k > 2] if any(ANSWER in row.tags for row in scored) else []
    tasks = tuple(_task_score(group, description.success_threshold, ks) for group in groups)
    counts = [(len(task.rewards), task.num_solved) for task in tasks]
    clusters = [task.cluster for task in tasks]
    low, high = description.reward_min, description.reward_max
    ungradable = [row.metrics[UNGRADABLE] for row in scored if UNGRADABLE in row.metrics]
    with_metric = Counter(name for row in scored for name in row.metrics)
    padded = [task.rewards + (low,) * task.num_failed for task in tasks]
    return EvalResult(
        environment=description.name,
        environment_version=description.version,
        model=model,
        settings=settings,
        success_threshold=description.success_threshold,
        reward_min=low,
        reward_max=high,
        reward_weights=dict(description.reward_weights),
        num_tasks=settings.num_examples - (len({row.group_id for row in rows}) - len(tasks)),
        num_rollouts=settings.num_examples * settings.rollouts,
        num_scored=len(scored),
        num_failed=len(failed),
        num_truncated=sum(
            row.is_truncated or row.stop_reason is StopReason.LENGTH for row in scored
        ),
        stop_reasons=dict(Counter(row.stop_reason for row in scored).most_common()),
        num_filtered=sum(row.is_filtered for row in scored),
        num_refused=sum(row.is_refused for row in scored),
        num_retried=sum("attempts" in row.tags for row in scored),
        num_failed_attempts=sum(row.attempt - 1 for row in rows),
        num_ungradable=sum(value > 0 for value in ungradable) if ungradable else None,
        split_size=description.num_examples.get(settings.split),
        num_held_out=sum(
            size or 0
            for split, size in description.num_examples.items()
            if split is not settings.split
        ),
        num_dropped=description.num_dropped.get(settings.split, 0),
        failures=dict(Counter(row.status_reason or row.status for row in failed).most_common()),
        reward=mean_of_rewards(
            [task.rewards for task in tasks], minimum=low, maximum=high, clusters=clusters
        ),
        reward_with_failures=mean_of_rewards(padded, minimum=low, maximum=high, clusters=clusters),
        pass_at={k: success_rate(counts, k, every=False, clusters=clusters) for k in settings.ks},
        pass_all={k: success_rate(counts, k, every=True, clusters=clusters) for k in settings.ks},
        majority_at={
            k: mean_of_rewards(
                [[task.majority[k]] if k in task.majority else [] for task in tasks],
                clusters=clusters,
            )
            for k in ks
        },
        rewards=_means(
            [_means([row.rewards for row in group if _is_scored(row)]) for group in groups]
        ),
        metrics=_means([row.metrics for row in scored]),
        metric_counts={name: count for name, count in with_metric.items() if count < len(scored)},
        metric_ranges=description.metrics,
        mean_completion_tokens=_mean_of_known([row.num_completion_tokens for row in scored]),
        mean_prompt_tokens=_mean_of_known([row.num_prompt_tokens for row in scored]),
        num_prompt_tokens=_sum_of_known([row.num_prompt_tokens for row in rows], 0),
        num_completion_tokens=_sum_of_known([row.num_completion_tokens for row in rows], 0),
        costs=_costs(rows),
        num_http_retries=sum(row.num_http_retries for row in rows),
        num_earlier=num_earlier,
        duration_s=duration_s,
        tasks=tasks,
    )


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over those that have it."""
    names = sorted({name for one in values for name in one})
    return {name: _mean([one[name] for one in values if name in one]) for name in names}


def _is_scored(row: RolloutRow) -> bool:
    return row.status is RolloutStatus.KEPT and row.reward is not None


def _by_task(rows: Sequence[RolloutRow]) -> list[list[RolloutRow]]:
    """Return the rows of each example; a source that runs out of examples may repeat them."""
    example_of = {row.group_id: row.example_id for row in rows if row.example_id}
    groups: dict[str, list[RolloutRow]] = {}
    for row in sorted(rows, key=lambda row: (row.group_id, row.index)):
        # A group that failed before it had its example is a task of its own, without a name.
        name = example_of.get(row.group_id, "")
        groups.setdefault(f"id:{name}" if name else f"group:{row.group_id}", []).append(row)
    return list(groups.values())


def _task_score(group: Sequence[RolloutRow], threshold: float, ks: Sequence[int]) -> TaskScore:
    """Return the score of the rollouts of one example, with maj@k for `ks`."""
    rewards: list[float] = []
    votes: dict[str | None, tuple[int, int]] = {}
    for row in group:
        if row.status is RolloutStatus.KEPT and row.reward is not None:
            rewards.append(row.reward)
            given, solved = votes.get(row.tags.get(ANSWER), (0, 0))
            solved += is_solved(row.reward, threshold)
            votes[row.tags.get(ANSWER)] = (given + 1, solved)
    num_solved = sum(solved for _, solved in votes.values())
    without, _ = votes.pop(None, (0, 0))
    cast_votes = tuple(sorted(votes.values()))
    return TaskScore(
        example_id=next((row.example_id for row in group if row.example_id), ""),
        rewards=tuple(rewards),
        num_solved=num_solved,
        num_failed=len(group) - len(rewards),
        cluster=next((row.tags[CLUSTER] for row in group if CLUSTER in row.tags), ""),
        majority={k: majority_at_k(cast_votes, without, k) for k in ks if k <= len(rewards)},
    )


def _costs(rows: Sequence[RolloutRow]) -> dict[str, float | None]:
    names = {name for row in rows for name in row.metrics if name.endswith("/cost")}
    return {
        name: _sum_of_known(
            [
                row.metrics.get(name)
                for row in rows
                if name in row.metrics or f"{name.removesuffix('cost')}calls" in row.metrics
            ],
            0.0,
        )
        for name in sorted(names)
    }


def _sum_of_known(values: Sequence[Number | None], start: Number) -> Number | None:
    """Return the sum; None if one of the values is unknown."""
    known = [value for value in values if value is not None]
    return sum(known, start) if len(known) == len(values) else None


def _mean_of_known(values: Sequence[int | None]) -> float | None:
    """Return the mean without unknown values; None if there are no others."""
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    # Exactly rounded, so that it does not depend on the order in which rollouts end.
    return math.fsum(values) / len(values) if values else 0.0
