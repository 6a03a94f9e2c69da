"""Builds and loads the model of a rank, and writes a model folder from it.

`build` runs inside `library.using`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from telescope_core.base.errors import ConfigError
from telescope_train.backends.distributed_checkpoint import folder_of_all_ranks
from telescope_train.backends.megatron.architecture import (
    Architecture,
    architecture_of,
    empty_model,
    rotary_frequencies,
)
from telescope_train.backends.megatron.layout import (
    megatron_layout,
    model_problems,
    why_not_shared,
)
from telescope_train.backends.megatron.mapping import hugging_face_shapes
from telescope_train.backends.megatron.model import (
    FP8_MULTIPLE,
    Building,
    build_model,
    transformer_config,
)
from telescope_train.backends.megatron.pretrained import write_weights
from telescope_train.backends.megatron.weights import RankWeights
from telescope_train.backends.protocol import BackendSettings
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.attention.choice import (
    AttentionChoice,
    PrefixSharing,
    choose_attention,
    choose_sharing,
    no_sharing,
)
from telescope_train.models.group_wait import group_wait
from telescope_train.models.load import torch_dtype
from telescope_train.models.saving import save_generation_config
from telescope_train.models.source import read_source, require_tensors
from telescope_train.models.weight_files import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank's part of a model, and the choices made while building it."""

    weights: RankWeights
    reference: RankWeights | None
    """The frozen initial model, or `reference_model`; None if the algorithm needs none."""
    reference_empty: PreTrainedModel
    """The Hugging Face model of the reference without memory for its weights."""
    config: Any
    """The library's TransformerConfig."""
    architecture: Architecture
    layout: RankLayout
    context_rank: int
    attention: AttentionChoice
    sharing: PrefixSharing
    """Whether samples of a row share prefixes."""
    empty: PreTrainedModel
    """The Hugging Face model without memory for its weights."""
    dtype: torch.dtype


def build(
    settings: BackendSettings, device: torch.device, *, moved: Callable[[], None] = lambda: None
) -> Loaded:
    """Join the groups of ranks, build this rank's part of the model and load it.

    `moved` hears of each tensor that was read.
    """
    layout = megatron_layout(settings.megatron, dist.get_world_size())
    section = settings.algorithm
    trained = other = _look(settings, settings.model.model, device)
    if (name := settings.reference_model) is not None:
        try:
            other = _look(settings, name, device)
        except ConfigError as error:
            raise ConfigError(f"reference_model: {error}") from error
    sharing = trained.sharing
    if sharing.attention is not None and other.sharing.attention is None:
        sharing = no_sharing(f"reference_model cannot: {other.sharing.reason}")
    _join(layout, settings.seed)

    def built(found: _Found) -> tuple[RankWeights, Any]:
        shared = found.sharing.attention if sharing.attention else None
        building = Building(
            settings=settings,
            architecture=found.architecture,
            layout=layout,
            frequencies=rotary_frequencies(found.empty),
            attention=(shared or found.attention).kind,
            device=device,
        )
        config = transformer_config(building)
        found.files.on_read = moved
        weights = RankWeights(build_model(building, config), found.architecture)
        weights.load(found.files)
        return weights, config

    weights, config = built(trained)
    reference = None
    if section is not None and section.needs_reference:
        reference, _ = built(other)
        reference.model.requires_grad_(False)
    from megatron.core import parallel_state

    return Loaded(
        weights=weights,
        reference=reference,
        reference_empty=other.empty,
        config=config,
        architecture=trained.architecture,
        layout=layout,
        context_rank=parallel_state.get_context_parallel_rank(),
        attention=trained.attention,
        sharing=sharing,
        empty=trained.empty,
        dtype=torch_dtype(settings.compute_dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A Hugging Face model, before the ranks have any of it."""

    architecture: Architecture
    files: WeightFiles
    attention: AttentionChoice
    sharing: PrefixSharing
    empty: PreTrainedModel


def _look(settings: BackendSettings, name: str, device: torch.device) -> _Found:
    """Read what a model is; ConfigError if these settings cannot divide it over ranks."""
    trust, dtype = settings.model.trust_remote_code, torch_dtype(settings.compute_dtype)
    source = read_source(name, dtype=settings.compute_dtype, trust_remote_code=trust)
    architecture = architecture_of(source.config)
    files = require_tensors(source, hugging_face_shapes(architecture))
    problems = list(model_problems(settings.megatron, architecture))
    if problems:
        raise ConfigError("\n".join(problems))
    attention = choose_attention(
        empty_model(_few_experts(source.config), trust_remote_code=trust, dtype=dtype),
        device,
        dtype,
        # These kinds take the sequences of a row, and no mask that transformers makes of it.
        is_row_shared=True,
    )
    empty = empty_model(source.config, trust_remote_code=trust, dtype=dtype)
    return _Found(
        architecture=architecture,
        files=files,
        attention=attention,
        sharing=_choose_sharing(settings, empty, device, dtype),
        empty=empty,
    )


def _choose_sharing(
    settings: BackendSettings, empty: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> PrefixSharing:
    if (reason := why_not_shared(settings.megatron)) is not None:
        return no_sharing(reason)
    is_on = settings.trainer.share_prefixes == "auto"
    # No layer of this backend drops anything.
    return choose_sharing(empty, device, dtype, is_on=is_on, has_dropout=False)


def _few_experts(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with the fewest experts, on which attention does not depend."""
    small = copy.deepcopy(config)
    for name in ("num_experts", "num_local_experts"):
        if getattr(small, name, None):
            setattr(small, name, getattr(small, "num_experts_per_tok", 1))
    return small


def _join(layout: RankLayout, seed: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # of an earlier rank in this process
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        # The distributed optimizer gathers its state over them for checkpoints.
        create_gloo_process_groups=True,
        distributed_timeout_minutes=math.ceil(group_wait() / timedelta(minutes=1)),
    )
    # The tracker that does nothing: without dropout no layer draws a random number.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)


def row_multiple(settings: BackendSettings, layout: RankLayout) -> int:
    """Return the number that must divide the number of tokens of a row."""
    section = settings.megatron
    multiple = settings.trainer.pad_to_multiple_of
    if layout.context > 1:
        multiple = math.lcm(multiple, 2 * layout.context)
    per_rank = layout.tensor if section.megatron_sequence_parallel else 1
    if section.megatron_fp8:
        per_rank *= FP8_MULTIPLE
    return math.lcm(multiple, layout.context * per_rank)


def save_model(
    folder: Path, settings: BackendSettings, loaded: Loaded, weights: Iterator[tuple[str, Tensor]]
) -> None:
    """Write a Hugging Face folder on rank 0, complete or not at all; every rank calls it."""
    with folder_of_all_ranks(folder) as partial:
        if dist.get_rank() != 0:
            for _ in weights:
                pass  # each tensor is gathered by all ranks
            return
        write_weights(
            partial,
            weights,
            shapes=hugging_face_shapes(loaded.architecture),
            dtype=loaded.dtype,
        )
        config = copy.deepcopy(loaded.empty.config)
        config.dtype = loaded.dtype
        config.architectures = [type(loaded.empty).__name__]
        config.save_pretrained(partial)
        save_generation_config(settings.model.model, partial)
        load_tokenizer(settings.model).save_pretrained(partial)
