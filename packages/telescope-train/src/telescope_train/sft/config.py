"""Every setting of `telescope sft`, the supervised warm start. Imports no torch."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.number_text import counted
from telescope_core.settings.config import load_config
from telescope_train.backends import known_backends
from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.config.fields import (
    Count,
    Dtype,
    Found,
    Index,
    NotNegative,
    Positive,
    Ratio,
    Section,
    decided,
    sorted_out,
    unused,
    was_set,
)
from telescope_train.config.names import FOREIGN_NAMES, NO_EQUAL_NAMES
from telescope_train.config.schema import CheckpointSection, TrainConfig
from telescope_train.config.trainer_section import (
    LORA_TARGETS,
    CheckpointingChoice,
    LearningRateShape,
    LoraTargets,
    MegatronSection,
    Optimizer,
    TrainerSection,
)
from telescope_train.models.device import compute_dtype, machine_device
from telescope_train.observability.trackers.tracker import missing_trackers
from telescope_train.plan.checks.megatron import device_problems, section_problems
from telescope_train.plan.checks.trainer import (
    LORA_FIELDS,
    activation_problems,
    checkpoint_problems,
    muon_problems,
    rise_and_fall_problems,
)

SHARED = (
    *(
        "train_backend",
        "gradient_checkpointing",
        "activation_memory_gib",
        "optimizer",
        "cooldown_steps",
        "trainer_num_workers",
        "fsdp_context_parallel_size",
        "fsdp_replicate_size",
    ),
    *("use_lora", *LORA_FIELDS),
)
"""Settings with the same meaning in `[trainer]` of `telescope train`."""
FSDP, MEGATRON = "fsdp", "megatron"
_SECTION = re.compile(r"\b(trainer|model|megatron|checkpoint)\.(?=[a-z])")
"""Sections of settings that only `telescope train` has."""


class SftEnvironment(Section):
    """One environment whose gold answers are learned."""

    name: Annotated[str, Field(min_length=1)]
    """Installed id with an optional `@version`, or `module:Class`."""
    weight: Positive = 1.0
    """Share of the examples relative to the other environments."""
    env: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""


class SftConfig(Section):
    """All settings of one supervised warm start."""

    model: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face model, or its id on the Hugging Face Hub."""
    make_tiny_model: bool = False
    """Write a new model of about 0.6M parameters, with a character tokenizer, to `model` first.
    Only a model that this wrote, and nobody changed, is replaced there."""
    output: Annotated[str, Field(min_length=1)]
    """Folder to which the trained model is written, in Hugging Face format."""
    environments: tuple[SftEnvironment, ...] = ()
    """Environments whose gold answers are learned; set either these or `dataset`."""
    dataset: Annotated[str, Field(min_length=1)] | None = None
    """Conversations to learn: a JSON Lines file, a folder, or an id on the Hugging Face Hub."""
    dataset_subset: str | None = None
    """Subset of a dataset on the Hub that has several."""
    dataset_split: str = "train"
    """Split of a dataset on the Hub or in a folder; a file has none."""
    dataset_revision: str | None = None
    """Commit or tag of a dataset on the Hub; null = its newest state."""
    messages_field: str = "messages"
    """Column with the conversations: lists of messages with role and content."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """Treatment of a conversation of more than `seq_len` tokens; cut and dropped ones are
    counted."""
    num_examples: Count | None = None
    """Number of different examples to learn; null = 8192 gold answers, or the whole dataset."""
    number_of_steps: Count = 300
    """Optimizer steps."""
    number_of_epochs: Positive | None = None
    """Passes through the examples, instead of number_of_steps; the last batch is filled with
    examples of the next pass."""
    batch_size: Count = 64
    """Examples in one step."""
    learning_rate: Positive = 2e-3
    """Peak learning rate; the same for AdamW and Muon."""
    optimizer: Optimizer = "adamw"
    """AdamW with moments of 32, 16 or 8 bits; `adamw_8bit` needs a GPU and torchao. `muon`: Muon
    for the matrices of the layers, AdamW for the rest."""
    lr_scheduler: LearningRateShape = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: Index = 10
    """Steps over which the learning rate rises, from 1 / `warmup_steps` of its peak. Unset, at most
    those that `cooldown_steps` leaves of number_of_steps."""
    cooldown_steps: Count | None = None
    """Steps at the end over which the learning rate falls, after a constant one
    (warmup-stable-decay); null = all after warm-up."""
    min_lr_ratio: Ratio = 0.1
    """Share of the peak learning rate that `linear` and `cosine` reach just after the last step."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    grad_clip: NotNegative = 1.0
    """Largest global gradient norm; 0 = measure the norm but do not clip."""
    gradient_checkpointing: bool | CheckpointingChoice = True
    """Recompute activations in the backward pass instead of keeping them: all of them (`full`,
    true), all except those of attention and matrix products (`selective`), or those of as few
    layers as memory needs (`auto`)."""
    activation_memory_gib: Positive | None = None
    """GiB that a rank may keep for a backward pass, with `gradient_checkpointing = "auto"`; null =
    what is left of its GPU, or half of what is free in the machine, divided among the ranks."""
    seq_len: Count = 4096
    """Tokens in one packed sequence; a longer example is refused."""
    entropy_chunk_size: Count = 1024
    """Tokens whose logits are held at one time."""
    model_dtype: Dtype = "float32"
    """Type of the weights that the optimizer updates."""
    mixed_precision_dtype: Dtype | None = None
    """Type used in forward and backward passes; null = bfloat16 on CUDA, float32 on CPU."""
    chat_template: str | None = None
    """Replacement of the chat template of the model's tokenizer: a Jinja file, the text of a
    template, or a shipped one by name: `chatml-keeps-thinking` or `deepseek-r1-keeps-thinking`."""
    trainer_num_workers: Count = 1
    """Trainer processes (ranks); each takes a GPU if there are GPUs. One runs in the command's own
    process, several on Ray."""
    train_backend: str = "fsdp"
    """Backend that divides the model over the ranks: `fsdp`, `megatron`, or an installed one."""
    megatron: MegatronSection = Field(default_factory=MegatronSection)
    """Settings of `train_backend = "megatron"`, as in `telescope train`."""
    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running Ray cluster for several ranks; null = one of the command's own."""
    fsdp_context_parallel_size: Count = 1
    """Ranks that share each packed sequence; each takes a slice of its tokens."""
    fsdp_replicate_size: Count = 1
    """Whole copies of the model (HSDP): each is sharded over trainer_num_workers divided by this
    many ranks."""
    use_lora: bool = False
    """Freeze the model and train low-rank adapters; `output` has them merged, and alone in
    `adapter`."""
    lora_rank: Count = 16
    """Rank of each adapter, with `use_lora`."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by this over `lora_rank`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped at random during training."""
    lora_target_modules: LoraTargets = LORA_TARGETS
    """Matrices of the decoder layers that get an adapter."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when a sampled answer is expected to be the gold answer with this probability."""
    num_held_out: Count = 128
    """Number of further examples that are not learned, to measure accuracy and loss on."""
    loss_log_every: Count = 10
    """Steps between measurements; each is a row of `metrics.jsonl`."""
    checkpoint_every: Index = 0
    """Steps between checkpoints, which are kept in `<output>-log/checkpoints`; the last step is
    saved too. 0 = none."""
    checkpoint_keep_last: Count | None = None
    """Number of the newest checkpoints to keep; null = all of them."""
    checkpoint_keep_every: Count | None = None
    """Also keep the checkpoints of steps that are a multiple of this."""
    resume_from_checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """Checkpoint to continue from: its folder, or `latest` for the newest of this output."""
    use_wandb: bool = False
    """Send settings and measurements to Weights & Biases; offline with WANDB_MODE=offline."""
    wandb_project: Annotated[str, Field(min_length=1)] = "telescope"
    """Project there; the training is called there as the folder `output`."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the training there."""
    use_tensorboard: bool = False
    """Write measurements to `tensorboard` in `<output>-log`."""
    trackers: tuple[str, ...] = ()
    """Further installed trackers, by the names of their entry points (`telescope.trackers`), such
    as trackio."""
    seed: Index = 0
    """Seed of the model, the order of examples and every random generator."""


_OF_TRAIN = dict.fromkeys(
    set(TrainConfig.model_fields) - set(SftConfig.model_fields),
    "it is a section of `telescope train`, and this is `telescope sft`",
)
"""Section in a file for `telescope train` -> a remark that it belongs there."""
_FOREIGN = {
    name: here
    for name, here in FOREIGN_NAMES.items()
    if here.partition(": ")[0] in SftConfig.model_fields and name not in SftConfig.model_fields
} | {
    **dict.fromkeys(
        (
            *("train_batch_size", "global_batch_size", "gradient_accumulation_steps"),
            *("per_device_train_batch_size", "micro_batch_size", "micro_train_batch_size"),
            *("micro_batch_size_per_gpu", "train_micro_batch_size"),
        ),
        "batch_size: examples in one optimizer step, over all ranks; they are packed into rows of "
        "seq_len tokens",
    ),
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "eval_interval", "test_freq", "val_period"),
        "loss_log_every: steps between measurements of held-out examples",
    ),
    **dict.fromkeys(
        ("max_length", "max_seq_length", "max_seq_len", "data.max_len"),
        "seq_len: too_long says what else happens",
    ),
    **dict.fromkeys(("dataset_name", "train_files", "train_datasets", "data.dataset"), "dataset"),
    **dict.fromkeys(("dataset_train_split", "data.dataset_split"), "dataset_split"),
    **dict.fromkeys(("messages_key", "data.input_key"), "messages_field"),
    **dict.fromkeys(("output_dir", "default_local_dir", "export_path"), "output"),
    "max_steps": "number_of_steps",
    **dict.fromkeys(
        (
            *("num_train_epochs", "num_epochs", "num_epoch", "epochs", "total_epochs", "n_epochs"),
            *("max_num_epochs", "total_train_epochs", "trainer.total_epochs", "max_epochs"),
        ),
        "number_of_epochs",
    ),
    "logging_steps": "loss_log_every",
    "truncation": "too_long",
    "truncation_mode": "too_long",
}
_HELD_OUT = (
    "num_held_out further examples of the dataset, or of the environments' eval splits, are "
    "measured every loss_log_every steps"
)
_REASONS = {
    NO_EQUAL_NAMES["eval.*"]: _HELD_OUT,
    NO_EQUAL_NAMES["max_prompt_length"]: (
        "seq_len bounds a whole conversation; too_long says what happens to a longer one"
    ),
    NO_EQUAL_NAMES["data.*"]: (
        "examples come from dataset, or are the gold answers of [[environments]]; they are drawn "
        "in an order of the seed"
    ),
    NO_EQUAL_NAMES["eval_batch_size"]: (
        "examples are packed into rows of seq_len tokens; lower seq_len if memory is short"
    ),
}
"""Reason of `telescope train` for having no such setting -> the reason here."""
_NO_EQUAL = {
    name: _REASONS.get(why, why)
    for name, why in NO_EQUAL_NAMES.items()
    if name not in {*SftConfig.model_fields, *_FOREIGN}
} | {
    **dict.fromkeys(
        ("eval_dataset", "dataset_test_split", "val_data", "val_files", "valid_dataset.*"),
        _HELD_OUT,
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        "it is always so: only the assistant's turns are learned (a turn of weight 0 is not)",
    ),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt", "train_on_what"),
        "only the assistant's turns are learned",
    ),
    **dict.fromkeys(
        ("run_name", "experiment_name", "wandb.name", "wandb_run_name"),
        "a training is called as its folder output, also in trackers",
    ),
    **dict.fromkeys(
        (
            *("adam_beta1", "adam_beta2", "adam_betas", "betas"),
            *("adam_epsilon", "adam_eps", "adam.eps", "muon_momentum", "muon.momentum", "optim.mu"),
        ),
        "it is what [trainer] of `telescope train` has by default",
    ),
}


def load_sft_config(files: Sequence[Path], flags: Sequence[str] = ()) -> SftConfig:
    """Return settings that fit together; raises ConfigError naming those that do not."""
    config = load_config(
        SftConfig, files, flags, foreign_names=_FOREIGN, refused_names=_NO_EQUAL | _OF_TRAIN
    )
    names = [environment.name for environment in config.environments]
    if len(set(names)) != len(names):
        raise ConfigError(f"environments: each can be listed only once, got {', '.join(names)}")
    if was_set(config, "number_of_steps") and was_set(config, "number_of_epochs"):
        raise ConfigError("number_of_steps and number_of_epochs both say how long; remove one")
    config = _fitting(config)
    model, output = Path(config.model).expanduser().resolve(), Path(config.output).resolve()
    if model.is_relative_to(output):
        raise ConfigError(
            f"output must not be the folder of the model or one around it, because it is replaced; "
            f"got model {config.model!r} and output {config.output!r}; name another output"
        )
    return config


def _fitting(config: SftConfig) -> SftConfig:
    """Return `config` with the warm-up that fits in; raises ConfigError for what does not fit."""
    if not was_set(config, "warmup_steps") and config.number_of_epochs is None:
        left = max(0, config.number_of_steps - (config.cooldown_steps or 0))
        config = decided(config, warmup_steps=min(config.warmup_steps, left))
    if problems := settings_found(config).problems:
        raise ConfigError("\n".join(problems))
    return config


def in_steps(config: SftConfig, num_samples: int) -> SftConfig:
    """Return `config` with the steps that its epochs are, over `num_samples` samples.

    Raises ConfigError for settings that do not fit them, which could not be known before.
    """
    epochs = config.number_of_epochs
    if epochs is None:
        return config
    # 1.1 * 10 is not to be one step more than 11.
    steps = max(1, math.ceil(round(epochs * num_samples / config.batch_size, 9)))
    try:
        return _fitting(decided(config, number_of_steps=steps, number_of_epochs=None))
    except ConfigError as error:
        raise ConfigError(
            f"number_of_epochs = {epochs:g} over {num_samples:,} samples is "
            f"{counted(steps, 'step')} of {config.batch_size}, and then: {error}"
        ) from None


def settings_found(config: SftConfig) -> Found:
    """Return settings that do not fit together, and settings that were given without effect."""
    trackers = _tracker_problems(config)
    found = sorted_out(
        (*_source_problems(config), *_rank_problems(config), *trackers, *_step_problems(config))
    )
    problems = (_SECTION.sub("", problem) for problem in found.problems)
    redundant = (_SECTION.sub("", setting) for setting in found.redundant)
    return Found(problems=tuple(problems), redundant=tuple(redundant))


def _step_problems(config: SftConfig) -> Iterator[str]:
    """Yield what depends on the number of steps, which `in_steps` finds out from epochs."""
    num_steps = config.number_of_steps
    if config.number_of_epochs is not None:
        return
    yield from checkpoint_problems(checkpoint_section(config), num_steps, always_saves_last=False)
    if config.train_backend in known_backends():
        yield from rise_and_fall_problems(trainer_section(config), num_steps)


def _tracker_problems(config: SftConfig) -> Iterator[str]:
    if not config.use_wandb:
        for field in ("wandb_project", "wandb_tags"):
            yield from unused(config, field, f"without use_wandb; set use_wandb, or remove {field}")
    yield from missing_trackers(config)


def _rank_problems(config: SftConfig) -> Iterator[str]:
    if not config.use_lora:
        for field in LORA_FIELDS:
            why = f"without use_lora; set use_lora = true, or remove {field}"
            yield from unused(config, field, why)
    if config.ray_address is not None and config.trainer_num_workers == 1:
        yield (
            "ray_address has no effect with one rank, which runs in this process; raise "
            "trainer_num_workers, or remove ray_address"
        )
    if config.train_backend not in known_backends():
        yield str(unknown_name("train_backend", config.train_backend, known_backends()))
        return
    trainer = trainer_section(config)
    yield from muon_problems(trainer)
    problems = list(section_problems(config.megatron, trainer, config.model_dtype))
    if config.train_backend == MEGATRON and not problems:
        device = machine_device()
        dtype = compute_dtype(config.mixed_precision_dtype, device)
        problems += device_problems(config.megatron, dtype, device)
    if config.train_backend == FSDP:
        problems += activation_problems(trainer)
        try:
            fsdp_layout(trainer, config.trainer_num_workers)
        except ConfigError as error:
            problems.append(str(error))
    yield from problems


def trainer_section(config: SftConfig) -> TrainerSection:
    """Return the settings of the ranks in the form of `telescope train`; unset ones stay unset."""
    given = {name: getattr(config, name) for name in SHARED if was_set(config, name)}
    if config.train_backend in (FSDP, MEGATRON):
        given["share_prefixes"] = False  # each example has a prompt of its own
    return TrainerSection(
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
        lr_scheduler=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        min_lr_ratio=config.min_lr_ratio,
        seq_len=config.seq_len,
        entropy_chunk_size=config.entropy_chunk_size,
        **given,
    )


def checkpoint_section(config: SftConfig) -> CheckpointSection:
    """Return the checkpoint settings in the form of `telescope train`; unset ones stay unset."""
    names = ("checkpoint_every", "checkpoint_keep_last", "checkpoint_keep_every")
    return CheckpointSection(
        **{name: getattr(config, name) for name in names if was_set(config, name)}
    )


def _source_problems(config: SftConfig) -> Iterator[str]:
    """Yield a message unless there is one source of examples, and for settings without effect."""
    if bool(config.environments) == (config.dataset is not None):
        yield (
            "set either [[environments]], whose gold answers are learned, or dataset, whose "
            f"conversations are learned; got {'both' if config.environments else 'neither'}"
        )
        return
    if config.dataset is None:
        fields = ("dataset_subset", "dataset_split", "dataset_revision")
        for field in (*fields, "messages_field", "too_long"):
            yield from unused(config, field, "without dataset; remove it")
    elif Path(config.dataset).expanduser().exists():
        for field in ("dataset_revision", "dataset_subset"):
            why = f"because {config.dataset!r} is on this machine; remove it"
            yield from unused(config, field, why)
        if Path(config.dataset).expanduser().is_file():
            why = (
                f"because {config.dataset!r} is a file, all of whose rows are read; remove it, or "
                "give the folder that has the splits"
            )
            yield from unused(config, "dataset_split", why)
