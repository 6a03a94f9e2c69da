"""Check that the model of a run can be trained, by its config, headers and tokenizer."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_train.chat.probe import declared_uses, probe_template
from telescope_train.chat.renderer import load_renderer
from telescope_train.chat.tokenizer import (
    ModelSettings,
    bare_tokenizer,
    require_rows,
    token_difference,
)
from telescope_train.config.schema import ModelSection, TrainConfig
from telescope_train.models.fit import empty_model, require_peft, require_targets
from telescope_train.models.hub import Kind, look_on_hub
from telescope_train.models.location import locate_model, require_written
from telescope_train.models.source import problems_of, read_source, served_source

SMALL_LEARNING_RATE = 1e-4
"""A step of Adam is about as large as the rate, and bfloat16 numbers around 0.02, as most weights
are, lie 1.2e-4 apart: what is less than half of that is rounded away."""


class ModelLook(NamedTuple):
    """The results of the checks of a model."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for people who train it."""

    def require_sound(self) -> None:
        """Raise ConfigError with one line for each problem."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def look_at_model(
    settings: ModelSettings, *, dtype: str, lora_targets: Sequence[str] = ()
) -> ModelLook:
    """Compare the config of the model with the headers of its files, and its tokenizer with both.

    `dtype`: in which its weights are held. `lora_targets`: names of matrices that get an adapter.
    """
    if find_spec("torch") is None:
        return ModelLook(notes=("torch is not installed here, so no file of the model was read",))
    notes: list[str] = []
    try:
        if lora_targets:
            require_peft()
        require_written(settings.model)
        location, copy = locate_model(settings.model), None
        if not Path(location).is_dir():
            copy = look_on_hub(Kind.MODEL, settings.model)
        if copy is not None:
            notes.append(
                "the Hugging Face Hub was not asked for the model, whose copy in the cache of this "
                "machine is used; if it takes long to fail, set HF_HUB_OFFLINE=1"
            )
        source = read_source(
            settings.model,
            dtype=dtype,
            trust_remote_code=settings.trust_remote_code,
            location=location if copy is None else str(copy),
            downloads=False,
        )
        if source.has_own_head:
            is_known = source.files is not None and source.files.is_here
            notes.append(
                "config.json says that the output head is the embedding (tie_word_embeddings), "
                f"and the files have {'another one' if is_known else 'one'}: "
                f"{'' if is_known else 'unless both are the same, '}it is trained on its own, as "
                "transformers loads it"
            )
        if source.files is None:
            notes.append(
                "the model has no safetensors files, so its tensors are only compared with its "
                "config once they are loaded"
            )
        # What code that comes with a model builds is known once it is loaded.
        has_code = settings.trust_remote_code and getattr(source.config, "auto_map", None)
        if lora_targets and not has_code:
            with problems_of(f"model {settings.model!r}", location=source.location):
                require_targets(empty_model(source.config, dtype), lora_targets)
        rows = source.config.get_text_config().vocab_size
        read = ModelSection(model=source.location, trust_remote_code=settings.trust_remote_code)
        note = require_rows(settings.model, bare_tokenizer(read), rows)
    except TelescopeError as error:
        return ModelLook(problems=(str(error),), notes=tuple(notes))
    return ModelLook(notes=(*notes, *([note] if note else [])))


def look_at_reference(config: TrainConfig, other: str) -> ModelLook:
    """Check `reference_model` as the model is, and that its token ids mean what the model's do."""
    if find_spec("torch") is None:
        return ModelLook()
    settings = config.model.model_copy(update={"model": other})
    look = look_at_model(settings, dtype=config.model.model_dtype)
    named = ModelLook(
        problems=tuple(f"algorithm.reference_model: {one}" for one in look.problems),
        notes=tuple(f"reference_model: {one}" for one in look.notes),
    )
    if named.problems:
        return named
    try:
        problem = token_difference(bare_tokenizer(config.model), bare_tokenizer(settings))
    except TelescopeError as error:
        problem = str(error)
    if problem is None:
        return named
    return named._replace(problems=(f"algorithm.reference_model {problem}",))


def look_at_template(config: TrainConfig) -> ModelLook:
    """Test the chat template as a run does at its start, for the uses in the settings."""
    if find_spec("torch") is None:
        return ModelLook()
    try:
        report = probe_template(load_renderer(config.model, uses=declared_uses(config)))
    except TelescopeError as error:
        return ModelLook(problems=(str(error),))
    return ModelLook(notes=() if report.no_end is None else (report.no_end,))


def rounding_notes(model_dtype: str, *, learning_rate: float, use_lora: bool) -> Iterator[str]:
    """Yield notes about steps that are smaller than the spacing of numbers in the weights."""
    if model_dtype != "bfloat16" or use_lora or learning_rate >= SMALL_LEARNING_RATE:
        return
    yield (
        f"model_dtype = 'bfloat16' with a learning rate of {learning_rate:g}: numbers in bfloat16 "
        "are 0.4 to 0.8 % apart, so that most weights are rounded back to what they were, step "
        "after step; set model_dtype = 'float32' (layers compute in mixed_precision_dtype all the "
        "same)"
    )


def require_served(folder: str) -> None:
    """Raise ConfigError if config, files and tokenizer of a model to be served disagree.

    A server would silently fill in missing weights and leave out unknown ones.
    """
    require_written(folder)
    source = served_source(folder)
    if source is not None:
        rows = source.config.get_text_config().vocab_size
        require_rows(folder, bare_tokenizer(ModelSection(model=folder)), rows)
