"""Megatron's model as Telescope trains it: settings, layers, log-probs at its end, and passes.

Everything here runs inside `library.using`. Dims: C tokens of a rank, H hidden size, M trained
tokens of the row.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from telescope_train.backends.megatron.architecture import Architecture
from telescope_train.backends.megatron.layers import GroupedExperts, Norm, PackedAttention
from telescope_train.backends.megatron.rows import RankRow
from telescope_train.backends.protocol import BackendSettings
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.attention.context_parallel import GatherTokens
from telescope_train.models.attention.kinds import AttentionKind
from telescope_train.models.load import torch_dtype
from telescope_train.models.logprobs import Head, chunked_logprobs
from telescope_train.models.moving import take_shared
from telescope_train.models.packed import TrainedLogprobs

FP8_MULTIPLE = 16
"""8-bit products need a multiple of this many tokens on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """The parts from which a model is built."""

    settings: BackendSettings
    architecture: Architecture
    layout: RankLayout
    frequencies: Tensor
    """[head_dim / 2] of the rotary embedding."""
    attention: AttentionKind
    device: torch.device


def transformer_config(building: Building) -> Any:
    """Return the library's TransformerConfig."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    arch, layout, section = building.architecture, building.layout, building.settings.megatron
    dtype = torch_dtype(building.settings.compute_dtype)
    values: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "qk_layernorm": arch.has_qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": arch.has_qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": building.device.type == "cpu",
        # Weights of tokens hold the only denominator: the library must sum and never divide.
        "calculate_per_token_loss": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        # Rows have lengths of their own, also where they travel from stage to stage.
        "variable_seq_lengths": layout.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": is_sequence_parallel(building),
    }
    if section.megatron_gradient_checkpointing:
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if section.megatron_fp8:
        # This recipe scales by what is there and remembers nothing: a pass is repeatable.
        values |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if arch.num_experts is not None:
        values |= _expert_values(building, dtype)
    with warnings.catch_warnings():
        # It warns of the library's own defaults.
        warnings.simplefilter("ignore")
        return TransformerConfig(**values)


def is_sequence_parallel(building: Building) -> bool:
    """Return whether tokens are divided over ranks between the matrices."""
    section = building.settings.megatron
    return section.megatron_sequence_parallel and building.layout.tensor > 1


def _expert_values(building: Building, dtype: torch.dtype) -> dict[str, Any]:
    arch = building.architecture
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.num_experts_per_token,
        "moe_ffn_hidden_size": arch.expert_ffn_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts alone is what renormalizing theirs amounts to.
        "moe_router_pre_softmax": not arch.renormalizes,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_grouped_gemm": building.settings.megatron.megatron_use_transformer_engine,
    }


def build_model(building: Building, config: Any) -> Any:
    """Return this rank's part of the model, with weights not yet set.

    It is called with a `RankRow` and returns the log-probs of its trained tokens, or on all stages
    but the last one the hidden states.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    arch = building.architecture
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(building, config),
        vocab_size=arch.padded_vocab_size,
        max_sequence_length=building.settings.trainer.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=arch.is_tied,
        position_embedding_type="rope",
        parallel_output=True,
    )
    # Those of the model itself, whatever scaling they have. In float64 a test is exact to 1e-15.
    wide = torch.promote_types(config.params_dtype, torch.float32)
    model.rotary_pos_emb.inv_freq = building.frequencies.to(building.device, wide)
    SharedRotations(model)
    model._postprocess = partial(_score, model, building, is_sequence_parallel(building))
    if model.pre_process and arch.padding_id is not None:
        hook = partial(_without_padding, arch.padding_id, is_sequence_parallel(building))
        model.embedding.register_forward_hook(hook, with_kwargs=True)
    return model.to(building.device)


def _without_padding(
    padding_id: int, is_divided: bool, _: Any, args: Any, kwargs: Any, output: Tensor
) -> Tensor:
    """Return the embeddings [C, 1, H], without gradient for those of padding."""
    from megatron.core import parallel_state

    ids_C = (kwargs["input_ids"] if "input_ids" in kwargs else args[0])[0]
    if is_divided:
        group = parallel_state.get_tensor_model_parallel_group()
        ids_C = ids_C.chunk(group.size())[group.rank()]
    return torch.where((ids_C == padding_id)[:, None, None], output.detach(), output)


def _block_spec(building: Building, config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    arch = building.architecture
    number = get_num_layers_to_build(config)
    if building.settings.megatron.megatron_use_transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=arch.num_experts,
            moe_grouped_gemm=arch.num_experts is not None,
            qk_layernorm=arch.has_qk_norm,
        )
        return TransformerBlockSubmodules(layer_specs=[spec] * number, layer_norm=TENorm)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=arch.num_experts, qk_layernorm=arch.has_qk_norm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = partial(PackedAttention, kind=building.attention)
    if arch.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if arch.num_experts is not None:
        _experts_of(parts.mlp).experts = GroupedExperts
    return TransformerBlockSubmodules(layer_specs=[spec] * number, layer_norm=Norm)


def _experts_of(mlp: Any) -> Any:
    """Return the submodules of the library's expert layer; newer versions use a partial."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def run_model(model: Callable[..., Any], row: RankRow) -> Any:
    """Call `model`, wrapped or not, with a row."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sequences, shared = row.sequences, row.sequences.shared
    starts, longest = row.starts, sequences.longest
    if shared is not None:
        # One sequence, each token of which has a rotation of its own; see `SharedRotations`.
        starts, longest = starts[[0, -1]], int(shared.lengths_S.max())
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    # For Telescope's own attention, which knows the row better.
    params.sequences, params.order = sequences, row.order
    return model(
        input_ids=row.token_ids_C[None],
        position_ids=None,
        attention_mask=None,
        # The labels reach the end of the model unchanged.
        labels=row,
        packed_seq_params=params,
    )


class SharedRotations:
    """Rotates each token of a row by its position in its sample, where samples share tokens.

    The library rotates by the place in a sequence, and a shared token is in several samples.
    """

    def __init__(self, model: Any) -> None:
        """Apply to every pass of `model`, one of the library's."""
        self._positions_T: Tensor | None = None
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        model.rotary_pos_emb.register_forward_hook(self._choose)

    def _note(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        sequences = kwargs["packed_seq_params"].sequences
        self._positions_T = None if sequences.shared is None else sequences.positions_T

    def _choose(self, _: Any, __: Any, table: Tensor) -> Tensor:
        """Return [T, ...] of the table of all positions, which the library uses for such a row."""
        return table if self._positions_T is None else table.index_select(0, self._positions_T)


def _score(
    model: Any,
    building: Building,
    is_divided: bool,
    hidden_states: Tensor,
    *_: Any,
    labels: RankRow | None = None,
    **__: Any,
) -> Tensor | TrainedLogprobs:
    """Return the last stage's result for hidden states; other stages pass them on."""
    from megatron.core import parallel_state, tensor_parallel

    if not model.post_process:
        return hidden_states
    assert labels is not None, "a row comes with what is to be predicted"
    row, group = labels, parallel_state.get_tensor_model_parallel_group()
    if is_divided:
        hidden_CH = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True
        )
    else:
        # The head gives each rank a part of the gradient; this adds them up.
        hidden_CH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
    hidden_CH = hidden_CH.squeeze(1)
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    first = group.rank() * len(weight)
    vocab_size = building.architecture.vocab_size
    settings = building.settings
    take = torch.index_select if row.sequences.shared is None else take_shared
    logprobs_P, entropy_P = chunked_logprobs(
        take(hidden_CH, 0, row.predictors_P),
        Head(
            # Rows of padding have no probability.
            weight[: max(0, min(len(weight), vocab_size - first))],
            first,
            vocab_size,
            group if group.size() > 1 else None,
            rule=building.architecture.head_rule,
        ),
        row.targets_P,
        row.temperatures_P,
        chunk_size=settings.trainer.entropy_chunk_size,
        entropy_grad=settings.algorithm is not None and settings.algorithm.entropy_coef > 0,
        wide_logits=settings.model.fp32_lm_head,
    )
    number = len(row.trained_M)
    if row.order is None:
        return TrainedLogprobs(logprobs_P, entropy_P)
    context = parallel_state.get_context_parallel_group()
    return TrainedLogprobs(
        GatherTokens.apply(logprobs_P, row.places_P, number, context),
        GatherTokens.apply(entropy_P, row.places_P, number, context),
    )


Found = TypeVar("Found")


def run_rows(
    model: Any,
    rows: Sequence[RankRow],
    use: Callable[[int, TrainedLogprobs], torch.Tensor],
    *,
    backward: bool,
) -> None:
    """Run each row through all stages; `use` maps its number and log-probs to a loss.

    It is called on the last stage. With `backward` the gradient of its loss is added to the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(numbered: Any, wrapped: Any) -> tuple[Any, Any]:
        number, row = next(numbered)
        output = run_model(wrapped, row)

        def loss_of(found: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            loss = use(number, found)
            # The library counts tokens here to divide by them, which `calculate_per_token_loss`
            # leaves to us.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        return output, loss_of

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(enumerate(rows)),
        model=model,
        num_microbatches=len(rows),
        # Rows have lengths of their own; the stages tell each other.
        seq_length=1,
        micro_batch_size=1,
        forward_only=not backward,
    )


def share_results(found: Found) -> Found:
    """Copy the results of the last pipeline stage to every stage."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, found, group=group)
    return everything[-1]
