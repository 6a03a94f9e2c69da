"""What rounding explains of the difference between packed and single samples, and what it does not.

Both grow with depth and with the size of logits, so the check measures one against the other.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from telescope_core.errors import ConfigError
from telescope_train.diagnostics.rank_checks import Tolerance, check_packing, check_sharing
from telescope_train.models import packed
from telescope_train.models.head import PLAIN
from telescope_train.models.head_check import HEAD_LIMIT
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import VOCAB, backend_settings


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return the folder of a deep model with large logits, as trained models have."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", seed=0)
    config = Qwen3Config.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 32, ["full_attention"] * 32
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        model.lm_head.weight.data *= 12.0
    model.save_pretrained(folder)
    return folder


class OneTokenLeaks:
    """A backend in whose packed rows one token of the second sample sees the first."""

    def __init__(self, backend) -> None:
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def logprobs(self, batches):
        (batch,) = batches
        (found_T,) = self._backend.logprobs(batches)
        one = replace(
            batch,
            positions_T=np.arange(len(batch.positions_T), dtype=np.int32),
            sequence_ids_T=np.zeros_like(batch.sequence_ids_T),
        )
        (leaked_T,) = self._backend.logprobs([one])
        place = int(np.flatnonzero(batch.sequence_ids_T == batch.sequence_ids_T[-1])[1])
        found_T[place] = leaked_T[place]
        return [found_T]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deep_model_with_large_logits_passes_and_a_leak_in_it_does_not(deep, start, dtype):
    worker = start(backend_settings(deep, dtype=dtype))
    found = {test.name: test for test in worker.self_tests}["packing does not leak"]
    assert found.value < found.limit
    with pytest.raises(ConfigError, match="packed samples"):
        check_packing(
            OneTokenLeaks(worker.backend), vocab_size=VOCAB, tolerance=Tolerance.from_dtype(dtype)
        )
    if dtype == "bfloat16":
        # A fixed limit this large would miss the leak in the small model below.
        assert found.limit > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_leak_in_a_small_model_is_found_too(tiny, start, dtype):
    worker, tolerance = start(backend_settings(tiny, dtype=dtype)), Tolerance.from_dtype(dtype)
    found = check_packing(worker.backend, vocab_size=VOCAB, tolerance=tolerance)
    assert found.value < found.limit
    with pytest.raises(ConfigError, match=r"packed samples.* \d"):
        check_packing(OneTokenLeaks(worker.backend), vocab_size=VOCAB, tolerance=tolerance)


class RoundsByLength:
    """A backend on a processor that rounds long rows, and short ones not."""

    def __init__(self, backend) -> None:
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def logprobs(self, batches):
        return [self._rounded(batch) for batch in batches]

    def transformers_logprobs(self, batches):
        return [self._rounded(batch) for batch in batches]

    def _rounded(self, batch):
        (found_T,) = self._backend.logprobs([batch])
        noise = np.random.default_rng(len(found_T)).normal(0.0, 0.3, len(found_T))
        return (found_T + noise * (len(found_T) > 24)).astype(np.float32)


@pytest.mark.slow
def test_rows_of_other_lengths_may_be_rounded_in_another_way(tiny, start):
    worker = start(backend_settings(tiny, dtype="bfloat16"))
    backend, tolerance = RoundsByLength(worker.backend), Tolerance.from_dtype("bfloat16")
    assert check_packing(backend, vocab_size=VOCAB, tolerance=tolerance).value > 0.2
    check_sharing(backend, vocab_size=VOCAB, tolerance=tolerance).require()


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """Return the folder of a Gemma 2 whose logits are beyond its soft cap of 30."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "capped", seed=0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config)
        model.model.embed_tokens.weight.normal_(std=2.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_model_without_its_soft_cap_is_refused_in_every_dtype(capped, start, monkeypatch, dtype):
    settings = backend_settings(capped, dtype=dtype)
    found = {test.name: test for test in start(settings).self_tests}
    assert found["output head is that of transformers"].value < HEAD_LIMIT / 10
    assert any("eager" in name for name in found), "its scores have a cap as well"
    # Layers are compared below a head in float32: logits of 30 are rounded by a tenth in bfloat16.
    assert found["packing does not leak"].value < 0.01
    monkeypatch.setattr(packed, "head_rule", lambda config: PLAIN)
    with pytest.raises(ConfigError, match="output head is that of transformers"):
        start(settings)
