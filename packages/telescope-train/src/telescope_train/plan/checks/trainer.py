"""Which settings of `[trainer]` fit together, and which would have no effect."""

from collections.abc import Iterator

from telescope_train.config.fields import was_set
from telescope_train.config.schema import TrainConfig


def trainer_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[trainer]`."""
    section = config.trainer
    for index, beta in enumerate(section.adam_betas):
        if not 0 <= beta < 1:
            yield f"trainer.adam_betas[{index}] must be at least 0 and below 1, got {beta:g}"
    if was_set(section, "min_lr_ratio") and section.lr_scheduler in ("constant", "none"):
        yield (
            f"trainer.min_lr_ratio has no effect with lr_scheduler = {section.lr_scheduler!r}; "
            "use 'linear' or 'cosine', or remove min_lr_ratio"
        )
    if section.warmup_steps and section.lr_scheduler == "none":
        yield (
            "trainer.warmup_steps has no effect with lr_scheduler = 'none'; "
            "use 'constant', or remove warmup_steps"
        )
    if section.warmup_steps > config.num_optimizer_steps:
        yield (
            f"trainer.warmup_steps ({section.warmup_steps}) must not exceed the "
            f"{config.num_optimizer_steps} optimizer steps of the run; lower it"
        )
    if section.compile and section.gradient_checkpointing == "selective":
        yield (
            "trainer.compile chooses by itself what a layer keeps for the backward pass, so "
            "gradient_checkpointing = 'selective' would have no effect; use 'full', or turn one off"
        )
    yield from _lora_problems(config)
    size = section.fsdp_context_parallel_size
    if section.trainer_num_workers % size:
        yield (
            f"trainer.trainer_num_workers ({section.trainer_num_workers}) must be a multiple of "
            f"fsdp_context_parallel_size ({size}), because that many ranks share a sequence; "
            "change one"
        )
    last_port = config.inference.inference_base_port + config.inference.inference_num_workers - 1
    if last_port > 65535:
        yield (
            f"inference.inference_base_port: the last server would need port {last_port}, "
            "above 65535; lower inference_base_port"
        )


def _lora_problems(config: TrainConfig) -> Iterator[str]:
    section = config.trainer
    for field in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"):
        if was_set(section, field) and not section.use_lora:
            yield (
                f"trainer.{field} has no effect without use_lora; "
                f"set use_lora = true, or remove {field}"
            )
