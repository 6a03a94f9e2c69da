"""Build the policies of a rank from settings: choose attention, adapt, shard, fill from files."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError
from telescope_train.backends.fsdp.sharding import (
    decoder_layers,
    local_part,
    shard,
    shard_place,
    weight_mesh,
)
from telescope_train.backends.protocol import BackendSettings
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.trainer_section import CheckpointingChoice
from telescope_train.models.adaptive_checkpointing import AdaptiveCheckpointing
from telescope_train.models.attention.choice import (
    AttentionChoice,
    PrefixSharing,
    choose_attention,
    choose_sharing,
    no_sharing,
)
from telescope_train.models.attention.context_parallel import ContextGroup, join_context
from telescope_train.models.attention.kinds import AttentionKind
from telescope_train.models.cpu_kernels import is_onednn_faster, replace_linears, replace_rms_norms
from telescope_train.models.facts import context_problem
from telescope_train.models.file_names import file_parts
from telescope_train.models.fused_layers import fuse_layers, gpu_kernels
from telescope_train.models.layers import (
    checkpoint_activations,
    compile_layers,
    stay_wide,
    use_grouped_experts,
)
from telescope_train.models.load import (
    LoadedModel,
    has_experts,
    init_buffers,
    prepare_model,
    settle_rotations,
    torch_dtype,
)
from telescope_train.models.lora import add_adapters, first_adapters, round_sums_once
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.weight_files import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherReference:
    """`reference_model`, before its weights are on the ranks."""

    loaded: LoadedModel
    attention: AttentionKind
    """Its attention over the rows of the trained model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPolicy:
    """A model that is ready to use, and the choices made while preparing it."""

    policy: PackedPolicy
    attention: AttentionChoice
    context: ContextGroup | None
    """The group of ranks that share rows with this one; None = there is none."""
    sharing: PrefixSharing
    """Whether samples of a row share prefixes."""
    checkpointing: AdaptiveCheckpointing | None
    """Chooses the number of layers of a row to recompute; None = the settings fix it."""
    mesh: DeviceMesh
    """The ranks over which weights are sharded and copied."""
    computing: Callable[[], AbstractContextManager[None]]
    """Context in which the model may compute."""
    is_whole: bool
    """Whether this rank holds the whole model, without FSDP."""
    other_reference: OtherReference | None
    """None = the reference, if there is one, is the initial model."""

    @property
    def attention_in_use(self) -> AttentionKind:
        """The attention over all rows."""
        return (self.sharing.attention or self.attention).kind


def load_policy(
    settings: BackendSettings,
    device: torch.device,
    layout: RankLayout,
    *,
    moved: Callable[[], None] = lambda: None,
) -> ShardedPolicy:
    """Return the trained model, ready and sharded; `moved` is called for each tensor read."""
    trainer, dtype = settings.trainer, torch_dtype(settings.compute_dtype)
    for name in ("optimizer_cpu_offload", "fsdp_cpu_offload"):
        if getattr(trainer, name) and device.type == "cpu":
            raise ConfigError(
                f"{name} has no effect without a GPU: everything is in CPU memory already; "
                "remove it"
            )
    loaded = _prepared(settings, settings.model.model)
    # First, because a size that does not fit would only show as a wrong shape in attention.
    check_context(loaded.model, layout.context)
    attention = choose_attention(loaded.model, device, dtype, is_row_shared=layout.context > 1)
    sharing = choose_sharing(
        loaded.model,
        device,
        dtype,
        is_on=trainer.share_prefixes == "auto",
        has_dropout=trainer.use_lora and trainer.lora_dropout > 0,
    )
    other = None
    if (name := settings.reference_model) is not None:
        try:
            sharing, other = _beside(settings, name, sharing, device, layout.context)
        except ConfigError as error:
            raise ConfigError(f"reference_model: {error}") from error
    context = join_context(layout)
    if trainer.use_lora:
        # What peft draws is replaced after sharding, so it must not move the run's generators.
        with torch.random.fork_rng(devices=[]):
            add_adapters(loaded.model, trainer, model_name=settings.model.model)
        if dtype == torch.bfloat16:
            round_sums_once(loaded.model)
    # From the inside out: checkpointing wraps the faster forward, so that this is what runs again
    # in backward, and FSDP's hooks come last, around both. A compiler fuses norms by itself.
    if trainer.compile:
        compile_layers(decoder_layers(loaded.model))
    else:
        _speed_up(loaded.model, device, dtype)
    checkpointing = _checkpoint(loaded.model, trainer.gradient_checkpointing)
    # eval(): the engine samples without dropout. Only adapters may have some, through `dropout_on`.
    policy = PackedPolicy(
        loaded.model,
        chunk_size=trainer.entropy_chunk_size,
        vocab_size=loaded.vocab_size,
        entropy_grad=settings.algorithm is not None and settings.algorithm.entropy_coef > 0,
        wide_logits=settings.model.fp32_lm_head,
    ).eval()
    # With one rank FSDP would gather, cast and scatter what is there already, for every batch.
    is_whole = layout.weight_shards * layout.num_copies == 1 and not trainer.fsdp_cpu_offload
    sharded = ShardedPolicy(
        policy=policy,
        attention=attention,
        context=context,
        sharing=sharing,
        checkpointing=checkpointing,
        mesh=weight_mesh(layout, device),
        computing=partial(compute_copies, policy, dtype) if is_whole else nullcontext,
        is_whole=is_whole,
        other_reference=other,
    )
    policy.use_attention(sharded.attention_in_use, context)
    if not is_whole:
        shard(policy, sharded.mesh, dtype, offload=trainer.fsdp_cpu_offload)
    _fill(policy, loaded, settings, device, moved)
    if trainer.use_lora:
        fill_adapters(policy.lm, seed=settings.seed)
    return sharded


def _checkpoint(
    lm: PreTrainedModel, kind: bool | CheckpointingChoice
) -> AdaptiveCheckpointing | None:
    """Make the decoder layers recompute what `gradient_checkpointing` says."""
    if kind == "auto":
        return AdaptiveCheckpointing(decoder_layers(lm))
    if kind:
        checkpoint_activations(decoder_layers(lm), "full" if kind is True else kind)
    return None


def load_reference(
    settings: BackendSettings,
    device: torch.device,
    like: ShardedPolicy,
    *,
    moved: Callable[[], None] = lambda: None,
) -> PackedPolicy:
    """Return the frozen reference in the layers' dtype, prepared like `like`, the trained model.

    It is the initial model, or `reference_model`.
    """
    dtype, is_compiled = torch_dtype(settings.compute_dtype), settings.trainer.compile
    other = like.other_reference
    loaded = other.loaded if other else _prepared(settings, settings.model.model)
    # It is never updated, so master weights would only cost memory.
    # The parameters alone: frequencies of the rotations, which are buffers, stay in float32.
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(dtype)
    if is_compiled:
        compile_layers(decoder_layers(loaded.model))
        # Its graph is that of training, below, and no pass backward needs what that would keep.
        checkpoint_activations(decoder_layers(loaded.model), "full")
    else:
        _speed_up(loaded.model, device, dtype)
    policy = PackedPolicy(
        loaded.model,
        chunk_size=settings.trainer.entropy_chunk_size,
        vocab_size=loaded.vocab_size,
        wide_logits=settings.model.fp32_lm_head,
    ).eval()
    # A compiler fuses, and rounds, otherwise where weights have no gradient: that difference alone
    # can be 0.05 nats in bfloat16.
    policy.requires_grad_(is_compiled)
    policy.use_attention(other.attention if other else like.attention_in_use, like.context)
    if not like.is_whole:
        shard(policy, like.mesh, dtype, offload=settings.trainer.fsdp_cpu_offload)
    _fill(policy, loaded, settings, device, moved)
    return policy


def _beside(
    settings: BackendSettings,
    name: str,
    sharing: PrefixSharing,
    device: torch.device,
    num_context: int,
) -> tuple[PrefixSharing, OtherReference]:
    """Return how samples share prefixes if the model `name` can, too, and that model.

    `sharing`: how the trained model can. `num_context`: ranks that share a row.
    """
    dtype, loaded = torch_dtype(settings.compute_dtype), _prepared(settings, name)
    check_context(loaded.model, num_context)
    if sharing.attention is not None:
        found = choose_sharing(loaded.model, device, dtype, is_on=True, has_dropout=False)
        if found.attention is not None:
            return sharing, OtherReference(loaded=loaded, attention=found.attention.kind)
        sharing = no_sharing(f"reference_model cannot: {found.reason}")
    chosen = choose_attention(loaded.model, device, dtype, is_row_shared=num_context > 1)
    return sharing, OtherReference(loaded=loaded, attention=chosen.kind)


def _prepared(settings: BackendSettings, name: str) -> LoadedModel:
    loaded = prepare_model(
        name,
        dtype=settings.model.model_dtype,
        trust_remote_code=settings.model.trust_remote_code,
    )
    if has_experts(loaded.model):
        use_grouped_experts(loaded.model, torch_dtype(settings.compute_dtype))
    return loaded


def _fill(
    policy: PackedPolicy,
    loaded: LoadedModel,
    settings: BackendSettings,
    device: torch.device,
    moved: Callable[[], None],
) -> None:
    """Read this rank's shards, or move them to its device if the model was loaded whole."""
    if loaded.files is not None:
        loaded.files.on_read = moved
        where = torch.device("cpu") if settings.trainer.fsdp_cpu_offload else device
        fill(policy, policy.lm, loaded.files, where)
    elif not any(isinstance(one, DTensor) for one in policy.parameters()):
        # FSDP moves what it shards; what a single rank loaded whole is still on the CPU.
        policy.to(device)
    settle_rotations(policy.lm, settings.longest_sequence)


def _speed_up(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the most expensive forwards with faster ones, unless they are compiled.

    Nobody trains in float64 for speed: there all is computed in it.
    """
    if dtype == torch.float64:
        stay_wide(model, decoder_layers(model))
    elif device.type == "cuda":
        fuse_layers(model, gpu_kernels(), device, dtype)
    elif dtype == torch.float32:
        replace_rms_norms(model)
        if is_onednn_faster():
            replace_linears(model)


def check_context(lm: PreTrainedModel, size: int) -> None:
    """Raise ConfigError if the heads of `lm` cannot be split over `size` ranks."""
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    problem = context_problem(size, num_heads=heads, num_kv_heads=kv_heads)
    if problem is not None:
        raise ConfigError(problem)


class _CopyPlace(NamedTuple):
    """A name under which a module has a parameter; tied weights have several of them."""

    module: torch.nn.Module
    name: str
    master: Parameter


@contextmanager
def compute_copies(policy: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let `policy` compute in `dtype` inside the block, where one rank holds all of it.

    Master weights are the parameters of the modules. While the policy computes, copies in `dtype`
    replace those of another one, and each gradient of a copy is added to that of its master, so
    that batches add up in the master's dtype. FSDP does the same for several ranks.
    """
    places = [
        _CopyPlace(module, name, parameter)
        for module in policy.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype != dtype
    ]
    copies = {place.master: _copy_of(place.master, dtype) for place in places}
    # Each time, since torch does not count what a fused optimizer writes: stale copies would
    # train on without an error, and rounding all is one read and half a write of the weights.
    if copies:
        with torch.no_grad():
            torch._foreach_copy_(list(copies.values()), list(copies))
    for place in places:
        setattr(place.module, place.name, copies[place.master])
    try:
        yield
    finally:
        for place in places:
            setattr(place.module, place.name, place.master)


def _copy_of(master: Parameter, dtype: torch.dtype) -> Parameter:
    copy = Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
    if master.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_add_to, master))
    return copy


def _add_to(master: Parameter, copy: Tensor) -> None:
    gradient, copy.grad = copy.grad, None
    assert gradient is not None, "the hook runs after the gradient was added up"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


def local_rows(value: Tensor) -> tuple[int, int]:
    """Return the first and the last row, exclusive, of a parameter that are on this rank."""
    num_rows, place = value.shape[0], shard_place(value)
    # FSDP cuts along the first dimension into equal parts; the last ones may be short or empty.
    width = math.ceil(num_rows / place.num_shards)
    start = min(num_rows, place.number * width)
    stop = min(num_rows, start + width)
    assert len(local_part(value)) == stop - start, "FSDP cuts into parts of ceil(rows / ranks)"
    return start, stop


@torch.no_grad()
def fill(
    policy: torch.nn.Module,
    lm: PreTrainedModel,
    files: WeightFiles,
    device: torch.device,
) -> None:
    """Allocate the shards of `policy` on `device` and read those of `lm`, which is inside it.

    Beyond its shards, a rank holds the rows of one tensor at a time. Nothing is sent between ranks.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    policy.to_empty(device=device)
    # Torch gives tied parameters memory of their own each, where FSDP does not hold them.
    for first, *others in names.values():
        for module_name, _, own_name in (other.rpartition(".") for other in others):
            setattr(policy.get_submodule(module_name), own_name, policy.get_parameter(first))
    init_buffers(lm)
    model_type = lm.config.model_type
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            _read(name.replace(".base_layer.", "."), parameter, files, model_type)


@torch.no_grad()
def fill_adapters(lm: PreTrainedModel, *, seed: int) -> None:
    """Initialize the adapters from `seed`, equally on all ranks."""
    for parameter, first in first_adapters(lm, seed=seed):
        start, stop = local_rows(parameter)
        local_part(parameter).copy_(first[start:stop])


def _read(name: str, parameter: Tensor, files: WeightFiles, model_type: str) -> None:
    local, (start, stop) = local_part(parameter), local_rows(parameter)
    shape = tuple(parameter.shape)
    for part in file_parts(name, shape, model_type):
        if not part.index:
            local.copy_(files.rows(part.name, start, stop, shape))
            continue
        expert, *inner = part.index
        assert isinstance(expert, int), "a file has the matrices of one expert each"
        if start <= expert < stop:
            place = local[expert - start][tuple(inner)]
            place.copy_(files.rows(part.name, 0, len(place), tuple(place.shape)))
