"""A run folder of any size, with text, tokens, model calls, spans and gauges, written quickly.

One step is written by the code of run folders; the others are Arrow tables of the same schema, and
small files are merged as a run does it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from telescope_core.base.chains import ChainRecorder
from telescope_core.records.parquet import CHUNK_BYTES, writer_options
from telescope_core.records.rows import RolloutRow
from telescope_core.records.run_folder import RunFolder
from telescope_core.records.step_files import merge
from telescope_core.records.timeline import GaugeSample, ModelCall, TimelineSpan
from telescope_core.types import Message, RolloutStatus

PER_STEP = 512
GROUP_SIZE = 8
NUM_TOKENS = 256
NUM_PROMPT_TOKENS = 64
NUM_SAMPLED = NUM_TOKENS - NUM_PROMPT_TOKENS
"""Tokens of a turn: all, those that come first, and the answer's."""
BEGAN_S = 1_750_000_000.0
STEP_S = 20.0
ENVIRONMENTS = ("math", "code", "search", "chess")
SERVERS = tuple(f"http://127.0.0.1:{port}" for port in range(8000, 8008))
_TEXT = (
    "because therefore compute number answer tool step value first then check again proof sum "
    "product divide remainder triangle angle list sort search graph node edge cost price"
)
WORDS = tuple(_TEXT.split(" "))
STAGES = ("drawn", "waiting", "environment", "generating", "scoring", "done")
EXAMPLE = 17
"""Number of an example that every run has."""
RARE = "quokka"
"""A word that one rollout in a thousand says."""


_TURN_BYTES = 3_000
"""Size of a turn, as run folders count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a run, and of its parts."""

    num_steps: int
    per_step: int = PER_STEP
    """Rollouts of a step."""
    num_turns: int = 1
    """Questions, each with an answer, in the conversation of a rollout."""
    num_metrics: int = 2
    """Metrics of a rollout; as many parts of its reward."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts of all steps."""
        return self.num_steps * self.per_step


def write_run(path: Path, shape: Shape, *, seed: int = 0) -> RunFolder:
    """Write a run into `path`, which must be new."""
    rng = np.random.default_rng(seed)
    run = RunFolder.create(path, config={"run": {"name": path.name}})
    schema = pq.read_schema(run.write_rollouts(1, [_one_row()]))
    texts = _texts(random.Random(seed))
    num_steps = shape.num_steps
    for step in range(1, num_steps + 1):
        pq.write_table(
            _step_table(step, shape, rng, texts, schema),
            run.rollouts_path / f"step-{step:06d}.parquet",
            row_group_size=CHUNK_BYTES // (_TURN_BYTES * shape.num_turns),
            compression="zstd",
            use_dictionary=[name for name in schema.names if name not in ("chains", "turns")],
        )
        merge(run.rollouts_path, up_to=step - 1, options=writer_options())
    run.note_reward_ranges(dict.fromkeys(ENVIRONMENTS, (0.0, 1.0)))
    _write_metrics(path, num_steps, rng)
    for step in range(1, num_steps + 1):
        _write_events(path / "events", step, shape.per_step, rng)
        merge(path / "events", up_to=step - 1, options={"compression": "zstd"})
    _write_blocks(path / "calls", _calls(shape, rng), ModelCall)
    _write_blocks(path / "timeline", _spans(num_steps), TimelineSpan)
    _write_blocks(path / "gauges", _gauges(num_steps, rng), GaugeSample)
    run.finish()
    info = json.loads((path / "run.json").read_text())
    info |= {"started_at": _iso(0), "ended_at": _iso(STEP_S * num_steps)}
    (path / "run.json").write_text(json.dumps(info))
    return run


def _iso(after_s: float) -> str:
    return datetime.fromtimestamp(BEGAN_S + after_s, UTC).isoformat()


def _one_row() -> RolloutRow:
    recorder = ChainRecorder()
    return RolloutRow(
        step=1,
        environment="math",
        example_id="1",
        group_id="1",
        index=0,
        status=RolloutStatus.KEPT,
        messages=(Message(role="user", content="?"),),
        tokens=(recorder.record([1], [2], [-0.5]),),
    )


def _texts(rng: random.Random) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=60)) for _ in range(4000)]


def _step_table(
    step: int, shape: Shape, rng: np.random.Generator, texts: Sequence[str], schema: pa.Schema
) -> pa.Table:
    num = shape.per_step
    groups = [f"{step}-{index // GROUP_SIZE}" for index in range(num)]
    environments = [ENVIRONMENTS[(index // GROUP_SIZE) % 4] for index in range(num)]
    rewards = (rng.random(num) < min(0.9, 0.2 + step / 4000)).astype(float)
    seconds = rng.gamma(2.0, 2.0, num)
    said = [_said(texts, rng, step * num + index, shape.num_turns) for index in range(num)]
    named = [f"part_{at}" for at in range(2, shape.num_metrics)]
    more = [dict(zip(named, row, strict=True)) for row in rng.random((num, len(named))).tolist()]
    columns: dict[str, Any] = {
        "step": np.full(num, step, np.int32),
        "environment": environments,
        # However few there are, one is asked for by its name.
        "example_id": [
            f"{name}/{rng.integers(5000) if index or step > 1 else EXAMPLE}"
            for index, name in enumerate(environments)
        ],
        "group_id": groups,
        "index": np.arange(num, dtype=np.int32) % GROUP_SIZE,
        "attempt": np.ones(num, np.int32),
        "status": ["failed" if x < 0.01 else "kept" for x in rng.random(num)],
        "status_reason": [""] * num,
        "error": pa.nulls(num, pa.string()),
        "stop_reason": ["completed"] * num,
        "reward": rewards,
        "advantage": rewards - rewards.mean(),
        "rewards": [
            json.dumps({"correct": x, **rest}) for x, rest in zip(rewards, more, strict=True)
        ],
        "metrics": [
            json.dumps({"format": float(x < 0.8), "tools": 2.0, **rest})
            for x, rest in zip(rng.random(num), more, strict=True)
        ],
        "tags": [json.dumps({"level": str(int(5 * x))}) for x in rng.random(num)],
        "golden_answers": ['{"answer": "42"}'] * num,
        "info": ["[]"] * num,
        "messages": [_messages(one) for one in said],
        "conversations": ["[]"] * num,
        "num_turns": np.full(num, shape.num_turns, np.int32),
        "num_prompt_tokens": np.full(num, NUM_PROMPT_TOKENS, np.int32),
        "num_completion_tokens": rng.integers(20, 2000, num).astype(np.int32),
        "is_truncated": rng.random(num) < 0.03,
        "is_refused": np.zeros(num, bool),
        "finish_reasons": [["stop"]] * num,
        "num_http_retries": np.zeros(num, np.int32),
        "oldest_version": np.full(num, step - 1, np.int32),
        "newest_version": np.full(num, step - 1, np.int32),
        "generate_s": seconds,
        "score_s": np.full(num, 0.01),
        **_tokens(shape, rng, schema),
    }
    arrays = [
        _array(columns.get(field.name, pa.nulls(num, field.type)), field.type) for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=kind)


def _said(texts: Sequence[str], rng: np.random.Generator, number: int, num_turns: int) -> list[str]:
    """Return what is asked and answered in turn; each answer has the rollout's `number`."""
    rare = f" {RARE}" if number % 1000 == 0 else ""
    said: list[str] = []
    for asked, one, two in rng.integers(0, len(texts), (num_turns, 3)).tolist():
        said += [texts[asked][:400], f"{texts[one]} {number}{rare} {texts[two]}"[:820]]
    return said


def _messages(said: Sequence[str]) -> list[dict[str, str | None]]:
    rest = {"reasoning_content": "", "tool_calls": "[]", "tool_call_id": "", "refusal": ""}
    return [
        {"role": role, "content": text, **rest}
        for role, text in zip(cycle(("user", "assistant")), said, strict=False)
    ]


def _tokens(shape: Shape, rng: np.random.Generator, schema: pa.Schema) -> dict[str, pa.Array]:
    """Return one chain of tokens for each rollout, in which its turns follow each other."""
    num = shape.per_step
    length, sampled = NUM_TOKENS * shape.num_turns, NUM_SAMPLED * shape.num_turns
    ids = pa.array(rng.integers(0, 32000, num * length).astype(np.int32))
    logprobs = pa.array(-rng.gamma(0.5, 0.5, num * sampled).astype(np.float32))
    kind = schema.field("chains").type
    chain = pa.StructArray.from_arrays(
        [
            pa.nulls(num, pa.int32()),
            pa.array(np.zeros(num, np.int64)),
            pa.LargeListArray.from_arrays(np.arange(num + 1) * length, ids),
            pa.LargeListArray.from_arrays(np.arange(num + 1) * sampled, logprobs),
        ],
        fields=list(kind.value_type),
    )
    places = [
        {
            **{"chain": 0, "prompt_end": turn * NUM_TOKENS + NUM_PROMPT_TOKENS},
            **{"completion_end": (turn + 1) * NUM_TOKENS, "logprobs_start": turn * NUM_SAMPLED},
            "logprobs_end": (turn + 1) * NUM_SAMPLED,
        }
        for turn in range(shape.num_turns)
    ]
    offsets = pa.array(np.arange(num + 1, dtype=np.int32))
    return {
        "chains": pa.ListArray.from_arrays(offsets, chain, type=kind),
        "turns": pa.array([places] * num, schema.field("turns").type),
    }


def _write_events(folder: Path, step: int, num: int, rng: np.random.Generator) -> None:
    """The stages of every rollout that was drawn for a step."""
    folder.mkdir(exist_ok=True)
    attempt = np.repeat(np.arange(num), len(STAGES))
    lasts = rng.gamma(2.0, 1.5, (num, len(STAGES)))
    began = BEGAN_S + STEP_S * (step - 1) + rng.random(num) * STEP_S
    stage = np.tile(np.arange(len(STAGES)), num)
    environments = [ENVIRONMENTS[(one // GROUP_SIZE) % 4] for one in range(num)]
    servers = [SERVERS[one % len(SERVERS)] for one in range(num)]
    text = pa.dictionary(pa.int32(), pa.string())
    columns = {
        "time_s": pa.array((began[:, None] + lasts.cumsum(axis=1)).ravel()),
        "step": pa.array(np.full(len(attempt), step, np.int32)),
        "environment": pa.array([environments[one] for one in attempt], text),
        "group_id": pa.array([f"{step}-{one // GROUP_SIZE}" for one in attempt], text),
        "index": pa.array((attempt % GROUP_SIZE).astype(np.int32)),
        "attempt": pa.array(np.ones(len(attempt), np.int32)),
        "stage": pa.array([STAGES[one] for one in stage], text),
        "call": pa.array((stage == STAGES.index("generating")).astype(np.int32)),
        "server": pa.array([servers[one] for one in attempt], text),
        "version": pa.array(np.full(len(attempt), step - 1, np.int32)),
        "reason": pa.array([""] * len(attempt), text),
    }
    target = folder / f"step-{step:06d}.parquet"
    pq.write_table(pa.table(columns), target, compression="zstd")


def _write_metrics(path: Path, num_steps: int, rng: np.random.Generator) -> None:
    """About 150 metrics a step, as many as a run has."""
    names = [f"part_{i // 10}/metric_{i % 10}" for i in range(140)]
    with (path / "metrics.jsonl").open("w") as lines:
        for step in range(1, num_steps + 1):
            noise = rng.random(len(names) + 4).round(6).tolist()
            known = ("task_reward/mean", "reward/mean", "entropy", "grad_norm")
            row = dict(zip((*known, *names), noise, strict=True))
            row |= {"step": step, "version": step, "time_s": BEGAN_S + STEP_S * step}
            row |= {"time/step_s": STEP_S, "time/train_s": 0.4 * STEP_S}
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")


def _calls(shape: Shape, rng: np.random.Generator) -> dict[str, Any]:
    num, per_step = shape.num_rollouts, shape.per_step
    index = np.arange(num)
    step = index // per_step + 1
    seconds = rng.gamma(2.0, 2.0, num)
    within = index % per_step
    began_s = BEGAN_S + STEP_S * (step - 1) + within * (STEP_S / per_step)
    return {
        "time_s": began_s,
        "duration_s": seconds,
        "server": pa.DictionaryArray.from_arrays((index % 8).astype(np.int32), list(SERVERS)),
        "environment": [ENVIRONMENTS[(i // GROUP_SIZE) % 4] for i in within.tolist()],
        "group_id": [
            f"{s}-{i // GROUP_SIZE}" for s, i in zip(step.tolist(), within.tolist(), strict=True)
        ],
        "index": within % GROUP_SIZE,
        "attempt": np.ones(num, np.int64),
        "call": np.ones(num, np.int64),
        "step": step,
        "version": step - 1,
        "queue_s": 0.05 * seconds,
        "first_token_s": 0.1 * seconds,
        "prefill_s": 0.05 * seconds,
        "decode_s": 0.85 * seconds,
        "num_prompt_tokens": np.full(num, NUM_PROMPT_TOKENS),
        "num_cached_tokens": np.zeros(num, np.int64),
        "num_completion_tokens": np.full(num, NUM_SAMPLED),
        "error": [""] * num,
    }


def _spans(num_steps: int) -> dict[str, Any]:
    """Eight ranks, each with 8 microbatches of forward and backward a step, and the driver."""
    columns: dict[str, list[Any]] = {name: [] for name in TimelineSpan.__dataclass_fields__}

    def add(time_s: float, duration_s: float, name: str, source: str, step: int) -> None:
        values = (time_s, duration_s, name, source, step, None, step, "")
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)

    for step in range(1, num_steps + 1):
        began_s = BEGAN_S + STEP_S * (step - 1)
        add(began_s, STEP_S, "step", "driver", step)
        for rank in range(8):
            source = f"rank {rank}"
            add(began_s + 10, 8.0, "train", source, step)
            for microbatch in range(8):
                at_s = began_s + 10 + microbatch
                add(at_s, 0.3, "forward", source, step)
                add(at_s + 0.3, 0.6, "backward", source, step)
            add(began_s + 18, 0.5, "optimizer", source, step)
    return columns


def _gauges(num_steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """Eight GPUs with four meters each, twice a step."""
    meters = [
        (f"node n0 gpu {gpu}", name)
        for gpu in range(8)
        for name in ("gpu/utilization", "gpu/memory_bytes", "gpu/power_w", "gpu/temperature_c")
    ]
    times_s = np.repeat(BEGAN_S + STEP_S / 2 * np.arange(2 * num_steps), len(meters))
    return {
        "time_s": times_s,
        "source": [meter[0] for meter in meters] * (2 * num_steps),
        "name": [meter[1] for meter in meters] * (2 * num_steps),
        "value": rng.random(len(times_s)) * 100,
    }


def _write_blocks(folder: Path, columns: dict[str, Any], kind: type[Any]) -> None:
    folder.mkdir()
    names = list(kind.__dataclass_fields__)
    table = pa.table({name: columns[name] for name in names})
    block = 100_000
    for number, start in enumerate(range(0, table.num_rows, block), 1):
        part = table.slice(start, block)
        pq.write_table(part, folder / f"{number:06d}.parquet", compression="zstd")
