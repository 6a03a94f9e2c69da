"""The tokens of one step on their way from the replies to samples and files, against plain lists.

4,096 rollouts of 256 tokens. Telescope holds ids and log-probs in arrays; the peer, in this
script, does the same work with a Python object per token, as Telescope did before. CPU time of one
process, the sides taking turns; medians. Run: python benchmarks/bench_data_plane.py
"""

import json
import math
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from machine import facts_of_run, table, write_results
from rollouts.problems import reply

from telescope_core.chat.replies import read_token_completion
from telescope_core.records import RolloutRow, row_of
from telescope_core.records.parquet import write_rows
from telescope_core.records.rows import row_to_json
from telescope_core.types import Message, Rollout, Turn
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.step.filters import has_gibberish

NUM_ROLLOUTS, NUM_REPLIES, REPEATS = 4096, 64, 5
RARE, OFFSET, VOCAB = 100_000, 2.0, 150_000
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_data_plane.py"
REPLIES = [reply(index) for index in range(NUM_REPLIES)]


class Plain(NamedTuple):
    """What the peer keeps of a reply: tuples of numbers."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def plain_reply(content: bytes) -> Plain:
    """Parse everything, then pick out the numbers."""
    fields = json.loads(content)
    choice = fields["choices"][0]
    return Plain(
        choice["message"]["content"],
        tuple(fields["prompt_token_ids"]),
        tuple(choice["token_ids"]),
        tuple(entry["logprob"] for entry in choice["logprobs"]["content"]),
    )


def plain_gibberish(one: Plain) -> bool:
    """Look at each token."""
    least = -math.log(VOCAB) - OFFSET
    return any(
        token > RARE and logprob < least
        for token, logprob in zip(one.token_ids, one.logprobs, strict=True)
    )


def plain_sample(one: Plain) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Append to lists, then make arrays of them."""
    assert all(map(math.isfinite, one.logprobs))
    ids = [*one.prompt_ids, *one.token_ids]
    logprobs_L = np.array([*[math.nan] * len(one.prompt_ids), *one.logprobs], dtype=np.float32)
    return np.array(ids, dtype=np.int32), ~np.isnan(logprobs_L), logprobs_L


def plain_write(path: Path, rows: list[RolloutRow], tokens: list[Plain]) -> None:
    """Give the rows to Arrow as Python objects."""
    columns: list[dict[str, Any]] = []
    for row, one in zip(rows, tokens, strict=True):
        fields: dict[str, Any] = dict(row_to_json(replace(row, tokens=None)))
        fields |= {
            "prompt_ids": [one.prompt_ids],
            "completion_ids": [one.token_ids],
            "logprobs": [one.logprobs],
        }
        columns.append(
            {
                name: json.dumps(value) if isinstance(value, dict) else value
                for name, value in fields.items()
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), path, compression="zstd")


def as_rollout(content: bytes, number: int) -> Rollout:
    """Return a rollout of one turn that got this reply."""
    completion = read_token_completion(content, where="memory")
    messages = (Message(role="user", content="how many?"), completion.message)
    turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
    return Rollout(
        environment="sums",
        example_id=f"p{number % NUM_REPLIES}",
        group_id=f"0.{number % NUM_REPLIES}",
        index=number // NUM_REPLIES,
        messages=messages,
        turns=(turn,),
        reward=1.0,
        rewards={"correct": 1.0},
    )


def held_bytes(make: Callable[[bytes], object]) -> float:
    """Return the bytes that are held per token for parsed replies."""
    tracemalloc.start()
    held = [make(content) for content in REPLIES]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / (256 * len(held))


def take_turns(ours: Callable[[], object], peer: Callable[[], object]) -> dict[str, float]:
    """Return the median CPU milliseconds of both, after one untimed call each."""
    times: dict[str, list[float]] = {"ours_ms": [], "peer_ms": []}
    for repeat in range(REPEATS + 1):
        for name, call in (("ours_ms", ours), ("peer_ms", peer)):
            started_s = time.process_time()
            call()
            if repeat:
                times[name].append(1e3 * (time.process_time() - started_s))
    row = {name: statistics.median(found) for name, found in times.items()}
    return row | {"ratio": row["peer_ms"] / row["ours_ms"]}


def measure(folder: Path) -> list[dict[str, Any]]:
    """Return one row per stage."""
    contents = [REPLIES[number % NUM_REPLIES] for number in range(NUM_ROLLOUTS)]
    rollouts = [as_rollout(content, number) for number, content in enumerate(contents)]
    plain = [plain_reply(content) for content in contents]
    rows = [row_of(rollout, step=1, with_tokens=True) for rollout in rollouts]

    def gibberish() -> int:
        return sum(has_gibberish(r, token_threshold=RARE, vocab_size=VOCAB) for r in rollouts)

    assert gibberish() == sum(map(plain_gibberish, plain))
    stages: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "read the replies": (
            lambda: [read_token_completion(content, where="memory") for content in contents],
            lambda: [plain_reply(content) for content in contents],
        ),
        "filter gibberish": (gibberish, lambda: sum(map(plain_gibberish, plain))),
        "make samples": (
            lambda: [samples_from_rollout(rollout, 0.5, 1.0) for rollout in rollouts],
            lambda: [plain_sample(one) for one in plain],
        ),
        "write the file": (
            lambda: write_rows(folder / "ours.parquet", rows),
            lambda: plain_write(folder / "peer.parquet", rows, plain),
        ),
    }
    found: list[dict[str, Any]] = [{"stage": n, **take_turns(*both)} for n, both in stages.items()]
    held = {
        "ours": held_bytes(lambda content: read_token_completion(content, where="memory")),
        "peer": held_bytes(plain_reply),
    }
    return [*found, {"stage": "held, bytes per token", **held}]


HEAD = ("stage", "ours", "peer", "ratio")
NOTE = f"""\
# Tokens of a step

{NUM_ROLLOUTS:,} rollouts of one turn, 48 tokens of prompt and 256 sampled ones. `ours` holds ids
and log-probs in arrays from the reply to the file; `peer` is this script's, with a Python object
for each token. CPU milliseconds for all rollouts where nothing else is said, medians of {REPEATS};
the text of a reply, which both sides hold, counts in the last line.

{{facts}}
"""


def as_cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    ours, peer = (row.get(f"{side}_ms", row.get(side)) for side in ("ours", "peer"))
    return [row["stage"], f"{ours:,.1f}", f"{peer:,.1f}", f"{peer / ours:.1f}x"]


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "numpy", "pyarrow", "msgspec")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    page = [NOTE, table(HEAD, [as_cells(row) for row in rows])]
    print(page[1])
    write_results("data_plane", "\n".join(page), facts, rows)


if __name__ == "__main__":
    main()
