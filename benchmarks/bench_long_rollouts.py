"""Rollouts of 40 turns and 32k tokens: chains of tokens against the whole prompt of every turn.

The peer, in this script, keeps what a server was sent and what it answered turn by turn, in arrays,
finds out by comparing bytes which turns continue each other, and saves its state as JSON. Medians,
the sides taking turns; CPU time of one process. Run: python benchmarks/bench_long_rollouts.py
"""

import random
import statistics
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
from machine import facts_of_run, table, write_results

from telescope_core.base.chains import ChainRecorder
from telescope_core.records import row_of
from telescope_core.records.parquet import write_rows
from telescope_core.types import Completion, Group, Message, Rollout, Turn
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.rollouts.sampled import SampledBatch, SamplerState

NUM_ROLLOUTS, NUM_TURNS, NUM_TOKENS, VOCAB, REPEATS = 16, 40, 32_768, 150_000, 5
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_long_rollouts.py"
SAID = Message(role="assistant", content="")


class Sent(NamedTuple):
    """One request and its answer, which is also what the peer keeps."""

    prompt_ids: "array[int]"
    token_ids: "array[int]"
    logprobs: "array[float]"


def straight(seed: int) -> list[Sent]:
    """Return the turns of a conversation that only grows; half of its tokens are sampled."""
    drawn, known = random.Random(seed), array("i")
    size = NUM_TOKENS // NUM_TURNS // 2
    turns: list[Sent] = []
    for _ in range(NUM_TURNS):
        known = known + array("i", drawn.choices(range(VOCAB), k=size))
        said = array("i", drawn.choices(range(VOCAB), k=size))
        turns.append(Sent(known, said, array("f", [-drawn.random() for _ in said])))
        known = known + said
    return turns


def rewritten(seed: int) -> list[Sent]:
    """Return the turns of a conversation from which the first half of each answer is taken out."""
    drawn, known = random.Random(seed), array("i")
    size = NUM_TOKENS // NUM_TURNS // 2
    turns: list[Sent] = []
    for _ in range(NUM_TURNS):
        known = known + array("i", drawn.choices(range(VOCAB), k=size))
        said = array("i", drawn.choices(range(VOCAB), k=2 * size))
        turns.append(Sent(known, said, array("f", [-drawn.random() for _ in said])))
        known = known + said[size:]
    return turns


def recorded(turns: Sequence[Sent], index: int = 0) -> Rollout:
    """Return the rollout as Telescope keeps it."""
    recorder = ChainRecorder()
    completions = [
        Completion(
            message=SAID, finish_reason="stop", tokens=recorder.record(*one, temperature=1.0)
        )
        for one in turns
    ]
    return Rollout(
        environment="toy",
        example_id="e",
        group_id="g",
        index=index,
        turns=tuple(Turn(completion=c, started_s=0.0, ended_s=1.0) for c in completions),
        reward=1.0,
    )


def kept(turns: Sequence[Sent]) -> list[Sent]:
    """Return the rollout as the peer keeps it."""
    return [Sent(array("i", one.prompt_ids), one.token_ids, one.logprobs) for one in turns]


def peer_samples(turns: Sequence[Sent]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compare each prompt with what is known so far."""
    chains: list[tuple[bytes, list[np.ndarray]]] = []
    for one in turns:
        prompt = one.prompt_ids.tobytes()
        fits = [n for n, (known, _) in enumerate(chains) if prompt.startswith(known)]
        number = max(fits, key=lambda n: len(chains[n][0]), default=len(chains))
        if number == len(chains):
            chains.append((b"", []))
        known, pieces = chains[number]
        pieces.append(np.full((len(prompt) - len(known)) // 4, np.nan, np.float32))
        pieces.append(np.asarray(one.logprobs))
        chains[number] = (prompt + one.token_ids.tobytes(), pieces)
    return [
        (np.frombuffer(known, np.int32).copy(), np.concatenate(pieces)) for known, pieces in chains
    ]


def peer_file(path: Path, rollouts: Sequence[Sequence[Sent]]) -> None:
    """Write lists of lists, made from the bytes of the arrays."""

    def column(lists: list[list[Any]], kind: Any) -> Any:
        flat = [one for turns in lists for one in turns]
        content = pyarrow.py_buffer(b"".join(flat))
        values = pyarrow.Array.from_buffers(kind, sum(map(len, flat)), [None, content])
        ends = np.cumsum([0, *map(len, flat)])
        inner = pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), values)
        outer = pyarrow.array(np.cumsum([0, *map(len, lists)]))
        return pyarrow.LargeListArray.from_arrays(outer, inner)

    columns = {
        name: column(
            [[getattr(one, name) for one in turns] for turns in rollouts],
            pyarrow.float32() if name == "logprobs" else pyarrow.int32(),
        )
        for name in Sent._fields
    }
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


def peer_state(path: Path, rollouts: Sequence[Sequence[Sent]]) -> None:
    """Write JSON, with a fast encoder."""
    plain = [[[list(column) for column in one] for one in turns] for turns in rollouts]
    path.write_bytes(msgspec.json.encode(plain))


def our_state(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """Write what a checkpoint holds of rollouts that were sampled ahead."""
    group = Group(id="g", environment="toy", example_id="e", rollouts=tuple(rollouts))
    batch = SampledBatch(groups=(group,), duration_s=1.0)
    write_sampler_state(folder, SamplerState(next_batch=1, draw_position=1, batches={0: batch}))


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one call."""
    started_s = time.process_time()
    call()
    return 1e3 * (time.process_time() - started_s)


def held_bytes(make: Callable[[], object]) -> int:
    """Return the bytes that are held of what `make` returns."""
    tracemalloc.start()
    held = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return size


def measure(folder: Path, kind: str, sent: list[list[Sent]]) -> list[dict[str, Any]]:
    """Return one row per stage, each per rollout."""
    ours = [recorded(turns, index) for index, turns in enumerate(sent)]
    peer = [kept(turns) for turns in sent]
    for rollout, turns in zip(ours, peer, strict=True):
        found = samples_from_rollout(rollout, 1.0, 1.0)
        for sample, (ids, logprobs) in zip(found, peer_samples(turns), strict=True):
            assert np.array_equal(sample.token_ids, ids)
            assert np.array_equal(sample.behavior_logprobs, logprobs, equal_nan=True)
    rows = [row_of(rollout, with_tokens=True) for rollout in ours]
    files = {name: folder / f"{kind}-{name}.parquet" for name in ("ours", "peer")}
    states = {"ours": folder / "sampler.msgpack", "peer": folder / "peer.json"}
    timed: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "record the turns": (lambda: [*map(recorded, sent)], lambda: [*map(kept, sent)]),
        "make samples": (
            lambda: [samples_from_rollout(rollout, 1.0, 1.0) for rollout in ours],
            lambda: [*map(peer_samples, peer)],
        ),
        "write the file": (
            lambda: write_rows(files["ours"], rows),
            lambda: peer_file(files["peer"], peer),
        ),
        "save the state": (
            lambda: our_state(folder, ours),
            lambda: peer_state(states["peer"], peer),
        ),
    }
    found_rows: list[dict[str, Any]] = []
    for stage, calls in timed.items():
        times = [[cpu_ms(call) / len(sent) for call in calls] for _ in range(REPEATS + 1)][1:]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        found_rows.append({"stage": f"{stage}, ms", "ours": medians[0], "peer": medians[1]})
    sizes = {
        "in memory": (
            held_bytes(timed["record the turns"][0]),
            held_bytes(timed["record the turns"][1]),
        ),
        "in the file": tuple(files[name].stat().st_size for name in ("ours", "peer")),
        "in the saved state": tuple(states[name].stat().st_size for name in ("ours", "peer")),
    }
    for place, (one, other) in sizes.items():
        kib = (one / len(sent) / 1024, other / len(sent) / 1024)
        found_rows.append({"stage": f"{place}, KiB", "ours": kib[0], "peer": kib[1]})
    return [{"conversation": kind, **row} for row in found_rows]


HEAD = ("conversation", "per rollout", "ours", "peer", "ratio")
NOTE = f"""\
# Long rollouts

{NUM_ROLLOUTS} rollouts of {NUM_TURNS} turns. `straight` only grows, to {NUM_TOKENS:,} tokens, half
of them sampled; ids and log-probs of 4 bytes each make 256 KiB. In `rewritten` the first half of
each answer is taken out before the next turn, as templates do with thinking, so every turn is a
training sample of its own. `ours` keeps chains of tokens; `peer` is this script's and keeps the
whole prompt of every turn. Everything is per rollout; times are CPU milliseconds, medians of
{REPEATS}. Both make the same samples.

{{facts}}
"""


def as_cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    ratio = row["peer"] / row["ours"]
    numbers = (f"{row['ours']:,.2f}", f"{row['peer']:,.2f}", f"{ratio:.1f}x")
    return [row["conversation"], row["stage"], *numbers]


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "numpy", "pyarrow", "msgspec")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for make in (straight, rewritten):
            sent = [make(seed) for seed in range(NUM_ROLLOUTS)]
            rows += measure(Path(folder), make.__name__, sent)
    page = [NOTE, table(HEAD, [as_cells(row) for row in rows])]
    print(page[1])
    write_results("long_rollouts", "\n".join(page), facts, rows)


if __name__ == "__main__":
    main()
