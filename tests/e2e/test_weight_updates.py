"""Weights go from the trainer to a live vLLM server, in place; nothing of the old ones stays."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.conftest import backend_settings, connected, local_ranks
from tests.e2e.test_token_plane import DEADLINE_S, PROMPT, until_running

from telescope_core.types import Completion, Message, Rollout, Sampling, Turn
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.transfer import Wire
from telescope_train.batches.batch import StepPlan, TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.inference import client as client_module
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Request
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.wire import TokenReply, VersionSpan
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.weights.disk import current_update
from telescope_train.weights.publish import WeightPublisher
from telescope_train.weights.transport import TRANSFER_DEADLINE_S

pytestmark = pytest.mark.engine

NUM_UPDATES = 20
TEMPERATURE = 0.8
LENGTH = 800
Answer = TypeVar("Answer")


def rollout_of(completion: Completion, *, index: int) -> Rollout:
    turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
    return Rollout(
        environment="toy", example_id="x", group_id="g", index=index, turns=(turn,), reward=1.0
    )


async def sample(policies: TokenPolicySource, rng: random.Random) -> list[Completion]:
    prompts = [f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=" for _ in range(8)]
    sampling = Sampling(max_tokens=12, temperature=TEMPERATURE)
    return await asyncio.gather(
        *(
            policies.policy(f"g{i}/0").complete([Message(role="user", content=text)], sampling)
            for i, text in enumerate(prompts)
        )
    )


async def answer_across(
    client: TokenClient,
    ask: Callable[[int], Awaitable[Answer]],
    versions_of: Callable[[Answer], Sequence[str | int]],
    publish: Awaitable[object],
) -> Answer:
    """Publish while long answers are sampled; returns one that has tokens of both versions.

    Answers follow each other until then, because one could end before the server is told. They have
    different lengths, so that all of them never begin at the same time.
    """
    is_published = asyncio.Event()

    async def answers(length: int) -> Answer:
        while True:
            is_last = is_published.is_set()
            answer = await ask(length)
            if is_last or len(versions_of(answer)) > 1:
                return answer

    rows = [asyncio.create_task(answers(length)) for length in (LENGTH, LENGTH - 170)]
    await until_running(client, len(rows))
    await publish
    is_published.set()
    found = await asyncio.wait_for(asyncio.gather(*rows), DEADLINE_S)
    return next(one for one in found if len(versions_of(one)) > 1)


async def reply_across(pool: ServerPool, publisher: WeightPublisher, version: int) -> TokenReply:
    """Publish `version` while long answers are sampled; returns one that has tokens of both."""
    (client,) = pool.clients
    plane = await client._open_plane()

    def ask(length: int) -> Awaitable[TokenReply]:
        params = {"max_tokens": length, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        encoded = msgspec.Raw(msgspec.msgpack.encode({**params, "temperature": TEMPERATURE}))
        salt = f"v{pool.version}"
        return plane.request(PROMPT, sampling=encoded, cache_salt=salt, priority=0)

    def versions_of(reply: TokenReply) -> list[str]:
        return [span.version for span in reply.versions]

    reply = await answer_across(client, ask, versions_of, publisher.publish(version))
    assert versions_of(reply) == [str(version - 1), str(version)]
    return reply


async def mismatch_after_update(ranks: LocalRanks, reply: TokenReply) -> float:
    """Return the largest difference to the trainer's log-probs, nats, after the new weights."""
    written = np.frombuffer(reply.token_ids, dtype=np.int32)
    prompt = np.array(PROMPT, dtype=np.int32)
    behavior = np.frombuffer(reply.logprobs, dtype=np.float32)
    sample = TrainingSample(
        token_ids=np.concatenate([prompt, written]),
        mask=np.arange(len(prompt) + len(written)) >= len(prompt),
        behavior_logprobs=np.concatenate([np.full(len(prompt), np.nan, np.float32), behavior]),
        advantage=1.0,
        temperature=TEMPERATURE,
        oldest_version=0,
        newest_version=0,
        group_id="g",
        rollout_index=0,
        environment="toy",
    )
    shards = pack([sample], np.ones(1, dtype=np.float32), seq_len=1024, num_ranks=1)
    ((logprobs_T,),) = await ranks.logprobs(shards)
    first = len(prompt) + reply.versions[1].start
    return float(np.abs(logprobs_T[first : len(sample)] - sample.behavior_logprobs[first:]).max())


def logged_so_far(log: Path) -> str:
    return log.read_text()


async def test_engine_and_trainer_agree_over_many_updates(
    tiny_model: Path,
    fresh_pool: ServerPool,
    server_log: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    settings = backend_settings(tiny_model, learning_rate=2e-3)
    ranks = local_ranks(settings)
    # The server is shared, and other tests send it parts of a model on purpose.
    logged = len(logged_so_far(server_log))
    try:
        publisher = await connected(fresh_pool, ranks)
        policies = TokenPolicySource(fresh_pool, load_renderer(settings.model), max_model_len=256)
        weighting = load_algorithm("grpo").weighting
        rng = random.Random(0)
        mismatches: list[float] = []
        for version in range(NUM_UPDATES):
            completions = await sample(policies, rng)
            assert {c.oldest_version for c in completions} == {version}
            assert {c.newest_version for c in completions} == {version}
            samples = [
                one
                for index, completion in enumerate(completions)
                for one in samples_from_rollout(
                    rollout_of(completion, index=index), (-1.0) ** index, TEMPERATURE
                )
            ]
            weights_N = token_weights(samples, weighting, max_tokens=12)
            shards = pack(samples, weights_N, seq_len=1024, num_ranks=1)
            row = await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), version)
            mismatches.append(max(abs(row["mismatch/max"]), abs(row["mismatch/min"])))
            await publisher.publish(version + 1)
        assert max(mismatches) <= 1e-3, mismatches
        assert fresh_pool.version == NUM_UPDATES
        # The model has tied embeddings, and tables of rotations without weights.
        assert "Failed to load weights" not in logged_so_far(server_log)[logged:]
        # The trainer is ahead of the servers from here on: each publish below changes the weights.
        keeping = WeightPublisher(fresh_pool, ranks, in_flight="continue")
        keeping._headers = publisher._headers
        off: dict[str, float] = {}
        for version, (name, one) in enumerate({"pause": publisher, "continue": keeping}.items()):
            await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), NUM_UPDATES + version)
            reply = await reply_across(fresh_pool, one, NUM_UPDATES + version + 1)
            off[name] = await mismatch_after_update(ranks, reply)
        # What is computed again is exactly what the new weights say. What is kept is not, and the
        # log-probs that were recorded are still those that were sampled from.
        assert off["pause"] <= 1e-3 < off["continue"], off
        await requests_that_are_ended_go_on(fresh_pool, publisher, ranks, monkeypatch)
        await update_that_fails_once(fresh_pool, publisher, ranks)
        reply = await reply_across(fresh_pool, publisher, fresh_pool.version + 1)
        assert await mismatch_after_update(ranks, reply) <= 1e-3
        for number, wire in enumerate(other_ways(tmp_path)):
            await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), fresh_pool.version)
            other = WeightPublisher(fresh_pool, ranks, in_flight="pause", wire=wire)
            await other.connect()
            reply = await reply_across(fresh_pool, other, fresh_pool.version + 1)
            assert await mismatch_after_update(ranks, reply) <= 1e-3, number
        folder = current_update(tmp_path / "weights")
        assert_is_model(folder, ranks)
    finally:
        await ranks.close()


def other_ways(tmp_path: Path) -> list[Wire]:
    """Other ways than large buckets over TCP."""
    in_files = Wire(
        transport="disk",
        is_staged=True,
        bucket_bytes=300_000,
        folder=str(tmp_path / "weights"),
        model=str(tmp_path),
    )
    return [Wire(bucket_bytes=0), Wire(is_staged=True, bucket_bytes=100_000), in_files]


def assert_is_model(folder: Path, ranks: LocalRanks) -> None:
    """Check that the files of an update are what any program reads as a model's weights."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sent = dict(ranks._ranks[0]._worker.transfer_weights())
    assert index["weight_map"].keys() == sent.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], sent[name])


async def requests_that_are_ended_go_on(
    pool: ServerPool,
    publisher: WeightPublisher,
    ranks: LocalRanks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `abort`: each token has its own version, and later ones the new weights' log-probs."""
    ending = WeightPublisher(pool, ranks, in_flight="abort")
    ending._headers = publisher._headers

    def endless(sampling: Sampling, _: Sequence[int]) -> msgspec.Raw:
        # A random model's end of turn does not stop it.
        params = {"max_tokens": sampling.max_tokens, "temperature": TEMPERATURE, "logprobs": 0}
        return msgspec.Raw(
            msgspec.msgpack.encode({**params, "ignore_eos": True, "detokenize": False})
        )

    monkeypatch.setattr(client_module, "encoded_params", endless)
    version = pool.version + 1
    answer = await answer_across(
        pool.clients[0],
        lambda length: pool.generate(
            Request(prompt_ids=PROMPT, sampling=Sampling(max_tokens=length), group_id="ended")
        ),
        lambda found: [span.version for span in found.spans],
        ending.publish(version),
    )
    publisher._group = []  # the servers have left its group for that of the other publisher
    monkeypatch.undo()
    assert len(answer.token_ids) == len(answer.logprobs) >= LENGTH - 170
    assert [span.version for span in answer.spans] == [version - 1, version]
    reply = TokenReply(
        0,
        token_ids=answer.token_ids.tobytes(),
        logprobs=answer.logprobs.tobytes(),
        versions=(
            VersionSpan(str(version - 1), 0),
            VersionSpan(str(version), answer.spans[0].num_tokens),
        ),
    )
    assert await mismatch_after_update(ranks, reply) <= 1e-3


async def update_that_fails_once(
    pool: ServerPool, publisher: WeightPublisher, ranks: LocalRanks
) -> None:
    """Publish while the first transfer breaks off, as when another server dies in it."""
    worker = ranks._ranks[0]._worker
    sending = worker._sending._sender
    assert sending is not None

    def break_off(bucket: object, flat: object) -> NoReturn:
        raise RuntimeError("connection closed by peer")

    sending.send = break_off
    # Far below the deadline of a transfer: the servers do not wait for a sender that has left.
    async with asyncio.timeout(TRANSFER_DEADLINE_S / 2):
        await publisher.publish(pool.version + 1)
    assert worker._sending._sender is not sending
    assert [server.life for server in pool.servers] == [1]
