"""The start-up self-test of attention: what leaks or fails is refused, and the next is tried."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from telescope_core.errors import ConfigError
from telescope_train.models.attention import choice as choice_of_attention
from telescope_train.models.attention import kinds as attention_kinds
from telescope_train.models.attention.blocks import PACKED_ATTENTION, find_shared_sequences
from telescope_train.models.attention.cascade import CASCADE_ATTENTION
from telescope_train.models.attention.choice import choose_attention, choose_sharing
from telescope_train.models.attention.kinds import (
    ATTENTION_KINDS,
    EAGER,
    GATHERED_ATTENTION,
    SDPA,
    SHARING_KINDS,
    VARLEN_ATTENTION,
    AttentionKind,
    AttentionNeeds,
)
from telescope_train.models.attention.prefixes import SharedRow
from telescope_train.models.facts import facts_of

CPU = torch.device("cpu")
LAYER = SimpleNamespace(is_causal=True)
"""What kernels are told of the layer that calls them."""
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def leaky(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal over the row, whatever sample it is of."""
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


class CompilerError(Exception):
    """Not a RuntimeError, as those of CuTe."""


def broken(module, *arguments, **options):
    raise CompilerError("no kernel image is available")


def planted(name, function, implementation=None) -> AttentionKind:
    return AttentionKind(
        name=name,
        implementation=implementation or f"test_{name}",
        functions={f"test_{name}": function},
    )


@pytest.fixture(scope="module")
def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def test_on_the_cpu_packed_blocks_are_chosen_and_the_reasons_kept(llama):
    choice = choose_attention(llama, CPU, torch.float32)
    assert choice.kind.name == "packed_blocks"
    assert choice.difference < 1e-5
    assert set(choice.refused) == {"flash_attn_3", "flash_attn_4", "flash_attn", "varlen", "flex"}
    kinds = "flash_attn_3, flash_attn_4, flash_attn, varlen, flex"
    assert choice.reasons == f"not {kinds}: needs a CUDA device"
    assert llama.config.vocab_size == 97


@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("leaky", leaky, "leaks between packed samples"),
        ("broken", broken, "failed: no kernel image"),
    ],
)
def test_a_planted_kind_is_refused_and_the_next_is_taken(llama, name, function, reason):
    kinds = (planted(name, function), *ATTENTION_KINDS)
    choice = choose_attention(llama, CPU, torch.float32, kinds=kinds)
    assert choice.kind.name == "packed_blocks"
    assert reason in choice.refused[name]
    with pytest.raises(ConfigError, match=f"no attention .*{name}: {reason}"):
        choose_attention(llama, CPU, torch.float32, kinds=kinds[:1])


class _NoGradient(torch.autograd.Function):
    """The identity, whose backward is wrong."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


def wrong_backward(module, query, key, value, attention_mask, **options):
    attend = AttentionInterface()["sdpa"]
    return attend(module, query, key, _NoGradient.apply(value), attention_mask, **options)


def test_the_gradient_is_tested_too(llama):
    """Right forward, wrong backward. Without a mask function of its own, it goes without one."""
    kind = planted("wrong_backward", wrong_backward)
    AttentionMaskInterface.register("test_wrong_backward", AttentionMaskInterface()["sdpa"])
    with pytest.raises(ConfigError, match="leaks between"):
        choose_attention(llama, CPU, torch.float32, kinds=(kind,))
    right = planted("right", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("test_right", AttentionMaskInterface()["sdpa"])
    assert choose_attention(llama, CPU, torch.float32, kinds=(right,)).difference < 1e-5


def test_a_leak_shows_in_half_precision_as_well(llama):
    choice = choose_attention(
        llama, CPU, torch.bfloat16, kinds=(planted("leaky", leaky), *ATTENTION_KINDS)
    )
    assert choice.kind.name == "packed_blocks"
    assert "leaks" in choice.refused["leaky"]


FLASH = {
    "flash_attn": ("flash_attention_2", "install telescope-train[flash-attn]"),
    "flash_attn_3": ("flash_attention_3", "install flash-attn-3"),
    "flash_attn_4": ("flash_attention_4", "install telescope-train[flash-attn-4]"),
}


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize(
    ("device", "dtype", "against"),
    [
        ("cuda", torch.bfloat16, None),
        ("cuda", torch.float32, "needs layers in bfloat16 or float16"),
        ("cpu", torch.bfloat16, "needs a CUDA device"),
    ],
)
def test_flash_attn_is_asked_for_where_it_would_be_used(
    monkeypatch, name, major, device, dtype, against
):
    """Nobody is told to install what could not be used."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    (kind,) = (kind for kind in ATTENTION_KINDS if kind.name == name)
    implementation, advice = FLASH[name]
    assert kind.arguments.args == (implementation,)
    assert implementation in AttentionInterface(), "transformers knows it by this name"
    if against is None and name == "flash_attn_4" and major not in (9, 10):
        against = "needs a Hopper or Blackwell card for data centers"
    needs = AttentionNeeds(device=torch.device(device), dtype=dtype)
    assert kind.reason_against(needs) == (against or advice)
    how = kind.reason_against
    assert how.func(advice, lambda: True, needs, **how.keywords) == against


def test_newer_kernels_are_tried_first():
    names = [kind.name for kind in ATTENTION_KINDS]
    assert names[:4] == ["flash_attn_3", "flash_attn_4", "flash_attn", "varlen"]


def test_a_package_that_transformers_does_not_find_is_not_looked_for_on_the_hub(monkeypatch):
    """flash-attn-4 alone makes `flash_attn` a module that can be found."""
    spec = attention_kinds.importlib.util.find_spec("torch")
    monkeypatch.setattr(attention_kinds.importlib.util, "find_spec", lambda name: spec)
    needs = AttentionNeeds(device=torch.device("cuda"), dtype=torch.bfloat16)
    (kind,) = (kind for kind in ATTENTION_KINDS if kind.name == "flash_attn")
    assert kind.reason_against(needs) == "install telescope-train[flash-attn]"


def test_ranks_that_share_a_row_take_a_kind_that_can(llama):
    """On a GPU, flex comes before it and cannot."""
    faster = planted("faster", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("test_faster", AttentionMaskInterface()["sdpa"])
    kinds = (faster, *ATTENTION_KINDS)
    assert choose_attention(llama, CPU, torch.float32, kinds=kinds).kind is faster
    shared = choose_attention(llama, CPU, torch.float32, is_row_shared=True, kinds=kinds)
    assert shared.kind.name == "packed_blocks"
    assert shared.refused["faster"] == "cannot share a row between ranks"
    with pytest.raises(ConfigError, match="set fsdp_context_parallel_size = 1"):
        choose_attention(llama, CPU, torch.float32, is_row_shared=True, kinds=(faster, SDPA))


def test_sliding_windows_go_to_an_attention_that_knows_them():
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    qwen = Qwen2ForCausalLM(
        Qwen2Config(**SIZES, sliding_window=5, use_sliding_window=True, max_window_layers=1)
    )
    for model in (mistral, qwen):
        choice = choose_attention(model, CPU, torch.float32)
        assert choice.kind is SDPA, choice.reasons
        assert choice.difference < 1e-5


WINDOW = {"sliding_window": 64}
"""Longer than the samples of the test, so that only a smaller window in its copy shows it."""
GEMMA = {**SIZES, **WINDOW, "head_dim": 12}
WINDOWED = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, **WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA, attn_logit_softcapping=None)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
}


def masked_kind(model):
    """Return the kind with a mask; newer transformers take Gemma 2 for one that always has caps."""
    return SDPA if model._supports_sdpa else EAGER


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_longer_than_the_samples_of_the_test_count(family, dtype):
    model = WINDOWED[family]()
    choice = choose_attention(model, CPU, dtype)
    assert choice.kind is masked_kind(model)
    assert "sliding windows" in choice.refused["packed_blocks"]


MODELS = {
    **WINDOWED,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **WINDOW)),
    "mistral without": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2 without": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=3)
    ),
    "caps": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA, layer_types=["full_attention"] * 3)),
}


@pytest.mark.parametrize("family", MODELS)
def test_the_config_tells_a_plan_what_ranks_that_share_rows_refuse_on_a_cpu(family):
    model = MODELS[family]()
    if facts_of(model.config.to_dict()).attention_limits:
        with pytest.raises(ConfigError, match="set fsdp_context_parallel_size = 1"):
            choose_attention(model, CPU, torch.float32, is_row_shared=True)
    else:
        choice = choose_attention(model, CPU, torch.float32, is_row_shared=True)
        assert choice.kind.name == "packed_blocks"


def without_window(module, query, key, value, attention_mask, *, packed_layout, **options):
    """In blocks, as if there were no window."""
    options.pop("sliding_window", None)
    attend = AttentionInterface()[PACKED_ATTENTION]
    return attend(module, query, key, value, attention_mask, packed_layout=packed_layout, **options)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kind_that_ignores_windows_is_refused(family, dtype):
    ignoring = replace(
        planted("without_window", without_window),
        arguments=lambda sequences: {"packed_layout": sequences.layout},
    )
    model = WINDOWED[family]()
    choice = choose_attention(model, CPU, dtype, kinds=(ignoring, SDPA, EAGER))
    assert choice.kind is masked_kind(model)
    assert "ignores sliding_window" in choice.refused["without_window"]


def capped(**more):
    """A Gemma 2 whose layers have a soft cap of scores and no window."""
    config = Gemma2Config(**GEMMA, layer_types=["full_attention"] * 3, **more)
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_of_scores_go_to_an_attention_that_knows_them(dtype):
    """The usual cap of 50 is far above the scores of random weights, and counts all the same."""
    choice = choose_attention(capped(), CPU, dtype)
    assert choice.kind is EAGER
    assert "soft caps" in choice.refused["packed_blocks"]
    said = "or attn_logit_softcapping" if capped()._supports_sdpa else "does not support"
    assert said in choice.refused["sdpa"]
    plain = choose_attention(capped(attn_logit_softcapping=None), CPU, dtype)
    assert plain.kind.name == "packed_blocks"


def test_what_cannot_cap_scores_is_refused_by_name():
    sharing = choose_sharing(capped(), CPU, torch.float32, is_on=True, has_dropout=False)
    assert sharing.attention is None
    assert "cascade: failed: does not support soft caps" in sharing.reason
    with pytest.raises(ConfigError, match=r"soft caps.* set fsdp_context_parallel_size = 1"):
        choose_attention(capped(), CPU, torch.float32, is_row_shared=True)


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [
        (PACKED_ATTENTION, {"packed_layout": None}),
        (CASCADE_ATTENTION, {"cascade_layout": None}),
        (VARLEN_ATTENTION, {"cu_seq_lens_q": None}),
        (GATHERED_ATTENTION, {"over": VARLEN_ATTENTION, "keys_K": None, "cu_seq_lens_q": None}),
    ],
)
def test_no_kernel_ignores_a_soft_cap(implementation, layout):
    for kind in (*ATTENTION_KINDS, *SHARING_KINDS):
        kind.prepare()
    states = [torch.zeros(1, 1, 1, 2)] * 3
    with pytest.raises(ValueError, match="soft caps"):
        AttentionInterface()[implementation](LAYER, *states, None, softcap=50.0, **layout)


def test_sinks_of_attention_are_compared_with_the_formulas_of_the_model():
    """Its layers refuse transformers' SDPA, and Telescope's kernels would ignore the sinks."""
    config = GraniteSWAConfig(**SIZES, layer_types=["full_attention"] * 3)
    choice = choose_attention(GraniteSWAForCausalLM(config), CPU, torch.float32)
    assert choice.kind is EAGER
    assert "attention sinks" in choice.refused["packed_blocks"]


def test_an_architecture_that_cannot_be_copied_small_is_a_clear_error():
    class NoCopy(LlamaForCausalLM):
        def __init__(self, config):
            raise RuntimeError("the sizes do not fit")

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.__class__ = NoCopy
    with pytest.raises(ConfigError, match=r"NoCopy cannot be tried .*the sizes do not fit"):
        choose_attention(model, CPU, torch.float32)


def test_windows_that_are_turned_off_do_not_count():
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES, **WINDOW, use_sliding_window=False))
    assert choose_attention(qwen, CPU, torch.float32).kind.name == "packed_blocks"


def test_prefixes_are_shared_by_the_first_attention_that_passes(llama):
    sharing = choose_sharing(llama, CPU, torch.float32, is_on=True, has_dropout=False)
    assert sharing.reason == ""
    assert sharing.attention.kind.name == "cascade"
    assert sharing.attention.difference < 1e-5
    assert set(sharing.attention.refused) == {
        f"{kind} over prefixes" for kind in ("flash_attn_3", "flash_attn_4", "flash_attn", "varlen")
    }


def test_what_cannot_share_prefixes_says_why(llama):
    def reason(lm=llama, *, is_on=True, has_dropout=False):
        return choose_sharing(lm, CPU, torch.float32, is_on=is_on, has_dropout=has_dropout).reason

    assert "off" in reason(is_on=False)
    assert "dropout" in reason(has_dropout=True)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = MixtralForCausalLM(MixtralConfig(**SIZES, **experts))
    assert "experts (num_experts = 4)" in reason(mixture)


def test_an_attention_that_forgets_prefixes_is_refused(llama, monkeypatch):
    own_alone = replace(
        SHARING_KINDS[-1],
        name="own",
        arguments=lambda found: SHARING_KINDS[-1].arguments(replace(found, shared=None)),
    )
    monkeypatch.setattr(choice_of_attention, "SHARING_KINDS", (own_alone,))
    sharing = choose_sharing(llama, CPU, torch.float32, is_on=True, has_dropout=False)
    assert sharing.attention is None
    assert "own: leaks between packed samples" in sharing.reason


def test_gathered_keys_are_those_of_whole_samples_causal_from_the_end():
    """The contract of varlen kernels, kept by a slow stand-in: queries are the last of the keys."""
    shared = SharedRow(lengths_S=np.array([7, 9, 9, 5]), shared_S=np.array([0, 4, 9, 2]))
    sequences = find_shared_sequences(shared, CPU)
    kind = next(one for one in SHARING_KINDS if one.name == "varlen over prefixes")
    arguments = kind.arguments(sequences) | {"over": "test_varlen"}
    AttentionInterface.register("test_varlen", slow_varlen)
    kind.prepare()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 30, 8, generator=generator) for _ in range(3)]
    places = torch.from_numpy(shared.places())
    own = np.concatenate(
        [np.arange(n) >= s for n, s in zip([7, 9, 9, 5], [0, 4, 9, 2], strict=True)]
    )
    row = [torch.zeros(1, 2, int(places.max()) + 1, 8) for _ in whole]
    for here, there in zip(row, whole, strict=True):
        here[:, :, places] = there
        there[:, :, :] = here[:, :, places]  # what is shared is the same in all
    found, _ = AttentionInterface()[kind.implementation](LAYER, *row, None, **arguments)
    expected, start = [], 0
    for length in (7, 9, 9, 5):
        part = [states[:, :, start : start + length] for states in whole]
        expected.append(F.scaled_dot_product_attention(*part, is_causal=True))
        start += length
    expected = torch.cat(expected, dim=2).transpose(1, 2)[:, own]
    assert torch.allclose(found, expected, atol=1e-6)
    assert arguments["max_length_k"] == 9
    assert arguments["max_length_q"] == sequences.longest


def slow_varlen(module, query, key, value, attention_mask, **options):
    outputs = []
    queries, keys = options["cu_seq_lens_q"].tolist(), options["cu_seq_lens_k"].tolist()
    assert len(queries) == len(keys)
    for sample in range(len(queries) - 1):
        part = slice(queries[sample], queries[sample + 1])
        whole = slice(keys[sample], keys[sample + 1])
        num_queries, num_keys = part.stop - part.start, whole.stop - whole.start
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, part], key[:, :, whole], value[:, :, whole], attn_mask=seen
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None
