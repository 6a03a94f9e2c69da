"""Saves models with the generation config that they came with.

transformers loads a generation config with sampling values and without `do_sample`, as some
published models have one, and refuses to save it. A trained model must not be lost for that.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope_train.models.location import locate_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def save_model(lm: "PreTrainedModel", folder: Path, **options: Any) -> None:
    """Write `lm` as its `save_pretrained` does with `options`, whatever its generation config."""
    from transformers import GenerationConfig

    config: Any = getattr(lm, "generation_config", None)  # a model of own code may have none
    lm.generation_config = GenerationConfig()
    try:
        lm.save_pretrained(folder, **options)
    finally:
        lm.generation_config = config
    _write(config, folder)


def save_generation_config(model: str, folder: Path) -> None:
    """Write the generation config of the folder or Hub id `model`, if it has one, to `folder`."""
    from transformers import GenerationConfig

    config = None
    with suppress(OSError):
        config = GenerationConfig.from_pretrained(locate_model(model))
    _write(config, folder)


def _write(config: "GenerationConfig | None", folder: Path) -> None:
    # The compile config is no JSON, and not of the model.
    path = folder / "generation_config.json"
    if config is not None:
        config.to_json_file(path, use_diff=True, keys_to_pop=["compile_config"])
