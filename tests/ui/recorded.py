"""A small run with everything in it, written by the code that runs write with."""

import json
import random
import shutil
from array import array
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp

from telescope_core.base.chains import ChainRecorder
from telescope_core.evals.folder import EvalFolder, write_result
from telescope_core.evals.result import result_of
from telescope_core.evals.settings import EvalSettings
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.blocks import BlockLog
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.events import Stage
from telescope_core.records.files import append_json_line
from telescope_core.records.restarts import Restart
from telescope_core.records.rows import row_to_json
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_core.records.timeline import GaugeSample, ModelCall, TimelineSpan
from telescope_core.records.token_facts import TurnFacts
from telescope_core.types import (
    EnvironmentDescription,
    Message,
    RolloutStatus,
    Sampling,
    Span,
    StopReason,
    TurnInfo,
)

BEGAN_S = 1_750_000_000.0
STEP_S = 10.0
SERVERS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
ENVIRONMENTS = ("math", "a/b c")
GROUP_SIZE = 4
MARKUP = "<script>alert('x')</script><img src=x onerror=alert(1)>\x00\x1b[31m"
TOOL = {"name": "look", "description": MARKUP, "parameters": {"type": "object"}}


def row(step: int, group: int, index: int, *, seed: int = 0, attempt: int = 1) -> RolloutRow:
    """Return a rollout; what is random in it depends on its numbers alone."""
    rng = random.Random(f"{seed} {step} {group} {index} {attempt}")
    recorder = ChainRecorder()
    first = recorder.record([1, 2, 3], [4, 5], [-0.5, -1.5])
    second = recorder.record([1, 2, 3, 4, 5, 6], [7], [-0.25])
    has_failed = rng.random() < 0.2
    reward = None if has_failed else rng.choice([0.0, 0.0, 0.5, 1.0])
    return RolloutRow(
        step=step,
        environment=ENVIRONMENTS[group % 2],
        example_id=f"x/{group}?&#",
        group_id=f"{step}.{group}",
        index=index,
        attempt=attempt,
        status=RolloutStatus.FAILED if has_failed else RolloutStatus.KEPT,
        status_reason="TimeoutError" if has_failed else "",
        error="TimeoutError: late" if has_failed else None,
        stop_reason=StopReason.ERROR if has_failed else StopReason.COMPLETED,
        reward=reward,
        advantage=None if reward is None else reward - 0.5,
        rewards={} if reward is None else {"correct": reward},
        metrics={"length": rng.random(), "tools": float(rng.randrange(3))},
        tags={"level": str(rng.randrange(3))} if rng.random() < 0.7 else {},
        golden_answers={"answer": "42"},
        tools=({"type": "function", "function": dict(TOOL)},),
        info=(TurnInfo(turn=0, key="stdout", value="ok", kind="stdout"),),
        messages=(
            Message(role="user", content=f"What is {group} times {index}?"),
            Message(role="assistant", content=f"Step {step} says {MARKUP}", reasoning="hm"),
        ),
        num_turns=2,
        num_prompt_tokens=9,
        num_completion_tokens=rng.randrange(1, 100),
        is_truncated=rng.random() < 0.3,
        finish_reasons=("stop", "stop"),
        oldest_version=step - 1,
        newest_version=step,
        version_spans=((Span(step - 1, 1), Span(step, 1)), (Span(step, 1),)),
        generate_s=rng.random(),
        score_s=0.01,
        tokens=(first, second),
    )


def facts_of(row: RolloutRow) -> list[TurnFacts]:
    """Return what a trainer found of the two turns of a rollout."""
    about = {"group_id": row.group_id, "index": row.index, "attempt": row.attempt, "weight": 0.25}
    columns = (([-0.5, -1.0], [0.5, 1.5], [1.0, 0.0]), ([-0.5], [0.25], [-0.5]))
    names = ("logprobs", "entropy", "effective_advantages")
    return [
        TurnFacts(**about, turn=turn, **{n: array("f", v) for n, v in zip(names, own, strict=True)})
        for turn, own in enumerate(columns)
    ]


def write_steps(run: RunFolder, steps: range, *, groups: int = 3, seed: int = 0) -> None:
    """Write rollouts and metrics of `steps`."""
    for step in steps:
        numbers = [(group, index) for group in range(groups) for index in range(GROUP_SIZE)]
        rows = [row(step, *one, seed=seed) for one in numbers]
        run.write_rollouts(step, rows)
        trained = [one for one in rows if one.status is RolloutStatus.KEPT]
        run.write_token_facts(step, [facts for one in trained for facts in facts_of(one)])
        run.log_metrics(
            {
                **{"step": step, "version": step, "time_s": BEGAN_S + STEP_S * step},
                **{"task_reward/mean": 0.1 * step, "reward/math/mean": 0.2, "entropy": 1 / step},
                "never/finite": float("nan"),
            }
        )


def write_run(path: Path, *, steps: int = 3) -> RunFolder:
    """Write a whole run, whose process is gone without having recorded an end."""
    config = {
        "run": {"name": path.name, "number_of_steps": 10},
        "environments": [{"name": "math", "weight": 1.0}, {"name": "a/b c", "weight": 2.0}],
        "rollout": {"group_size": GROUP_SIZE},
    }
    run = RunFolder.create(path, config=config)
    run.note_settings(
        ["run.number_of_steps", "environments.math"],
        ["rollout.group_size", "environments.math"],
        {"rollout.group_size": 8, "run.number_of_steps": 10},
    )
    write_steps(run, range(1, steps + 1))
    run.write_attempts(1, [row(1, 0, 0, attempt=2)])
    _write_calls(path, steps)
    _write_spans(path, steps)
    _write_gauges(path, steps)
    _write_events(path, steps)
    for at, (state, version) in enumerate(
        [(ServerState.SERVING, 0), (ServerState.UPDATING, 1), (ServerState.SERVING, 1)]
    ):
        run.log_server(
            ServerEvent(
                time_s=BEGAN_S + at,
                server=SERVERS[0],
                role=ServerRole.ROLLOUT,
                life=1,
                state=state,
                version=version,
            )
        )
    append_json_line(
        path / "restarts.jsonl",
        asdict(Restart(time_s=BEGAN_S + 5, reason="a rank died", reached=2, step=1, checkpoint="")),
    )
    run.write_self_tests([{"name": "packing", "value": 0.0, "limit": 1.0, "unit": "", "note": ""}])
    for tag, version, solved in (("before", 0, 2), ("after", steps, 6)):
        write_eval(run, tag, version=version, solved=solved)
    (run.logs_path / "server-0.log").write_text(
        "starting\n"
        "INFO 06-15 15:06:41 [api.py:1] ready\n"
        "Traceback (most recent call last):\n"
        "2025-06-15 15:06:43,250 ERROR lost a request\n"
    )
    (run.logs_path / "driver.jsonl").write_text(
        "".join(
            json.dumps(
                {"time_s": BEGAN_S + at, "level": "info", "source": "rank 0", "message": f"at {at}"}
            )
            + "\n"
            for at in range(5)
        )
    )
    kill(run)
    return run


def kill(run: RunFolder) -> None:
    """Make it look as if the process of the run was killed: it has another start time."""
    path = run.path / "run.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "process_started": "another process"}))


def _write_calls(path: Path, steps: int) -> None:
    with BlockLog(path / "calls", ModelCall, block_rows=20) as log:
        for step in range(1, steps + 1):
            for number in range(3 * GROUP_SIZE):
                group, index = divmod(number, GROUP_SIZE)
                log.add(
                    ModelCall(
                        time_s=BEGAN_S + STEP_S * (step - 1) + 0.1 * number,
                        duration_s=2.0,
                        server=SERVERS[number % 2],
                        environment=ENVIRONMENTS[group % 2],
                        group_id=f"{step}.{group}",
                        index=index,
                        step=step,
                        version=step - 1,
                        queue_s=0.5,
                    )
                )
        log.add(
            ModelCall(
                **{"time_s": BEGAN_S + 1, "duration_s": 1.0, "server": SERVERS[1]},
                **{"environment": "math-after", "group_id": "eval-2", "version": steps},
            )
        )


def _write_spans(path: Path, steps: int) -> None:
    with BlockLog(path / "timeline", TimelineSpan) as log:
        for step in range(1, steps + 1):
            for start_s, length_s, name in ((4, 4, "train"), (4, 2, "forward"), (6, 2, "backward")):
                log.add(
                    TimelineSpan(
                        time_s=BEGAN_S + STEP_S * (step - 1) + start_s,
                        duration_s=float(length_s),
                        name=name,
                        source="rank 0",
                        step=step,
                    )
                )


def _write_gauges(path: Path, steps: int) -> None:
    with BlockLog(path / "gauges", GaugeSample) as log:
        for at in range(10 * steps):
            for gpu in range(4):
                value = 0.1 if gpu == 3 else 0.9 + 0.01 * gpu
                log.add(
                    GaugeSample(
                        time_s=BEGAN_S + at,
                        source=f"node n gpu {gpu}",
                        name="gpu/utilization",
                        value=value,
                    )
                )


def _write_events(path: Path, steps: int) -> None:
    stages = (Stage.DRAWN, Stage.ENVIRONMENT, Stage.GENERATING, Stage.SCORING, Stage.DONE)
    for step in range(1, steps + 1):
        lines = []
        for index in range(GROUP_SIZE):
            about = {"step": step, "environment": "math", "group_id": f"{step}.0", "index": index}
            for at, stage in enumerate(stages):
                time_s = BEGAN_S + STEP_S * (step - 1) + at
                lines.append(json.dumps({**about, "time_s": time_s, "attempt": 1, "stage": stage}))
        file = path / "events" / f"step-{step:06d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))


def write_eval(
    run: RunFolder, tag: str, *, version: int, solved: int, name: str = "math", folder: str = ""
) -> None:
    """Write an eval called `name` and its point; `folder` is what the point says of its folder."""
    place = run.evals_path / (folder or f"{name}-{tag}")
    rows = [
        RolloutRow(
            step=version,
            environment="math",
            example_id=f"e{example}",
            group_id=f"eval-{example}",
            index=0,
            status=RolloutStatus.KEPT,
            reward=1.0 if example < solved else 0.0,
            messages=(Message(role="user", content=MARKUP),),
        )
        for example in range(8)
    ]
    for one in rows:
        append_json_line(place / "rollouts.jsonl", row_to_json(one))
    description = EnvironmentDescription(
        **{"name": "math", "version": "1.0.0", "reward_min": 0.0, "reward_max": 1.0},
        **{"success_threshold": 1.0, "num_examples": {}, "network": "none"},
    )
    settings = EvalSettings(num_examples=8, rollouts=1, sampling=Sampling(max_tokens=4))
    write_result(place, result_of(rows, settings, description, model="m", duration_s=2.0))
    run.log_eval_point(
        EvalPoint(
            **{"time_s": BEGAN_S + STEP_S * version, "name": name, "tag": tag, "folder": folder},
            **{"version": version, "state": EvalPointState.DONE, "num_scored": 8},
            **{"reward": solved / 8, "duration_s": 2.0},
        )
    )


def write_standalone(path: Path, *, solved: int) -> None:
    """Write what `telescope eval` leaves in its folder: a manifest, rollouts and results."""
    manifest = {"environment": "math", "model": "m", "env": {"api_key": "hush"}}
    EvalFolder.create(path, manifest=manifest)
    place = Path(mkdtemp(prefix=".made-", dir=path.parent))
    made = RunFolder.create(place, config={})
    write_eval(made, "x", version=1, solved=solved, folder="made")
    for name in ("rollouts.jsonl", "results.json"):
        (made.evals_path / "made" / name).rename(path / name)
    shutil.rmtree(place)
