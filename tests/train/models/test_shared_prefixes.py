"""A row in which samples share prefixes gives the log-probs and gradient of each by itself."""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations import flash_attention

from telescope_train.models import moving
from telescope_train.models.attention.blocks import find_sequences
from telescope_train.models.attention.kinds import ATTENTION_KINDS, SDPA, SHARING_KINDS
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.row import packed_row

sys.path.insert(0, str(Path(__file__).parents[1]))
from prefix_trees import plain_batches, random_tree, sharing_all

CPU = torch.device("cpu")
VOCAB = 61
CASCADE = next(kind for kind in SHARING_KINDS if kind.name == "cascade")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
GEMMA = {**SIZES, "head_dim": 8, "sliding_window": 5}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "one window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "some windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"])
    ),
}


def wide_norm(norm, hidden):
    """The norm in the dtype of its input; transformers rounds to float32 for it."""
    weight = norm.weight + 1.0 if type(norm).__name__.startswith("Gemma") else norm.weight
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    return weight * hidden * (hidden.square().mean(-1, keepdim=True) + epsilon).rsqrt()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in MODELS
    ],
)
def policy(request):
    torch.manual_seed(0)
    lm = MODELS[request.param]()
    for module in lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(wide_norm, module)
    for parameter in lm.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    policy = PackedPolicy(lm.double(), chunk_size=7, vocab_size=VOCAB, entropy_grad=True)
    return policy.eval()


def found(policy, batch, kind, *, share=True):
    """Return log-probs, entropies and the gradient of a loss of both, in float64."""
    policy.use_attention(kind)
    policy.zero_grad()
    row = packed_row(batch, CPU, multiple_of=8, share=share)
    logprobs_M, entropy_M = policy(row)
    weights_M = torch.from_numpy(np.cos(np.arange(len(logprobs_M)) * 1.7))
    (weights_M * logprobs_M + 0.3 * weights_M.flip(0) * entropy_M).sum().backward()
    gradient = torch.cat([one.grad.flatten() for one in policy.parameters()])
    return logprobs_M.detach(), entropy_M.detach(), gradient, row


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 10))
def test_logprobs_entropies_and_gradient_are_those_of_samples_by_themselves(policy, seed, num):
    generator = np.random.default_rng(seed)
    ((plain,),) = plain_batches(random_tree(generator, num=num, vocab=VOCAB))
    shared = sharing_all(plain, sometimes=generator)
    expected = found(policy, plain, SDPA)
    for batch in (shared, plain):
        together = found(policy, batch, CASCADE)
        for one, other in zip(together[:3], expected[:3], strict=True):
            assert (one - other).norm() <= 1e-12 * (1 + other.norm())
    row = found(policy, shared, CASCADE)[3]
    assert len(row.token_ids_T) == -(-shared.num_computed_tokens // 8) * 8


FLASH = {
    "flash_attn": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
    "flash_attn_4": "flash_attention_4",
}


def by_the_formulas(query, key, value, attention_mask, *, query_length, is_causal, **options):
    """Stand for the kernels of flash-attn: [1, T, H, D], each piece causal from its end."""
    # transformers finds its kernels by these names, and knows no other.
    assert options["attn_implementation"] in FLASH.values()
    assert is_causal
    outputs = []
    starts_q, starts_k = (options[f"cu_seq_lens_{one}"].tolist() for one in "qk")
    for (q, q_end), (k, k_end) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        states = query[0, q:q_end], key[0, k:k_end], value[0, k:k_end]
        query_HLD, key_HKD, value_HKD = (one.transpose(0, 1) for one in states)
        times = len(query_HLD) // len(key_HKD)
        key_HKD, value_HKD = (one.repeat_interleave(times, 0) for one in (key_HKD, value_HKD))
        scores = query_HLD @ key_HKD.mT * options["softmax_scale"]
        places_L = torch.arange(k_end - k)[-(q_end - q) :]
        behind_LK = places_L[:, None] - torch.arange(k_end - k)
        window = options["sliding_window"] or k_end
        is_hidden = (behind_LK < 0) | (behind_LK >= window)
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ value_HKD).transpose(0, 1))
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("name", FLASH)
def test_flash_attn_is_called_as_transformers_calls_it(policy, monkeypatch, name):
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", by_the_formulas)
    generator = np.random.default_rng(0)
    ((plain,),) = plain_batches(random_tree(generator, num=6, vocab=VOCAB))
    shared = sharing_all(plain, sometimes=generator)
    own = next(one for one in ATTENTION_KINDS if one.name == name)
    over = next(one for one in SHARING_KINDS if one.name == f"{name} over prefixes")
    expected = found(policy, plain, SDPA)
    for batch, kind in ((plain, own), (plain, over), (shared, over)):
        assert kind.arguments.args == (FLASH[name],)
        for one, other in zip(found(policy, batch, kind)[:3], expected[:3], strict=True):
            assert (one - other).norm() <= 1e-12 * (1 + other.norm())


def test_flash_attn_asks_layers_of_other_libraries_for_nothing_of_transformers(monkeypatch):
    """Megatron's attention has no config in which transformers would look for its kernels."""
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", by_the_formulas)
    layer = torch.nn.Module()
    layer.is_causal = True
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    value = value.bfloat16()
    kind = next(one for one in ATTENTION_KINDS if one.name == "flash_attn")
    sequences = find_sequences(np.array([0, 1, 2, 0, 1]), torch.device("cpu"))
    output, _ = AttentionInterface()[kind.implementation](
        layer, query, key, value, None, scaling=0.5, dropout=0.0, **kind.arguments(sequences)
    )
    assert output.dtype == torch.bfloat16
    assert output.shape == (1, 5, 2, 4)
    torch.testing.assert_close(output[0, 3], value[0, :, 3])


@pytest.mark.parametrize("part", [None, 40])
def test_gradients_of_a_token_of_many_samples_are_added_up_without_rounding(monkeypatch, part):
    """In bfloat16, 256 samples of a prefix cost its gradient 1 to 3 %."""
    if part is not None:
        monkeypatch.setattr(moving, "_PART", part * 2 * 3 * 8)
    generator = torch.Generator().manual_seed(0)
    # Every sample attends to the same 5 tokens and to one of its own.
    own = torch.arange(5, 5 + 256)
    places = torch.cat([torch.tensor([*range(5), int(one)]) for one in own])
    states = torch.randn(1, 2, 261, 8, generator=generator).bfloat16().requires_grad_()
    upstream = torch.rand(1, 2, len(places), 8, generator=generator).bfloat16()
    taken = moving.take_shared(states, 2, places)
    assert torch.equal(taken, states.index_select(2, places))
    (found,) = torch.autograd.grad(taken, states, upstream)
    exact = torch.zeros(states.shape, dtype=torch.float64)
    exact.index_add_(2, places, upstream.double())
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.equal(found[:, :, 5:].double(), exact[:, :, 5:])


@pytest.mark.parametrize("name", ["flash_attn"])
def test_a_row_in_bfloat16_adds_up_gradients_of_prefixes_in_float32(monkeypatch, name):
    """Those of keys, of values, and of the hidden states that predict many first tokens."""
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", by_the_formulas)
    widths = []
    index_add = torch.Tensor.index_add_
    monkeypatch.setattr(
        torch.Tensor,
        "index_add_",
        lambda summed, *rest: (widths.append(summed.dtype), index_add(summed, *rest))[1],
    )
    torch.manual_seed(0)
    policy = PackedPolicy(MODELS["qwen3"]().bfloat16(), chunk_size=7, vocab_size=VOCAB).eval()
    ((plain,),) = plain_batches(random_tree(np.random.default_rng(0), num=6, vocab=VOCAB))
    policy.use_attention(next(one for one in SHARING_KINDS if one.name == f"{name} over prefixes"))
    row = packed_row(sharing_all(plain), CPU, multiple_of=8)
    policy(row).logprobs_M.sum().backward()
    # Two layers, keys and values, and the head.
    assert widths == [torch.float32] * 5
