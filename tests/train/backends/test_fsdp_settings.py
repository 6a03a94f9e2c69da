"""What `fsdp_prefetch_layers` and `fp32_lm_head` change inside a rank, and what they do not."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from telescope_train.backends.fsdp.sharding import decoder_layers
from telescope_train.models import packed
from telescope_train.models.logprobs import chunked_logprobs

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import backend_settings, grpo_batches


def prefetched(worker) -> list[tuple[list[int], list[int]]]:
    """Return, by layer, the layers that are gathered while it runs: forward and backward."""
    states = [layer._get_fsdp_state() for layer in decoder_layers(worker.backend._policy.lm)]
    return [
        (
            [states.index(other) for other in one._states_to_forward_prefetch],
            [states.index(other) for other in one._states_to_backward_prefetch],
        )
        for one in states
    ]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        # Torch looks ahead by itself then.
        pytest.param(0, [([], []), ([], []), ([], [])], marks=pytest.mark.slow),
        pytest.param(1, [([1], []), ([2], [0]), ([], [1])], marks=pytest.mark.slow),
        (2, [([1, 2], []), ([2], [0]), ([], [1, 0])]),
        pytest.param(9, [([1, 2], []), ([2], [0]), ([], [1, 0])], marks=pytest.mark.slow),
    ],
)
def test_layers_are_gathered_in_the_order_of_their_use(tiny, start, num_layers, expected):
    assert prefetched(start(backend_settings(tiny, fsdp_prefetch_layers=num_layers))) == expected


@pytest.mark.slow
def test_gathering_ahead_leaves_the_gradient_bit_for_bit(tiny, start):
    found = []
    for num_layers in (0, 2):
        worker = start(backend_settings(tiny, fsdp_prefetch_layers=num_layers))
        worker.backend.accumulate_gradient(grpo_batches(seq_len=128)[0], version=0)
        found.append({name: value.clone() for name, value in worker.backend.export_gradient()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("is_wide", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_float32_head_computes_the_log_probs_of_the_weights_it_has(
    tiny, start, monkeypatch, is_wide
):
    """Beside a head in float64 over the same bfloat16 values; without it logits are rounded."""
    seen = []

    def spy(hidden_TH, weight_VH, targets_T, temperatures_T, **options):
        result = chunked_logprobs(hidden_TH, weight_VH, targets_T, temperatures_T, **options)
        logits_TV = hidden_TH.double() @ weight_VH.double().T / temperatures_T.double()[:, None]
        exact_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]
        seen.append((exact_T.detach(), result[0].detach().double()))
        return result

    settings = backend_settings(tiny)
    model = settings.model.model_copy(
        update={"mixed_precision_dtype": "bfloat16", "fp32_lm_head": is_wide}
    )
    worker = start(replace(settings, model=model))
    monkeypatch.setattr(packed, "chunked_logprobs", spy)
    worker.logprobs(grpo_batches(seq_len=128)[0])
    errors = np.concatenate([(exact_T - found_T).abs().numpy() for exact_T, found_T in seen])
    assert errors.max() < 1e-5 if is_wide else errors.max() > 1e-3
