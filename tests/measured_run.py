"""The records of a run whose servers and ranks have speeds that are known."""

import asyncio
from pathlib import Path

from telescope_core.base.chains import sampled_tokens
from telescope_core.records import RunFolder, row_of
from telescope_core.records.events import AttemptEvent, EventLog, Stage
from telescope_core.types import Completion, Message, Rollout, Turn

STEP_S, REQUEST_S = 0.02, 0.004
"""Seconds of a decode step, and what each request adds to it."""
TOKEN_S, OPTIMIZER_S, UPDATE_S = 0.002, 0.5, 0.3
"""Seconds of the trainer for a token and for a step, and of an update of the weights."""
PROMPT, GROUP = 20, 10


def write_measured_run(path: Path, *, num_steps: int = 12) -> RunFolder:
    """Write the records of a run of one server and one rank, in lockstep."""
    folder = RunFolder.create(path, config={"trainer": {"trainer_num_workers": 1}})
    events: list[AttemptEvent] = []
    for step in range(1, num_steps + 1):
        # Batches of several sizes, so that each cost can be told from the others.
        lengths = [30 + 25 * index + 7 * (step % 3) for index in range(2 + step % GROUP)]
        ends_s = seconds_of(lengths)
        rows = [rollout(step, index, length) for index, length in enumerate(lengths)]
        folder.write_rollouts(step, [row_of(one, step=step, with_tokens=True) for one in rows])
        for index, end_s in enumerate(ends_s):
            for stage, time_s in ((Stage.GENERATING, 0.0), (Stage.SCORING, end_s)):
                events.append(event(step, index, stage, 1000.0 * step + time_s))
        num_tokens = sum(lengths) + PROMPT * len(lengths)
        train_s = OPTIMIZER_S + TOKEN_S * num_tokens
        folder.log_metrics(
            {
                "step": step,
                "time/train_s": train_s,
                "time/sync_s": UPDATE_S,
                "time/wait_s": 0.0,
                "tokens/train_per_s": num_tokens / train_s,
            }
        )
    asyncio.run(write_events(folder.events_path, events))
    return folder


def seconds_of(lengths: list[int]) -> list[float]:
    """Return when each of some requests ends that begin together, token by token."""
    ends_s, now_s = [0.0] * len(lengths), 0.0
    for token in range(max(lengths)):
        now_s += STEP_S + REQUEST_S * sum(length > token for length in lengths)
        for index, length in enumerate(lengths):
            if length == token + 1:
                ends_s[index] = now_s
    return ends_s


def rollout(step: int, index: int, length: int) -> Rollout:
    """Return a rollout with an answer of `length` tokens."""
    completion = Completion(
        message=Message(role="assistant", content=""),
        finish_reason="stop",
        tokens=sampled_tokens([1] * PROMPT, [2] * length, [-1.0] * length),
    )
    return Rollout(
        environment="e",
        example_id="x",
        group_id=f"{step}.0",
        index=index,
        turns=(Turn(completion=completion, started_s=0.0, ended_s=1.0),),
        reward=1.0,
    )


def event(step: int, index: int, stage: Stage, time_s: float) -> AttemptEvent:
    """Return that an attempt begins a stage."""
    return AttemptEvent(
        time_s=time_s,
        step=step,
        environment="e",
        group_id=f"{step}.0",
        index=index,
        attempt=1,
        stage=stage,
        server="http://one" if stage is Stage.GENERATING else "",
    )


async def write_events(folder: Path, events: list[AttemptEvent]) -> None:
    """Write events as a run does."""
    with EventLog(folder) as log:
        for one in events:
            log.add(one)
