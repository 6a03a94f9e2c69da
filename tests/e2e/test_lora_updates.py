"""With LoRA a live vLLM server follows the trainer, given merged matrices or the adapter alone."""

import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.e2e.conftest import backend_settings, local_ranks, tiny_server
from tests.e2e.test_weight_updates import (
    TEMPERATURE,
    mismatch_after_update,
    reply_across,
    rollout_of,
    sample,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope_train.backends.protocol import BackendSettings, TransferError
from telescope_train.batches.batch import Shards, StepPlan, TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.inference.client import TokenClient
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import SERVED_MODEL_NAME, running
from telescope_train.models.served_adapter import ServedAdapter
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.weights.publish import WeightPublisher

pytestmark = pytest.mark.engine

NUM_UPDATES = 4
SMALL_RATE = 1e-5
ADAPTED = {"use_lora": True, "lora_rank": 4, "lora_target_modules": ("q_proj", "down_proj")}
NUM_TEXTS, LENGTH = 32, 200
WAYS = pytest.mark.parametrize("sends_adapter", [False, True], ids=["merged", "adapter"])


@asynccontextmanager
async def served(
    settings: BackendSettings, log_path: Path, *, dtype: str
) -> AsyncIterator[tuple[ServerPool, LocalRanks, WeightPublisher]]:
    """Yield a server of its own, a trainer rank and the connected way between them."""
    server = replace(tiny_server(Path(settings.model.model), log_path), dtype=dtype)
    with running(server, deadline_s=180):
        async with trained_at(server.base_url, settings) as way:
            yield way


@asynccontextmanager
async def trained_at(
    base_url: str, settings: BackendSettings, *, restores: bool = False
) -> AsyncIterator[tuple[ServerPool, LocalRanks, WeightPublisher]]:
    """Yield the pool of a running server, a trainer rank and the connected way between them.

    `restores`: whether the server has held other weights, and gets those of the rank.
    """
    pool, ranks = ServerPool([TokenClient(base_url)]), local_ranks(settings)
    try:
        publisher = WeightPublisher(
            pool, ranks, in_flight="pause", sends_adapter=settings.sends_adapter
        )
        await publisher.connect()
        if restores:
            await publisher.restore(0)
        yield pool, ranks, publisher
    finally:
        await ranks.close()
        await pool.close()


@pytest.fixture(scope="module")
def bfloat16_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights that bfloat16 holds exactly."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bfloat16"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter_server(bfloat16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server in float32 that takes adapters such as those of `ADAPTED`."""
    adapter = ServedAdapter.from_settings(backend_settings(bfloat16_model, **ADAPTED).trainer)
    log = tmp_path_factory.mktemp("logs") / "inference.log"
    server = replace(tiny_server(bfloat16_model, log), adapter=adapter)
    with running(server, deadline_s=180):
        yield server.base_url


def with_dtypes(settings: BackendSettings, **dtypes: str) -> BackendSettings:
    """Return `settings` with other dtypes in `[model]`."""
    return replace(settings, model=settings.model.model_copy(update=dtypes))


def texts() -> list[NDArray[np.int32]]:
    """Return token ids that no model wrote."""
    rng = np.random.default_rng(0)
    return [rng.integers(7, 100, LENGTH).astype(np.int32) for _ in range(NUM_TEXTS)]


def shards_of(some: list[NDArray[np.int32]]) -> Shards:
    """Return `some`, packed; every token but the first is trained on, with noise as advantages."""
    rng = np.random.default_rng(1)
    samples = [
        TrainingSample(
            token_ids=token_ids,
            mask=np.arange(len(token_ids)) > 0,
            behavior_logprobs=np.where(np.arange(len(token_ids)) > 0, -4.0, np.nan).astype(
                np.float32
            ),
            advantage=float(rng.normal()),
            temperature=1.0,
            oldest_version=0,
            newest_version=0,
            group_id="g",
            rollout_index=index,
            environment="toy",
        )
        for index, token_ids in enumerate(some)
    ]
    return pack(samples, np.ones(len(samples)) / NUM_TEXTS, seq_len=1024, num_ranks=1)


async def by_trainer(ranks: LocalRanks, shards: Shards) -> NDArray[np.float32]:
    """Return the log-prob, nats, of every trained token, by text."""
    (found,) = await ranks.logprobs(shards)
    by_text: dict[bytes, NDArray[np.float32]] = {}
    for batch, logprobs_T in zip(shards[0], found, strict=True):
        for sequence in np.unique(batch.sequence_ids_T[batch.mask_T]):
            here = batch.sequence_ids_T == sequence
            by_text[batch.token_ids_T[here].tobytes()] = logprobs_T[here & batch.mask_T]
    return np.concatenate([by_text[one.tobytes()] for one in texts()])


async def by_engine(pool: ServerPool) -> NDArray[np.float32]:
    """Return the same of the engine, through vLLM's own route."""
    found: list[float] = []
    async with aiohttp.ClientSession() as session:
        for number, token_ids in enumerate(texts()):
            body = {
                "model": SERVED_MODEL_NAME,
                "prompt": token_ids.tolist(),
                "max_tokens": 1,
                "prompt_logprobs": 0,
                "cache_salt": f"{pool.version}-{number}",
            }
            url = f"{pool.clients[0].base_url}/v1/completions"
            async with session.post(url, json=body) as reply:
                answer = await reply.json()
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            found += [
                row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:], strict=True)
            ]
    return np.array(found, dtype=np.float32)


def by_transformers(weights: Mapping[str, torch.Tensor], model: Path) -> NDArray[np.float32]:
    """Return the same of transformers, for `model` with `weights`, in float32."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.load_state_dict(dict(weights), strict=False)
    ids = torch.tensor(np.stack(texts()), dtype=torch.long)
    with torch.no_grad():
        logprobs = lm(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    return logprobs.flatten().numpy()


@WAYS
async def test_engine_and_trainer_agree_with_lora(
    tiny_model: Path,
    bfloat16_model: Path,
    first_weights: str,
    adapter_server: str,
    sends_adapter: bool,
) -> None:
    model = bfloat16_model if sends_adapter else tiny_model
    settings = replace(
        backend_settings(model, learning_rate=0.02, **ADAPTED), sends_adapter=sends_adapter
    )
    base_url = adapter_server if sends_adapter else first_weights
    async with trained_at(base_url, settings, restores=True) as (pool, ranks, publisher):
        names = [header.name for header in await ranks.weight_headers()]
        assert len(names) == (3 * 2 * 2 if sends_adapter else 3 * 7)
        assert not any("norm" in name or "embed" in name for name in names)
        assert all(("lora_" in name) == sends_adapter for name in names)
        policies = TokenPolicySource(pool, load_renderer(settings.model), max_model_len=256)
        rng = random.Random(0)
        rows = []
        for version in range(NUM_UPDATES):
            completions = await sample(policies, rng)
            assert {completion.oldest_version for completion in completions} == {version}
            samples = [
                one
                for index, completion in enumerate(completions)
                for one in samples_from_rollout(
                    rollout_of(completion, index=index), (-1.0) ** index, TEMPERATURE
                )
            ]
            weights_N = token_weights(samples, "token", max_tokens=12)
            shards = pack(samples, weights_N, seq_len=1024, num_ranks=1)
            plan = StepPlan(minibatches=[shards], order=[0])
            rows.append(await ranks.train_step(plan, version))
            await publisher.publish(version + 1)
        assert max(row["mismatch/max"] for row in rows) <= 1e-3
        moved = abs(rows[-1]["loss/total"] - rows[0]["loss/total"])
        assert moved > 1e-3
        # A request that runs during an update goes on with the new adapter, and says so.
        await ranks.train_step(plan, NUM_UPDATES)
        reply = await reply_across(pool, publisher, NUM_UPDATES + 1)
        assert await mismatch_after_update(ranks, reply) <= 1e-3


@WAYS
async def test_the_first_small_update_arrives_whole(
    bfloat16_model: Path, first_weights: str, adapter_server: str, sends_adapter: bool
) -> None:
    """Weights in bfloat16, layers in float32: only rounding of the weights could lose it."""
    settings = with_dtypes(
        backend_settings(bfloat16_model, learning_rate=SMALL_RATE, **ADAPTED),
        model_dtype="bfloat16",
        mixed_precision_dtype="float32",
    )
    settings = replace(settings, sends_adapter=sends_adapter)
    base_url = adapter_server if sends_adapter else first_weights
    if not sends_adapter:
        # What is not adapted is not sent either, and the server holds it in more digits.
        async with trained_at(base_url, backend_settings(bfloat16_model), restores=True):
            pass
    async with trained_at(base_url, settings, restores=True) as (pool, ranks, publisher):
        shards = shards_of(texts())
        trainer, engine = await by_trainer(ranks, shards), await by_engine(pool)
        assert np.abs(engine - trainer).max() < 1e-4
        await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), 0)
        await publisher.publish(1)
        moved = await by_trainer(ranks, shards) - trainer
        followed = await by_engine(pool) - engine
        assert np.linalg.norm(moved) / len(moved) ** 0.5 > 1e-4
        assert np.linalg.norm(followed - moved) < 0.02 * np.linalg.norm(moved)


@pytest.mark.nightly
async def test_small_updates_reach_a_bfloat16_engine_whole_on_average(
    bfloat16_model: Path, tmp_path: Path
) -> None:
    """The noise of bfloat16 is there with every weight; the part of the update is what counts.

    That of the weights that are sent is tested in `tests/train/models/test_lora.py`.
    """
    settings = with_dtypes(
        backend_settings(bfloat16_model, learning_rate=SMALL_RATE, use_lora=True),
        model_dtype="float32",
        mixed_precision_dtype="bfloat16",
    )
    log = tmp_path / "inference.log"
    async with served(settings, log, dtype="bfloat16") as (pool, ranks, publisher):
        shards, initial = shards_of(texts()), dict(ranks.worker.export_weights())
        await publisher.publish(0)
        before = await by_engine(pool)
        for version in range(10):
            await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), version)
        await publisher.publish(10)
        followed = await by_engine(pool) - before
        trained = dict(ranks.worker.export_weights())
        moved = by_transformers(trained, bfloat16_model) - by_transformers(initial, bfloat16_model)
        # Rounded to nearest it is 0.25; the standard error is 0.03.
        assert 0.85 < float(followed @ moved / (moved @ moved)) < 1.15


@pytest.mark.nightly
async def test_an_adapter_that_the_engine_cannot_place_is_an_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = replace(
        backend_settings(tiny_model, use_lora=True, lora_target_modules=("q_proj", "down_proj")),
        sends_adapter=True,
    )
    log = tmp_path / "inference.log"
    server = replace(
        tiny_server(tiny_model, log), adapter=ServedAdapter(rank=16, target_modules=("q_proj",))
    )
    with running(server, deadline_s=180):
        pool, ranks = ServerPool([TokenClient(server.base_url)]), local_ranks(settings)
        try:
            publisher = WeightPublisher(pool, ranks, in_flight="pause", sends_adapter=True)
            with pytest.raises(TransferError, match=r"adapter.*down_proj"):
                await publisher.connect()
        finally:
            await ranks.close()
            await pool.close()
