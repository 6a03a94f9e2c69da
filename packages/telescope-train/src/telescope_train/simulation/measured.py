"""Measure the speeds of a run's servers and ranks from its records.

Decoding is fitted to the model calls of the run: a call takes a fixed time, plus a time for each of
its tokens that grows with the other requests of its server. The trainer is fitted to the steps: a
time for each token, and one for each step. Both are least squares with no negative time.
`simulation.machines` has the same speeds from data sheets instead.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.events import AttemptEvent, Stage
from telescope_core.records.servers import ServerState
from telescope_train.batches.binning import sample_costs
from telescope_train.simulation.engine import EngineSpeed
from telescope_train.simulation.machines import Speeds
from telescope_train.simulation.servers import TOKENS_PER_ID, ServerTimes
from telescope_train.simulation.trainer import TrainerSpeed

WARM_UP = 3
"""Initial steps of a run that are left out, because their first calls compile and load."""
_MIN_STEPS, _MIN_CALLS = 5, 50
_CALLS_OF_UPDATE = 6
"""Number of round trips of a weight update: pause, begin, receive, finish, compare, resume."""


class Call(NamedTuple):
    """One model call of a run."""

    server: str
    began_s: float
    ended_s: float
    num_tokens: int
    """Number of tokens of the answer."""


def measured_speeds(run_folder: Path, *, hidden_size: int | None, slots: int) -> Speeds:
    """Return the speeds of one server and one rank of a run.

    `hidden_size` is the hidden size of its model; `slots` is the most requests of one server.
    Raises ConfigError if there is no run, or if it is too short.
    """
    folder = RunFolder.open(run_folder)
    metrics = [row for row in folder.metrics() if row["step"] > WARM_UP]
    rollouts = [row for row in folder.rollouts() if row.step > WARM_UP]
    calls = _calls(rollouts, folder.events())
    if len(metrics) < _MIN_STEPS or len(calls) < _MIN_CALLS:
        raise ConfigError(
            f"{run_folder} has {len(metrics)} steps after its first {WARM_UP} and {len(calls)} "
            f"model calls in them; expected at least {_MIN_STEPS} steps and {_MIN_CALLS} calls to "
            "measure speeds from. Let it run for longer"
        )
    engine, call_s = engine_speed(calls, _updates(folder), slots)
    update_s = float(np.median([row["time/sync_s"] for row in metrics]))
    # Control calls find the server idle, so that they cannot take longer than the whole update.
    round_trip_s = min(call_s, update_s / _CALLS_OF_UPDATE)
    transfer_s = update_s - _CALLS_OF_UPDATE * round_trip_s
    return Speeds(
        engine=engine,
        servers=ServerTimes(round_trip_s=round_trip_s, transfer_s=transfer_s),
        trainer=_trainer(
            metrics,
            rollouts,
            hidden_size=hidden_size or TrainerSpeed().hidden_size,
            num_ranks=int(folder.config().get("trainer", {}).get("trainer_num_workers", 1)),
            send_s=transfer_s,
        ),
    )


def fitted(columns_NK: NDArray[np.float64], seconds_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [K] the seconds of each column, none below 0, with the least squared error."""
    used = list(range(columns_NK.shape[1]))
    found_K = np.zeros(columns_NK.shape[1])
    while used:
        solved = np.linalg.lstsq(columns_NK[:, used], seconds_N, rcond=None)[0]
        if (solved >= 0).all():
            found_K[used] = solved
            break
        # A term with a negative time only fits noise, so the most negative one is left out.
        del used[int(np.argmin(solved))]
    return found_K


def engine_speed(
    calls: Sequence[Call], updates: Mapping[str, Sequence[tuple[float, float]]], slots: int
) -> tuple[EngineSpeed, float]:
    """Return an engine's speed, and the seconds of a call that are independent of its tokens.

    `updates`: by server, from when to when it was paused for new weights.
    """
    beside_N = requests_beside(calls)
    tokens_N = np.array([call.num_tokens for call in calls], np.float64)
    paused_N = np.array([_overlap(call, updates.get(call.server, ())) for call in calls])
    seconds_N = np.array([call.ended_s - call.began_s for call in calls]) - paused_N
    step_s, request_s, call_s = fitted(
        np.stack([tokens_N, tokens_N * beside_N, np.ones(len(calls))], axis=1), seconds_N
    )
    speed = EngineSpeed(
        slots=slots,
        step_s=float(step_s),
        step_per_request_s=float(request_s),
        step_per_cached_token_s=0.0,
        # A token of a prompt is as much work as one more token in a decode step.
        prefill_tokens_per_s=1.0 / max(float(request_s), 1e-9),
    )
    return speed, float(call_s)


def _trainer(
    metrics: Sequence[dict[str, Any]],
    rollouts: Sequence[RolloutRow],
    *,
    hidden_size: int,
    num_ranks: int,
    send_s: float,
) -> TrainerSpeed:
    lengths_N = np.array([_num_chain_tokens(row) for row in rollouts], np.int64)
    simulated_N = -(-lengths_N // TOKENS_PER_ID) * TOKENS_PER_ID
    # As the simulation counts it, so that what it rounds up is not counted twice.
    cost_of_token = sample_costs(simulated_N, hidden_size).sum() / max(1, lengths_N.sum())
    train_N = np.array([row["time/train_s"] for row in metrics])
    tokens_N = np.array([row["tokens/train_per_s"] for row in metrics]) * train_N
    costs_N = tokens_N * cost_of_token / num_ranks
    cost_s, step_s = fitted(np.stack([costs_N, np.ones(len(costs_N))], axis=1), train_N)
    between_s = float(np.median([row["time/wait_s"] for row in metrics]))
    return TrainerSpeed(
        tokens_per_s=1.0 / max(float(cost_s), 1e-12),
        hidden_size=hidden_size,
        # The driver's work between two steps delays the next one in the same way.
        optimizer_s=float(step_s) + between_s,
        send_s=send_s,
    )


def _calls(rollouts: Sequence[RolloutRow], events: Sequence[AttemptEvent]) -> list[Call]:
    """Return the model calls of `rollouts`, in order of their starts."""
    by_attempt: defaultdict[tuple[str, int, int], list[AttemptEvent]] = defaultdict(list)
    for event in events:
        by_attempt[event.group_id, event.index, event.attempt].append(event)
    calls: list[Call] = []
    for row in rollouts:
        own = sorted(by_attempt[row.group_id, row.index, row.attempt], key=lambda one: one.time_s)
        spans = [pair for pair in pairwise(own) if pair[0].stage is Stage.GENERATING]
        answers = [one.num_completion_ids for one in row.tokens or () if one is not None]
        if len(spans) == len(answers):
            calls += [
                Call(begun.server, begun.time_s, ended.time_s, num_tokens)
                for (begun, ended), num_tokens in zip(spans, answers, strict=True)
            ]
    return sorted(calls, key=lambda call: call.began_s)


def requests_beside(calls: Sequence[Call]) -> NDArray[np.float64]:
    """Return [N] the mean number of requests on its server during each call, including itself."""
    found_N = np.zeros(len(calls))
    for server in {call.server for call in calls}:
        own = [index for index, call in enumerate(calls) if call.server == server]
        began = sorted(calls[index].began_s for index in own)
        ended = sorted(calls[index].ended_s for index in own)
        began_sums, ended_sums = list(accumulate(began)), list(accumulate(ended))

        def seconds_until(time_s: float, times: Sequence[float], sums: Sequence[float]) -> float:
            """Return the sum over `times` before `time_s` of the seconds since then."""
            count = bisect_right(times, time_s)
            return count * time_s - (sums[count - 1] if count else 0.0)

        for index in own:
            call = calls[index]
            # Request-seconds up to a moment: those since all starts, less those since all ends.
            busy_s = [
                seconds_until(moment, began, began_sums) - seconds_until(moment, ended, ended_sums)
                for moment in (call.began_s, call.ended_s)
            ]
            found_N[index] = (busy_s[1] - busy_s[0]) / max(1e-9, call.ended_s - call.began_s)
    return found_N


def _updates(folder: RunFolder) -> dict[str, list[tuple[float, float]]]:
    """Return the intervals in which each server was paused for new weights."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    began_s: dict[str, float] = {}
    for event in folder.server_events():
        if event.state is ServerState.UPDATING:
            began_s[event.server] = event.time_s
        elif event.server in began_s:
            found[event.server].append((began_s.pop(event.server), event.time_s))
    return found


def _overlap(call: Call, spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of `call` within `spans`, which do not overlap."""
    first = bisect_left(spans, call.began_s, key=lambda span: span[1])
    seconds = 0.0
    for began_s, ended_s in spans[first:]:
        if began_s >= call.ended_s:
            break
        seconds += min(ended_s, call.ended_s) - max(began_s, call.began_s)
    return seconds


def _num_chain_tokens(row: RolloutRow) -> int:
    last = [one for one in row.tokens or () if one is not None][-1:]
    return sum(one.completion_end for one in last)
