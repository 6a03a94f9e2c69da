"""Routing replay: gradients against a slow float64 version, and routes on their way to it."""

import json
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from telescope_core.base.chains import ChainRecorder
from telescope_core.errors import ConfigError
from telescope_core.types import Completion, Message, Rollout, Turn
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.wire import TokenReply, routes_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import (
    backend_settings,
    gradient_of,
    grpo_batches,
    make_mixture,
    relative_difference,
    slow_gradient,
)
from routed_cases import routed_batches, slow_routed_gradient

KINDS = ("qwen3_moe", "qwen3_moe with weights as they are", "mixtral")


@pytest.fixture(
    scope="module",
    params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])],
)
def mixture(request, tmp_path_factory):
    kind, _, as_they_are = request.param.partition(" ")
    folder = make_mixture(tmp_path_factory.mktemp(kind) / "model", kind)
    if as_they_are:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "gradient_checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_the_gradient_is_that_of_the_experts_that_were_chosen(
    mixture, start, gradient_checkpointing
):
    expected = slow_routed_gradient(mixture)
    settings = backend_settings(
        mixture, dtype="float64", gradient_checkpointing=gradient_checkpointing
    )
    worker = start(settings)
    config = worker.backend._policy.lm.config
    for seq_len in (40, 4096):
        found = gradient_of(worker, routed_batches(config, seq_len=seq_len)[0])
        # The routers of transformers compute their weights in float32.
        assert relative_difference(found, expected) < 1e-5
    # Rows without routes are computed as if there never had been any.
    own = gradient_of(worker, grpo_batches(seq_len=40)[0])
    assert relative_difference(own, slow_gradient(mixture)) < 1e-5
    assert relative_difference(own, expected) > 0.05


def test_the_models_own_routes_change_nothing(mixture, start):
    worker = start(backend_settings(mixture))
    policy, batches = worker.backend._policy, grpo_batches(seq_len=4096)[0]
    taken = []
    routers = [
        module for module in policy.lm.modules() if type(module).__name__.endswith("TopKRouter")
    ]
    hooks = [one.register_forward_hook(lambda *call: taken.append(call[2][2])) for one in routers]
    (expected,) = worker.logprobs(batches)
    for hook in hooks:
        hook.remove()
    routes = torch.stack(taken, 1).numpy().astype(np.int16)
    (found,) = worker.logprobs([replace(batches[0], routes_TLK=routes[: len(expected)])])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_routes_of_another_model_are_refused(mixture, tiny, start):
    worker = start(backend_settings(mixture))
    batch = routed_batches(worker.backend._policy.lm.config, seq_len=4096)[0][0]
    with pytest.raises(ConfigError, match=r"\b2 layers.*\b2 experts"):
        worker.logprobs([replace(batch, routes_TLK=batch.routes_TLK[:, :1])])
    assert np.isfinite(worker.logprobs([batch])[0]).all(), "its own routes are taken"
    worker = start(backend_settings(tiny))
    with pytest.raises(ConfigError, match="router"):
        worker.logprobs([batch])
    assert np.isfinite(worker.logprobs([replace(batch, routes_TLK=None)])[0]).all()


def test_the_reference_model_chooses_by_itself(mixture, start):
    settings = backend_settings(mixture)
    algorithm = settings.algorithm.model_copy(update={"kl_penalty_tau": 0.1})
    worker = start(replace(settings, algorithm=algorithm))
    batch = routed_batches(worker.backend._policy.lm.config, seq_len=4096)[0][0]
    (with_routes,) = worker.reference_logprobs([batch])
    (without,) = worker.reference_logprobs([replace(batch, routes_TLK=None)])
    np.testing.assert_array_equal(with_routes, without)


def experts(num_tokens: int, first: int) -> np.ndarray:
    """What vLLM returns of a request: numbers that tell tokens, layers and places apart."""
    return (first + np.arange(num_tokens * 3 * 2)).reshape(num_tokens, 3, 2).astype(np.uint8)


def test_routes_of_a_sample_are_those_with_which_its_answers_were_sampled():
    recorder, turns = ChainRecorder(), []
    prompt = [1, 2, 3]
    for number, answer in enumerate(([4, 5], [8, 9, 9])):
        # Of the last token that was sampled there are none: nobody computed it.
        said = routes_of(experts(len(prompt) + len(answer) - 1, first=100 * number))
        tokens = recorder.record(
            prompt, array("i", answer), [-1.0] * len(answer), temperature=1.0, routes=said
        )
        completion = Completion(
            message=Message(role="assistant", content=""),
            finish_reason="stop",
            tokens=tokens,
            oldest_version=0,
            newest_version=0,
        )
        turns.append(Turn(completion=completion, started_s=0.0, ended_s=1.0, temperature=1.0))
        prompt = [*prompt, *answer, 7]
    rollout = Rollout(environment="toy", example_id="a", group_id="g", index=0, turns=tuple(turns))
    (sample,) = samples_from_rollout(rollout, 1.0, 1.0)
    assert sample.routes.shape == (len(sample), 3, 2)
    # The second request computed the last token of the first answer, and what follows it.
    np.testing.assert_array_equal(sample.routes[:4], experts(4, first=0))
    np.testing.assert_array_equal(sample.routes[4:-1], experts(8, first=100)[4:])
    assert (sample.routes[-1] == -1).all()


def test_a_reply_counts_its_routes():
    with_routes = TokenReply(1, routes=routes_of(experts(4, first=0)))
    assert with_routes.num_bytes - TokenReply(1).num_bytes == 4 * 3 * 2 * 2
    assert routes_of(None) is None
