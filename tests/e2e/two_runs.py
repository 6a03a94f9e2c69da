"""Pairs of runs that are started at the same moment on the default port, each with its own model.

    python tests/e2e/two_runs.py FOLDER NUMBER_OF_PAIRS

What their records must say: each server's log begins with the identity by which its own run asked,
no identity is in both runs, no server was asked for another one, and the engine's log-probs are
those of the run's own model, token by token.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from telescope_core.records import RunFolder
from telescope_core.records.servers import ServerState
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import SMALL_RUN, TELESCOPE, environment

# Without a port, as a person would start them.
RUN = """
[run]
name = "{name}"
number_of_steps = {steps}
""" + SMALL_RUN.replace("inference_base_port = {port}\n", "")
STEPS = 3
MINUTES = 10
MISMATCH = 1e-3
"""Nats on average by which an engine may differ from the trainer, both in float32."""
OTHER_MODEL = 0.01
"""Nats by which two random models differ at the very least."""


class Seen(NamedTuple):
    """What the records of one run say of its servers."""

    addresses: set[str]
    identities: set[str]
    """By which the run asked."""
    of_logs: set[str]
    """With which the servers of the run began."""
    refused: list[str]
    mismatch: float
    """The largest of all steps, nats on average."""
    version: int
    """Of the newest weights that its servers got."""


def start(place: Path, name: str, seed: int) -> "subprocess.Popen[str]":
    """Start a run over a model of its own."""
    model = make_tiny_model(place / f"model-{name}", seed=seed)
    (place / f"{name}.toml").write_text(
        RUN.format(name=name, model=json.dumps(str(model)), steps=STEPS)
    )
    with (place / f"{name}.out").open("w") as output:
        return subprocess.Popen(
            # Random models earn no reward, and these are to be trained and sent all the same.
            [*TELESCOPE, "train", f"{name}.toml", "--discard_group_zero_advantage", "false"],
            cwd=place,
            env=environment({}),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def seen_by(run: RunFolder) -> Seen:
    """Read what a run has recorded of its servers."""
    events = run.server_events()
    assert events, "a run records its servers"
    assert all(one.state is not ServerState.LOST for one in events), events
    lines: list[str] = []
    for path in sorted(run.logs_path.glob("inference-*.jsonl")):
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        lines += [row["message"] for row in rows]
    begins = "this is the inference server "
    return Seen(
        addresses={one.server for one in events},
        identities={one.identity for one in events},
        of_logs={one.removeprefix(begins) for one in lines if one.startswith(begins)},
        refused=[one for one in lines if "was meant" in one],
        # A batch in which nothing is to be learned has no number.
        mismatch=max(row["mismatch/mean"] for row in run.metrics() if "mismatch/mean" in row),
        version=max(one.version for one in events),
    )


def run_pair(place: Path) -> tuple[Seen, Seen]:
    """Run two at once; returns what was seen of each, after all of it was checked."""
    place.mkdir(parents=True)
    started = {name: start(place, name, seed) for seed, name in enumerate(("one", "two"), 1)}
    codes = {name: process.wait(60 * MINUTES) for name, process in started.items()}
    tails = {name: (place / f"{name}.out").read_text()[-2000:] for name in started}
    assert codes == {"one": 0, "two": 0}, tails
    return compared(place)


def compared(place: Path) -> tuple[Seen, Seen]:
    """Return what the records of a pair say; raises AssertionError where two runs have met."""
    one, two = (seen_by(RunFolder.open(place / "runs" / name)) for name in ("one", "two"))
    for seen in (one, two):
        assert seen.identities == seen.of_logs
        assert "" not in seen.identities
        assert not seen.refused
        assert seen.version == STEPS
        assert seen.mismatch < MISMATCH < OTHER_MODEL
    assert not one.identities & two.identities
    assert not one.addresses & two.addresses
    return one, two


def main() -> None:
    """Run as many pairs as are asked for, and say of each what was seen."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    for index in range(number):
        began_s = time.monotonic()
        one, two = run_pair(folder / str(index))
        sys.stdout.write(f"{index} {time.monotonic() - began_s:.0f} s {one} {two}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
