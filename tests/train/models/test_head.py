"""A model's own arithmetic between hidden states and logits, in every family that has some.

The trainer's path over packed rows is compared with transformers' own forward of each sample alone,
its formulas of attention and its logits, in float32: log-probs, entropies and gradients, with
logits of 30 and more.
"""

import ast
import inspect
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp.sharding import decoder_layers
from telescope_train.models.attention.blocks import find_sequences
from telescope_train.models.attention.choice import choose_attention
from telescope_train.models.facts import facts_of
from telescope_train.models.head import PLAIN, HeadRule, head_rule
from telescope_train.models.head_check import HEAD_LIMIT, head_difference
from telescope_train.models.logprobs import Head
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.row import PackedRow

CPU = torch.device("cpu")
NOT_MADE = (
    *(AssertionError, AttributeError, ImportError, KeyError, TypeError, ValueError),
    StrictDataclassError,
)
"""How transformers refuses to make a model of a config of defaults."""
VOCAB, LENGTHS, TEMPERATURES = 97, (13, 8), (0.7, 1.3)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW = {"head_dim": 12, "sliding_window": 5}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1}
FAMILIES = {
    "llama": {},
    "mistral": NARROW,
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "gemma": {"head_dim": 12},
    "gemma2": {**NARROW, "attn_logit_softcapping": 1.0},
    "gemma3_text": {**NARROW, "final_logit_softcapping": 30.0},
    "gemma3n_text": {
        **NARROW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {
        **NARROW,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 12,
    },
    "vaultgemma": NARROW,
    "nanochat": {},
    "phi": {},
    "phi3": {},
    "granite": {**GRANITE, "logits_scaling": 0.5},
    "granite_swa": {**GRANITE, "logits_scaling": 0.5},
    "granitemoehybrid": {
        **GRANITE,
        "logits_scaling": 0.5,
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 1,
    },
    "hyperclovax": {"logits_scaling": 2.0},
    "minicpm3": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "dim_model_base": 32,
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 5},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "glm4": {"head_dim": 12},
    "smollm3": {},
    "seed_oss": {"head_dim": 12},
    "exaone4": {"sliding_window": 5},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
}
"""Model type -> what its tiny model has beside the common sizes."""


def tiny_model(family: str, **more):
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config)
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        head = lm.get_output_embeddings()
        with torch.no_grad():
            # Logits of 30 and more, as the layers end with a norm.
            head.weight.mul_(12.0 / head_rule(config.to_dict()).scale)
            if head.bias is not None:
                head.bias.normal_(std=3.0)
    return lm.eval()


def packed_samples() -> PackedRow:
    generator = torch.Generator().manual_seed(1)
    ids_T = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=generator)
    positions_T = np.concatenate([np.arange(length) for length in LENGTHS])
    trained_M = torch.from_numpy(np.flatnonzero(positions_T > 0))
    temperatures_T = torch.tensor(TEMPERATURES).repeat_interleave(torch.tensor(LENGTHS))
    return PackedRow(
        token_ids_T=ids_T,
        sequences=find_sequences(positions_T, CPU),
        trained_M=trained_M.numpy(),
        predictors_M=trained_M - 1,
        host_predictors_M=(trained_M - 1).numpy(),
        targets_M=ids_T[trained_M],
        temperatures_M=temperatures_T[trained_M],
    )


def by_transformers(lm, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return log-probs, entropies, and the largest logit, of each sample by itself."""
    lm.set_attn_implementation("eager")
    logprobs, entropies, largest, start = [], [], 0.0, 0
    for length, temperature in zip(LENGTHS, TEMPERATURES, strict=True):
        ids = row.token_ids_T[start : start + length]
        logits_TV = lm(input_ids=ids[None], use_cache=False).logits[0, :-1]
        all_TV = (logits_TV / temperature).log_softmax(-1)
        logprobs.append(all_TV.gather(1, ids[1:, None])[:, 0])
        entropies.append(-(all_TV.exp() * all_TV).sum(-1))
        largest, start = max(largest, float(logits_TV.detach().abs().max())), start + length
    return torch.cat(logprobs), torch.cat(entropies), largest


def gradients(lm, logprobs_M, entropy_M) -> dict[str, torch.Tensor]:
    lm.zero_grad()
    weights_M = torch.linspace(-1.0, 2.0, len(logprobs_M))
    (weights_M @ logprobs_M + 0.3 * weights_M.flip(0) @ entropy_M).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in lm.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropies_and_gradients_are_those_of_transformers(family):
    lm, row = tiny_model(family), packed_samples()
    expected_M, expected_entropy_M, largest = by_transformers(lm, row)
    cap = head_rule(lm.config.to_dict()).cap
    assert largest > (30.0 if cap is None else 0.9 * cap)
    expected = gradients(lm, expected_M, expected_entropy_M)
    policy = PackedPolicy(lm, chunk_size=5, vocab_size=VOCAB, entropy_grad=True)
    policy.use_attention(choose_attention(lm, CPU, torch.float32).kind)
    found_M, entropy_M = policy(row)
    torch.testing.assert_close(found_M, expected_M, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_M, expected_entropy_M, rtol=1e-5, atol=1e-5)
    found = gradients(lm, found_M, entropy_M)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-3)
        assert difference < 1e-4, name
    assert policy.head_difference() < HEAD_LIMIT / 3


RULES = {
    "gemma2": HeadRule(cap=30.0),
    "granite": HeadRule(scale=2.0),
    "cohere": HeadRule(scale=0.5),
    "hyperclovax": HeadRule(scale=2.0),
    "minicpm3": HeadRule(scale=32 / 48),
    "llama": PLAIN,
}


@pytest.mark.parametrize("family", RULES)
def test_a_head_without_its_rule_is_seen_whatever_the_layers_compute_in(family):
    lm = tiny_model(family).to(torch.bfloat16)
    weight_VH = lm.get_output_embeddings().weight.detach()
    rule = head_rule(lm.config.to_dict())
    assert rule == RULES[family]
    assert head_difference(lm, Head(weight_VH, 0, VOCAB, None, rule=rule)) < HEAD_LIMIT / 3
    others = (PLAIN, HeadRule(scale=1.01 * rule.scale, cap=rule.cap), HeadRule(cap=50.0))
    for other in others if rule != PLAIN else others[1:]:
        assert head_difference(lm, Head(weight_VH, 0, VOCAB, None, rule=other)) > 50 * HEAD_LIMIT


def test_a_bias_that_is_left_out_is_seen():
    lm = tiny_model("phi").to(torch.bfloat16)
    head = lm.get_output_embeddings()
    weight_VH, bias_V = head.weight.detach(), head.bias.detach()
    assert head_difference(lm, Head(weight_VH, 0, VOCAB, None, bias_V)) < HEAD_LIMIT / 3
    assert head_difference(lm, Head(weight_VH, 0, VOCAB, None, torch.zeros(VOCAB))) > 0.0


def test_a_head_is_compared_without_memory_for_the_weights_of_the_model():
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma2"](**SIZES))
    weight_VH = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    assert head_difference(lm, Head(weight_VH, 0, 20, None, rule=HeadRule(cap=30.0))) < HEAD_LIMIT
    assert head_difference(lm, Head(weight_VH, 0, 20, None)) > 1.0
    assert next(lm.parameters()).is_meta


def test_layers_run_again_after_their_hidden_states_were_given():
    lm, row = tiny_model("gemma2"), packed_samples()
    policy = PackedPolicy(lm, chunk_size=5, vocab_size=VOCAB)
    before = policy(row).logprobs_M
    policy.head_difference()
    assert torch.equal(policy(row).logprobs_M, before)


@pytest.mark.parametrize("num_padding", [0, 3])
def test_a_head_without_padding_is_used_as_it_is(num_padding):
    """A slice of it, even of all its rows, would have a second gradient of the whole matrix."""
    lm = tiny_model("llama")
    policy = PackedPolicy(lm, chunk_size=5, vocab_size=VOCAB - num_padding)
    weight_VH = policy._head().weight_VH
    assert len(weight_VH) == VOCAB - num_padding
    assert weight_VH.is_leaf is (num_padding == 0)


class _CutsItsLogits(torch.nn.Module):
    """A head that has fewer logits than rows."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), None

    def forward(self, hidden):
        return (hidden @ self.weight.T)[..., :-3]


def test_a_head_that_has_other_logits_than_rows_is_refused():
    lm = tiny_model("llama")
    lm.lm_head = _CutsItsLogits(lm.lm_head.weight.detach())
    with pytest.raises(ConfigError, match=r"logits of shape \(16, 94\)"):
        head_difference(lm, Head(lm.lm_head.weight, 0, VOCAB, None))
    lm.lm_head.forward = lambda hidden, more: hidden
    with pytest.raises(ConfigError, match=r"does more than .*'more'"):
        head_difference(lm, Head(lm.lm_head.weight, 0, VOCAB, None))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llama", "logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"model_type": "cohere2_moe", "logit_scale": 0.0625}, "logit_scale"),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.04}, "lm_head_multiplier"),
        ({"model_type": "minicpm", "dim_model_base": 256}, "dim_model_base"),
        ({"model_type": "inkling_text", "logits_mup_width_multiplier": 24.0}, "width_multiplier"),
        ({"model_type": "new", "output_logit_soft_cap": 30.0}, "output_logit_soft_cap"),
        ({"model_type": "x", "text_config": {"model_type": "y", "logit_cap": 5}}, "logit_cap"),
        ({"model_type": "granite", "logits_scaling": 0.0}, "positive number or null, got 0.0"),
        ({"model_type": "gemma2", "final_logit_softcapping": "30"}, "got '30'"),
        ({"model_type": "gemma2", "final_logit_softcapping": float("nan")}, "got nan"),
        ({"model_type": "minicpm3", "dim_model_base": -1, "hidden_size": 64}, "dim_model_base"),
    ],
)
def test_the_plan_refuses_by_name_what_a_head_may_do_and_is_not_known(config, named):
    with pytest.raises(ConfigError) as caught:
        facts_of(config)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "logit_scale": 1.0, "final_logit_softcapping": None},
        {"model_type": "laguna", "moe_router_logit_softcapping": 30.0},
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        {"model_type": "gemma3n_text", "final_logit_softcapping": None},
        {"model_type": "clip", "logit_scale_init_value": 2.65, "num_logits_to_keep": 4},
    ],
)
def test_what_does_nothing_to_the_logits_of_tokens_is_no_matter(config):
    assert head_rule(config) == PLAIN
    facts_of(config)


def heads_with_arithmetic() -> Iterator[tuple[str, str]]:
    """Yield (model type, source) of what stands between layers and logits beside a plain head."""
    plain = {
        "logits = self.lm_head(hidden_states[:, slice_indices, :])",
        "logits = self.lm_head(hidden_states[:, slice_indices, :]).float()",
        "logits = self.lm_head(hidden_states[:, slice_indices, :]).contiguous()",
        "hidden_states = outputs.last_hidden_state",
        "hidden_states = outputs[0]",
    }
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config_class = CONFIG_MAPPING[model_type]
        model_class = AutoModelForCausalLM._model_mapping[config_class]
        assert model_class.__name__ == name
        tree = ast.parse(inspect.getsource(inspect.getmodule(model_class)))
        (found,) = (
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
        )
        forward = next(
            node
            for node in found.body
            if isinstance(node, ast.FunctionDef) and node.name == "forward"
        )
        for node in ast.walk(forward):
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target = ast.unparse(node.targets[0])
            source = ast.unparse(node)
            if target in ("logits", "hidden_states") and source not in plain:
                yield model_type, source


@pytest.mark.nightly
def test_every_head_of_the_installed_transformers_is_known_or_refused():
    """A new release of transformers with a new head fails here, and not in a run."""
    special: dict[str, list[str]] = {}
    for model_type, source in heads_with_arithmetic():
        special.setdefault(model_type, []).append(source)
    compared, unlike, without_defaults = set(), {}, set()
    for model_type, sources in special.items():
        try:
            config = CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                lm = AutoModelForCausalLM.from_config(config)
        except NOT_MADE:
            without_defaults.add(model_type)
            continue
        try:
            rule = head_rule(config.to_dict())
            decoder_layers(lm)
            weight_VH = torch.randn(8, lm.get_output_embeddings().weight.shape[1])
            difference = head_difference(lm, Head(weight_VH, 0, 8, None, rule=rule))
        except ConfigError:
            continue  # refused with a reason
        compared.add(model_type)
        if not difference < HEAD_LIMIT:
            unlike[model_type] = sources
    assert not unlike, json.dumps(unlike, indent=1)
    assert compared >= {"gemma2", "granite", "cohere", "cohere2", "minicpm3", "hyperclovax"}
    # Parts of larger models, encoders, and what lacks a package.
    assert len(without_defaults) < 10, without_defaults
