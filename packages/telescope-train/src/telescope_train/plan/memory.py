"""How much memory each kind of process needs, from the sizes in `config.json`. Imports no torch."""

from dataclasses import dataclass

from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import Device, compute_dtype
from telescope_train.models.facts import ModelFacts

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}

_MOMENT_BYTES = {"adamw_bf16": 4, "adamw_8bit": 2}
"""Of both moments of one parameter; those of plain AdamW have the dtype of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one process of a kind; what the sizes in `config.json` give."""

    process: str
    parts: tuple[tuple[str, int], ...]
    """What, and its bytes."""

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
    if facts.num_parameters is None or facts.kv_values_per_token is None:
        return ()
    # Each copy of the model is divided among its own ranks.
    ranks = config.trainer.trainer_num_workers // config.trainer.fsdp_replicate_size
    chunk = min(config.trainer.entropy_chunk_size, config.trainer.seq_len)
    compute = BYTES_PER_VALUE[compute_dtype(config.model.mixed_precision_dtype, device)]
    sequences = min(
        config.inference.max_num_seqs,
        config.scheduling.max_concurrent_prompts_per_server * config.rollout.group_size,
    )
    kv_bytes = facts.kv_values_per_token * compute
    return (
        MemoryPlan(
            process="trainer rank",
            parts=(
                *_training_state(config, facts.num_parameters // ranks, compute),
                (
                    "logits",
                    2 * 4 * min(chunk * (facts.vocab_size or 0), _logits_of_a_block(device)),
                ),
            ),
        ),
        MemoryPlan(
            process="vLLM server",
            parts=(
                ("weights", facts.num_parameters * compute),
                (f"KV cache, {sequences} x {limit} tokens", kv_bytes * sequences * limit),
            ),
        ),
    )


def _training_state(
    config: TrainConfig, num_parameters: int, compute: int
) -> list[tuple[str, int]]:
    """Return what a rank keeps of the model between steps; adapters are small and not counted.

    `compute`: bytes of a number in the dtype that layers compute in.
    """
    trainer = config.trainer
    size = BYTES_PER_VALUE[config.model.model_dtype]
    weights = size * num_parameters
    if trainer.use_lora:
        return [("frozen weights", weights)]
    moments = 2 * size if trainer.optimizer == "adamw" else _MOMENT_BYTES[trainer.optimizer]
    parts = [("weights", weights), ("gradients", weights), ("Adam", moments * num_parameters)]
    if config.algorithm.needs_reference:
        parts.append(("reference model", compute * num_parameters))
    return parts


def _logits_of_a_block(device: Device) -> int:
    """As `logprobs` cuts them; said again, because a plan is made without torch."""
    return 2**25 if device == "cuda" else 2**20
