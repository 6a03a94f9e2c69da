"""Estimate the memory of each kind of process, from `config.json`. Imports no torch.

Memory that is kept between steps is exact. Activations are an estimate for dense decoders, because
other allocations of FSDP and attention kernels are not known before a run.
"""

import math
from dataclasses import dataclass

from telescope_train.backends.megatron.layout import megatron_layout
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import MUON_BATCH_VALUES, MegatronSection
from telescope_train.models.device import Device, compute_dtype
from telescope_train.models.facts import ModelFacts
from telescope_train.models.recomputed_layers import LayerBytes
from telescope_train.step.stream_rules import streams_gradients

BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}

ACTIVATIONS = "activations"
GATHERED = "gathered weights"
ROUNDED = "weights as layers compute"
LOGITS = "logits"
PRODUCTS = "Muon's products"
_MOMENT_BYTES = {"adamw_bf16": 4, "adamw_8bit": 2}
"""Bytes of both moments of one parameter; in others they have the dtype of the weights."""
_WIDTHS_KEPT = {"full": 1.0, "auto": 1.0, "selective": 6.0}
"""Memory of a layer for the backward pass of a token, in widths of the hidden state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one process of a kind, as far as `config.json` gives the sizes."""

    process: str
    parts: tuple[tuple[str, int], ...]
    """Name and bytes of each part."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(size for _, size in self.parts)


def memory_of(
    config: TrainConfig, facts: ModelFacts, limit: int, *, device: Device
) -> tuple[MemoryPlan, ...]:
    """Return the memory of a rank and of a server; nothing where the sizes are unknown.

    `limit`: tokens of prompt and answer together.
    """
    rank = rank_memory(config, facts, device=device)
    server = server_memory(config, facts, limit, device=device)
    return () if rank is None or server is None else (rank, server)


def rank_memory(config: TrainConfig, facts: ModelFacts, *, device: Device) -> MemoryPlan | None:
    """Return the peak memory of a trainer rank in a step; None = sizes unknown."""
    if facts.num_parameters is None or (facts.reference or facts).num_parameters is None:
        return None
    chunk = min(config.trainer.entropy_chunk_size, config.trainer.seq_len)
    compute = BYTES_PER_VALUE[compute_dtype(config.model.mixed_precision_dtype, device)]
    if config.trainer.train_backend == "megatron":
        return _megatron_rank(config, facts, chunk, compute, device=device)
    # Each copy of the model is divided among its own ranks.
    shards = config.trainer.trainer_num_workers // config.trainer.fsdp_replicate_size
    logits = 2 * 4 * min(chunk * (facts.vocab_size or 0), _logits_of_a_block(device))
    num_matrix = (facts.num_matrix_parameters or 0) // shards
    state = _training_state(config, facts.num_parameters // shards, compute, num_matrix=num_matrix)
    state += _reference(config, facts, compute, shards)
    if device == "cuda":
        state = [part for part in state if not _is_in_cpu_memory(part[0], config)]
    passing = (
        *((GATHERED, size) for size in _gathered(facts, compute, shards)),
        *((ACTIVATIONS, size) for size in _activations(config, facts, compute)),
        (LOGITS, logits),
    )
    # Products begin when what passes is gone, so only the rest adds to the peak.
    products = _products(config, facts, device) - sum(size for _, size in passing)
    return MemoryPlan(
        process="trainer rank",
        parts=(
            *state,
            *((ROUNDED, size) for size in _rounded(config, facts, compute, shards)),
            *passing,
            *([(PRODUCTS, products)] if products > 0 else []),
        ),
    )


def _megatron_rank(
    config: TrainConfig, facts: ModelFacts, chunk: int, compute: int, *, device: Device
) -> MemoryPlan:
    vocab = (facts.vocab_size or 0) // config.megatron.megatron_tensor_parallel_size
    activations = megatron_activations(config, facts, compute)
    return MemoryPlan(
        process="trainer rank",
        parts=(
            *megatron_state(config, facts, compute, device=device),
            *([] if activations is None else [(ACTIVATIONS, activations)]),
            (LOGITS, 2 * 4 * min(chunk * vocab, _logits_of_a_block(device))),
        ),
    )


def server_memory(
    config: TrainConfig, facts: ModelFacts, limit: int, *, device: Device
) -> MemoryPlan | None:
    """Return the memory of a server with room for all requests; None = sizes unknown.

    It is that of one of its GPUs, or of its processes on CPU, if it has several.
    """
    if facts.num_parameters is None or facts.kv_values_per_token is None:
        return None
    inference = config.inference
    compute = BYTES_PER_VALUE[compute_dtype(config.model.mixed_precision_dtype, device)]
    # Copies of the model share the requests, and each has a limit of its own.
    requests = config.scheduling.max_concurrent_prompts_per_server * config.largest_group
    sequences = min(
        inference.max_num_seqs, math.ceil(requests / inference.inference_data_parallel_size)
    )
    kv_bytes = _kv_values(config, facts) * compute
    process = "vLLM server"
    if inference.processes_per_server > 1:
        process += ", per GPU" if device == "cuda" else " process"
    return MemoryPlan(
        process=process,
        parts=(
            ("weights", _server_weights(config, facts.num_parameters, facts, compute)),
            (f"KV cache, {sequences} x {limit} tokens", kv_bytes * sequences * limit),
        ),
    )


def _server_weights(
    config: TrainConfig, num_parameters: int, facts: ModelFacts, compute: int
) -> int:
    """Return the bytes of a GPU's weights. Embeddings and head stay in the dtype of layers.

    Tensor parallelism is counted as if it divided all of them. Each GPU has the norms, the routers
    of a mixture, and a key-value head at least: together a few hundredths of its weights.
    """
    tensor = config.inference.inference_tensor_parallel_size
    if config.inference.inference_quantization == "none":
        return math.ceil(num_parameters * compute / tensor)
    outside = min(num_parameters, 2 * (facts.vocab_size or 0) * (facts.hidden_size or 0))
    whole = outside * compute + (num_parameters - outside) * BYTES_PER_VALUE["fp8"]
    return math.ceil(whole / tensor)


def _kv_values(config: TrainConfig, facts: ModelFacts) -> int:
    """Return the values of a token in the cache of one GPU, which has a whole head at least."""
    tensor = config.inference.inference_tensor_parallel_size
    return math.ceil((facts.kv_values_per_token or 0) / min(tensor, facts.num_kv_heads or 1))


def _is_in_cpu_memory(part: str, config: TrainConfig) -> bool:
    """Return whether `part` of the training state is in CPU memory instead of a GPU's."""
    trainer = config.trainer
    return trainer.fsdp_cpu_offload or (part == "Adam" and trainer.optimizer_cpu_offload)


def smallest_cache_bytes(config: TrainConfig, facts: ModelFacts, limit: int) -> int:
    """Return the KV cache of one request of `limit` tokens on a GPU, in bytes."""
    return _kv_values(config, facts) * limit * BYTES_PER_VALUE["bfloat16"]


def resident_bytes(config: TrainConfig, rank: MemoryPlan) -> int:
    """Return the bytes on a rank's GPU between steps, without gradients and activations."""
    passing = {ACTIVATIONS, GATHERED, LOGITS, PRODUCTS, ROUNDED, "gradients"}
    return sum(size for name, size in rank.parts if name not in passing)


def transfer_bytes(config: TrainConfig, facts: ModelFacts) -> int:
    """Return the memory of an update of weights within one GPU, beyond both models, in bytes.

    It passes the largest tensor or layer at most four times at once: as the rank rounds it, in the
    buffer that both map, in the server's copy of that, and in the layer that the server fills.
    """
    compute = BYTES_PER_VALUE[compute_dtype(config.model.mixed_precision_dtype, "cuda")]
    head = facts.num_head_parameters or 0
    layer = max(0, (facts.num_parameters or 0) - head) // (facts.num_layers or 1)
    # With LoRA neither the embedding nor the head is sent.
    largest = layer if config.trainer.use_lora else max(layer, head)
    return 4 * max(compute * largest, config.weights.weight_broadcast_bucket_mb * 2**20)


def _rounded(config: TrainConfig, facts: ModelFacts, compute: int, shards: int) -> list[int]:
    """Return the bytes of a rank's copy in the dtype of the layers, besides its master weights."""
    is_same = BYTES_PER_VALUE[config.model.model_dtype] == compute
    is_whole = shards == 1 and config.trainer.trainer_num_workers == 1
    if is_same or not is_whole or config.trainer.fsdp_cpu_offload or facts.num_parameters is None:
        return []
    return [compute * facts.num_parameters]


def _gathered(facts: ModelFacts, compute: int, shards: int) -> list[int]:
    """Return embeddings, head and two layers as FSDP gathers them, with their gradients."""
    if facts.num_parameters is None or not facts.num_layers or shards == 1:
        return []
    # Embeddings and head, as if they were not tied.
    outside = min(2 * (facts.num_head_parameters or 0), facts.num_parameters)
    body = facts.num_parameters - outside
    return [2 * compute * (outside + 2 * body // facts.num_layers)]


def _activations(config: TrainConfig, facts: ModelFacts, compute: int) -> list[int]:
    """Return the memory of one packed sequence for its backward pass, in bytes."""
    layer = layer_bytes(config, facts, compute)
    if layer is None or not facts.num_layers:
        return []
    mode = config.trainer.gradient_checkpointing
    if mode is False:
        return [facts.num_layers * layer.whole]
    # With "auto" the least that a rank can do with.
    kept = _WIDTHS_KEPT["full" if mode is True else mode]
    return [round(facts.num_layers * kept * layer.input) + 2 * layer.whole]


def layer_bytes(config: TrainConfig, facts: ModelFacts, compute: int) -> LayerBytes | None:
    """Return the bytes that a layer keeps of a row of `seq_len` tokens; `compute`: per number.

    None = the sizes are unknown.
    """
    if not facts.num_layers or not facts.hidden_size or not facts.ffn_size:
        return None
    tokens = config.trainer.seq_len // config.trainer.fsdp_context_parallel_size
    hidden = facts.hidden_size
    heads = (facts.attention_width or 0) // facts.num_layers
    # Norms, query, key, value, the attention's output, the residuals, and three of the MLP's width:
    # what one layer holds while its backward pass runs.
    return LayerBytes(
        whole=tokens * compute * (6 * hidden + 4 * heads + 3 * facts.ffn_size),
        input=tokens * compute * hidden,
    )


def _products(config: TrainConfig, facts: ModelFacts, device: Device) -> int:
    """Return the bytes in which Muon orthogonalizes matrices, at most a batch or the largest one.

    At once there are the rows that are sent, the matrices, two results of a product, two squares
    and the update, of which rows and update are in the dtype of the weights too.
    """
    if config.trainer.optimizer != "muon" or config.trainer.use_lora:
        return 0
    size = BYTES_PER_VALUE[config.model.model_dtype]
    largest = (facts.hidden_size or 0) * (facts.ffn_size or 0)
    values = min(max(largest, MUON_BATCH_VALUES), facts.num_matrix_parameters or 0)
    return values * (2 * size + 6 * (2 if device == "cuda" else 4))


def _training_state(
    config: TrainConfig, num_parameters: int, compute: int, *, num_matrix: int = 0
) -> list[tuple[str, int]]:
    """Return a rank's memory of the model between steps, without adapters, which are small.

    `compute`: bytes of a number in the dtype that layers compute in. `num_matrix`: those of the
    parameters that are in matrices of layers, of which Muon keeps one moment.
    """
    trainer = config.trainer
    size = BYTES_PER_VALUE[config.model.model_dtype]
    weights = size * num_parameters
    if trainer.use_lora:
        return [("frozen weights", weights)]
    moments = _MOMENT_BYTES.get(trainer.optimizer, 2 * size) * num_parameters
    name = "Adam"
    if trainer.optimizer == "muon":
        name, moments = "Muon and Adam", moments - size * num_matrix
    return [("weights", weights), ("gradients", weights), (name, moments)]


def _reference(
    config: TrainConfig, facts: ModelFacts, compute: int, shards: int
) -> list[tuple[str, int]]:
    """Return a rank's memory of the reference model; adapters are turned off to have it."""
    section = config.algorithm
    if not section.needs_reference or (config.trainer.use_lora and not section.reference_model):
        return []
    held = (facts.reference or facts).num_parameters or 0
    return [("reference model", compute * (held // shards))]


def _logits_of_a_block(device: Device) -> int:
    """Bytes of a block of logits in `logprobs`; repeated here because plans import no torch."""
    return 2**25 if device == "cuda" else 2**20


@dataclass(frozen=True, slots=True)
class _Held:
    """Numbers of parameters that a rank of backend `megatron` holds, in the largest stage."""

    dense: int
    """Parameters of layers without experts, embeddings and head."""
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts


def megatron_state(
    config: TrainConfig, facts: ModelFacts, compute: int, *, device: Device
) -> list[tuple[str, int]]:
    """Return the bytes of the model on a rank; `compute`: bytes of a number in layers.

    It holds its part of the layers, buffers for the gradients of that, and its share of the
    optimizer's state.
    """
    section = config.megatron
    layout = megatron_layout(section, config.trainer.trainer_num_workers)
    held = _held(facts, layout)
    is_low = compute < BYTES_PER_VALUE["float32"]
    gradient = 4 if is_low and section.megatron_grad_reduce_in_fp32 else compute
    adam = _optimizer_bytes(section, is_low=is_low) * _stepped(held, layout, section)
    if device == "cuda" and section.megatron_optimizer_cpu_offload:
        adam *= 1 - section.megatron_optimizer_offload_fraction
    parts = [
        ("weights", compute * held.all),
        ("gradient buffers", gradient * held.all),
        ("Adam", round(adam)),
    ]
    if section.megatron_overlap_grad_reduce and streams_gradients(config):
        # A pass sums its gradient over the ranks at once, so that of earlier passes is kept apart.
        parts.append(("gradients of earlier passes", gradient * held.all))
    if config.algorithm.needs_reference:
        reference = _held(facts.reference or facts, layout)
        parts.append(("reference model", compute * reference.all))
    return parts


def megatron_activations(config: TrainConfig, facts: ModelFacts, compute: int) -> int | None:
    """Return the bytes of rows in flight for their backward pass; None = sizes unknown.

    The first of P stages works on P rows at once, and has a P-th of the layers.
    """
    if not facts.num_layers or not facts.hidden_size or not facts.ffn_size:
        return None
    section = config.megatron
    tensor = section.megatron_tensor_parallel_size
    tokens = config.trainer.seq_len // section.megatron_context_parallel_size
    between = 6 * facts.hidden_size // (tensor if section.megatron_sequence_parallel else 1)
    heads = (facts.attention_width or 0) // facts.num_layers
    layer = tokens * compute * (between + (4 * heads + 3 * facts.ffn_size) // tensor)
    if not section.megatron_gradient_checkpointing:
        return facts.num_layers * layer
    return facts.num_layers * tokens * compute * between // 6 + layer


def _held(facts: ModelFacts, layout: RankLayout) -> _Held:
    total, head = facts.num_parameters or 0, facts.num_head_parameters or 0
    body = facts.num_body_parameters or total
    # A mixture's embedding and head are counted apart, as if they were not tied. Its experts are
    # those that a token is not sent to: the few others are counted with what tensor parallelism
    # divides.
    outside = min(2 * head, total - body) if facts.num_experts else total - body
    experts = max(0, total - body - outside)
    if layout.pipeline > 1:
        outside = min(outside, head)  # the first stage has the one and the last stage the other
    return _Held(
        dense=(body // layout.pipeline + outside) // layout.tensor,
        experts=experts // (layout.pipeline * layout.expert),
    )


def _stepped(held: _Held, layout: RankLayout, section: MegatronSection) -> int:
    """Return the number of parameters for which a rank keeps optimizer state."""
    if not section.megatron_use_distributed_optimizer:
        return held.all
    stage = layout.num_ranks // layout.pipeline
    return held.dense // (layout.data * layout.context) + held.experts // (stage // layout.expert)


def _optimizer_bytes(section: MegatronSection, *, is_low: bool) -> int:
    """Return the bytes of one parameter's state: two moments, and wide weights if needed."""
    if dtypes := section.megatron_optimizer_dtypes:
        return sum(
            BYTES_PER_VALUE[dtypes[name]] for name in ("main_params", "exp_avg", "exp_avg_sq")
        )
    return 12 if is_low else 8
