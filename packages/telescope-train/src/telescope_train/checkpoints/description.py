"""Everything about a model except its weights: config, tokenizer, chat template, and so on."""

from contextlib import suppress
from pathlib import Path

from transformers import AutoConfig, GenerationConfig

from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.config.schema import ModelSection
from telescope_train.models.location import locate_model


def save_model_description(folder: Path, settings: ModelSection) -> None:
    """Write the description to `folder`, so that the weights can become a model again anywhere."""
    location = locate_model(settings.model)
    trust = settings.trust_remote_code
    AutoConfig.from_pretrained(location, trust_remote_code=trust).save_pretrained(folder)
    with suppress(OSError):  # a model need not have a generation config
        GenerationConfig.from_pretrained(location).save_pretrained(folder)
    load_tokenizer(
        settings.model, chat_template=settings.chat_template, trust_remote_code=trust
    ).save_pretrained(folder)
