"""Check `[trainer]`, `[checkpoint]` and routing replay: what fits together and has an effect."""

from collections.abc import Iterator

from telescope_core.base.errors import ConfigError
from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.config.fields import unused
from telescope_train.config.schema import CheckpointSection, TrainConfig
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.device import Device
from telescope_train.models.facts import ModelFacts
from telescope_train.models.served_adapter import VLLM_RANKS, served_adapter

LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings that have no effect without `use_lora`."""


def trainer_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[trainer]`."""
    section = config.trainer
    for index, beta in enumerate(section.adam_betas):
        if not 0 <= beta < 1:
            yield f"trainer.adam_betas[{index}] must be at least 0 and below 1, got {beta:g}"
    if section.lr_scheduler == "constant":
        why = "with lr_scheduler = 'constant'; use 'linear' or 'cosine', or remove min_lr_ratio"
        # The default, and what is so: the learning rate ends where it was.
        yield from unused(section, "trainer.min_lr_ratio", why, holds=(0.0, 1.0))
    yield from rise_and_fall_problems(section, config.num_optimizer_steps)
    yield from _checkpointing_problems(section)
    yield from _lora_problems(config)
    yield from muon_problems(section)
    yield from _fsdp_problems(section)
    last_port = config.inference.inference_base_port + config.inference.inference_num_workers - 1
    if last_port > 65535:
        yield (
            f"inference.inference_base_port: the last server would need port {last_port}, "
            "above 65535; lower inference_base_port"
        )


def rise_and_fall_problems(section: TrainerSection, num_steps: int) -> Iterator[str]:
    """Yield a message if the learning rate does not fall, or not after it has risen."""
    if section.lr_scheduler == "constant":
        why = "with lr_scheduler = 'constant'; use 'linear' or 'cosine', or remove cooldown_steps"
        yield from unused(section, "trainer.cooldown_steps", why)
    if section.warmup_steps > num_steps:
        yield (
            f"trainer.warmup_steps ({section.warmup_steps}) must not exceed the {num_steps} "
            "optimizer steps of the run; lower it"
        )
    elif section.warmup_steps + (section.cooldown_steps or 0) > num_steps:
        yield (
            f"trainer.warmup_steps ({section.warmup_steps}) and cooldown_steps "
            f"({section.cooldown_steps}) must not exceed the {num_steps} optimizer steps of the "
            "run together; lower one of them"
        )


def _checkpointing_problems(section: TrainerSection) -> Iterator[str]:
    kind = section.gradient_checkpointing
    if section.compile and kind == "selective":
        yield (
            "trainer.compile chooses by itself what a layer keeps for the backward pass, so "
            "gradient_checkpointing = 'selective' would have no effect; use 'full', or turn one off"
        )
    if section.compile and kind == "auto":
        yield (
            "gradient_checkpointing = 'auto' measures what layers keep for the backward pass, and "
            "trainer.compile changes that; use true or false, or remove compile"
        )
    yield from activation_problems(section)


def activation_problems(section: TrainerSection) -> Iterator[str]:
    """Yield a message if `activation_memory_gib` has no effect."""
    if section.activation_memory_gib is not None and section.gradient_checkpointing != "auto":
        yield (
            "trainer.activation_memory_gib has no effect without gradient_checkpointing = 'auto'; "
            "set that, or remove activation_memory_gib"
        )


def muon_problems(section: TrainerSection) -> Iterator[str]:
    """Yield a message for each setting that does not fit `optimizer`."""
    if section.optimizer != "muon":
        why = "without optimizer = 'muon'; set that, or remove muon_momentum"
        yield from unused(section, "trainer.muon_momentum", why)
    elif section.use_lora:
        yield (
            "trainer.optimizer = 'muon' orthogonalizes the change of a whole matrix, and use_lora "
            "trains two factors: orthogonal changes of them do not make one of the matrix; use "
            "'adamw', or remove use_lora"
        )


def _fsdp_problems(section: TrainerSection) -> Iterator[str]:
    if section.optimizer_cpu_offload and section.optimizer != "adamw":
        yield (
            f"trainer.optimizer_cpu_offload works with optimizer = 'adamw', got "
            f"{section.optimizer!r}; change one"
        )
    if section.optimizer_cpu_offload and section.fsdp_cpu_offload:
        yield (
            "trainer.optimizer_cpu_offload has no effect with fsdp_cpu_offload, which keeps the "
            "moments in CPU memory too; remove one"
        )
    if section.train_backend == "fsdp":
        try:
            fsdp_layout(section, section.trainer_num_workers)
        except ConfigError as error:
            yield str(error)


def _lora_problems(config: TrainConfig) -> Iterator[str]:
    section = config.trainer
    if not section.use_lora:
        for field in LORA_FIELDS:
            why = f"without use_lora; set use_lora = true, or remove {field}"
            yield from unused(section, f"trainer.{field}", why)
        why = "without use_lora; set use_lora = true, or remove lora_transfer"
        yield from unused(config.weights, "weights.lora_transfer", why)
    highest = VLLM_RANKS[-1]
    if served_adapter(config) is not None and section.lora_rank > highest:
        yield (
            f"weights.lora_transfer = 'adapter': vLLM computes adapters up to rank {highest}, and "
            f"lora_rank is {section.lora_rank}; lower it, or use 'merged'"
        )


def lora_targets(section: TrainerSection) -> tuple[str, ...]:
    """Return the names of the matrices that get an adapter; empty without adapters."""
    has_adapters = section.use_lora and section.train_backend == "fsdp"
    return section.lora_target_modules if has_adapters else ()


def checkpoint_problems(
    section: CheckpointSection, number_of_steps: int, *, always_saves_last: bool = True
) -> Iterator[str]:
    """Yield a message for each problem in `[checkpoint]`.

    `always_saves_last`: whether the last step is saved without `checkpoint_every` too.
    """
    resumes = section.resume_if_saved or section.resume_from_checkpoint is not None
    if section.allow_changed_environments and not resumes:
        yield (
            "checkpoint.allow_changed_environments has no effect without resume_from_checkpoint; "
            "remove it"
        )
    if section.resume_if_saved and section.resume_from_checkpoint == "latest":
        yield (
            "checkpoint.resume_if_saved begins a run of which nothing was saved, and --resume "
            "(resume_from_checkpoint = 'latest') refuses it; remove one of them"
        )
    if not section.checkpoint_every:
        for field in ("checkpoint_keep_last", "checkpoint_keep_every"):
            why = f"without checkpoint_every; set checkpoint_every, or remove {field}"
            yield from unused(section, f"checkpoint.{field}", why)
        return
    if section.checkpoint_every > number_of_steps:
        advice = (
            "lower it, or remove it (the last step is always saved)"
            if always_saves_last
            else "lower it (the last step is saved too), or remove it to save no checkpoint"
        )
        yield (
            f"checkpoint.checkpoint_every ({section.checkpoint_every}) is never reached in "
            f"{number_of_steps} steps; {advice}"
        )
    every = section.checkpoint_keep_every
    if every is None:
        return
    if section.checkpoint_keep_last is None:
        yield (
            "checkpoint.checkpoint_keep_every has no effect without checkpoint_keep_last, because "
            "all checkpoints are kept; set checkpoint_keep_last, or remove checkpoint_keep_every"
        )
    elif every % section.checkpoint_every:
        yield (
            f"checkpoint.checkpoint_keep_every ({every}) must be a multiple of checkpoint_every "
            f"({section.checkpoint_every}), because only those steps have a checkpoint; change one"
        )


def shared_rows_problem(size: int, facts: ModelFacts, device: Device) -> str | None:
    """Return why no attention over `size` ranks that share rows is right; None if one may be."""
    if size == 1 or device == "cuda" or not facts.attention_limits:
        return None
    return (
        f"fsdp_context_parallel_size ({size}): without a GPU, no attention over ranks that share "
        f"rows has {' and '.join(facts.attention_limits)}, which the model's config.json asks for; "
        "set fsdp_context_parallel_size = 1"
    )


def routing_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each setting that does not fit it."""
    trainer = config.trainer
    if not trainer.routing_replay:
        return
    if trainer.train_backend != "fsdp":
        yield (
            "trainer.routing_replay is for train_backend = 'fsdp', and this is "
            f"{trainer.train_backend!r}, which routes tokens by itself; remove one of them"
        )
    if trainer.compile:
        yield (
            "trainer.routing_replay changes what routers do from one packed sequence to the next, "
            "and trainer.compile would compile layers anew for each; remove one of them"
        )


def routing_model_problems(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    """Yield why the model has no routes to replay."""
    if config.trainer.routing_replay and facts.num_layers is not None and not facts.num_experts:
        yield (
            f"trainer.routing_replay has no effect: {config.model.model!r} is no mixture of "
            "experts; remove it"
        )


def routing_device_problems(config: TrainConfig, device: Device) -> Iterator[str]:
    """Yield why servers on `device` cannot report their routes."""
    if config.trainer.routing_replay and device == "cpu":
        yield (
            "trainer.routing_replay needs servers on GPUs: of vLLM's model runners, the one for "
            "CPU does not return which experts it chose; remove it"
        )
