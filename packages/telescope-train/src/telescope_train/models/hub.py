"""A short check of the Hugging Face Hub, before a library tries for minutes to reach it.

Imports huggingface_hub, which takes a second, only where an id is looked for.
"""

from enum import StrEnum
from pathlib import Path

from telescope_core.base.errors import ConfigError
from telescope_train.models.location import ADAPTER_CONFIG, first_line

TRIES = 2
TIMEOUT_S = 5.0
"""Time limit of each try, for the connection and for the answer."""


class Kind(StrEnum):
    """The kind of repository that an id on the Hub names."""

    MODEL = "model"
    """A repository with a config.json."""
    DATASET = "dataset"
    """A repository that the library datasets reads."""


_FILES = {Kind.MODEL: "config.json", Kind.DATASET: "README.md"}
"""File whose access shows whether the content of a repository may be read."""


def look_on_hub(kind: Kind, name: str) -> Path | None:
    """Raise ConfigError, with advice, unless `name` can be read from the Hub or from here.

    Returns None if the Hub has it. If the Hub cannot be asked, returns the folder of the copy in
    this machine's cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    shown, hub = f"{kind} {name!r}", constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        reason = f"{shown} is not in the cache of this machine, and HF_HUB_OFFLINE is set"
        return _copy(kind, name, f"{reason}: unset it, or give a folder")
    try:
        _ask(kind, name, _FILES[kind])
        if kind is Kind.MODEL:
            _require_no_adapter(name)
    except HFValidationError as error:
        raise ConfigError(
            f"{shown} is neither a folder nor an id on the Hugging Face Hub: {first_line(error)}"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{shown} is gated on {hub}: ask for access on its page there, and set HF_TOKEN to a "
            "token of the account that has it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no {shown} on {hub}, or it is private: correct the id, give a folder, or "
            "set HF_TOKEN to a token that may read it"
        ) from error
    except EntryNotFoundError as error:
        if kind is Kind.MODEL:
            raise ConfigError(
                f"{shown} on {hub} has no config.json, so it is no model in Hugging Face format; "
                "if it is an adapter, merge it with peft's merge_and_unload and give that folder"
            ) from error
    except (HTTPError, OSError) as error:
        reason = f"{shown} cannot be looked up on {hub} ({first_line(error)})"
        return _copy(
            kind,
            name,
            f"{reason}, and it is not in the cache of this machine: mend the network, set "
            "HF_ENDPOINT to a mirror that can be reached, or give a folder",
        )
    return None


def _require_no_adapter(name: str) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        _ask(Kind.MODEL, name, ADAPTER_CONFIG)
    except EntryNotFoundError:
        return
    raise ConfigError(
        f"model {name!r} holds a model and an adapter ({ADAPTER_CONFIG}): transformers would load "
        "both, and servers the model alone; merge it with peft's merge_and_unload, save that, and "
        "give the folder"
    )


def _ask(kind: Kind, name: str, file: str) -> None:
    """Raise the library's error, at the second failure at the latest, unless the file is there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    url = hf_hub_url(name, file, repo_type=kind)
    for left in reversed(range(TRIES)):
        try:
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
            return
        except (HTTPError, OSError) as error:
            # An answer is an answer: only what was not heard is asked again.
            if not left or isinstance(error, HfHubHTTPError):
                raise


def _copy(kind: Kind, name: str, problem: str) -> Path:
    """Return the folder in this machine's cache; ConfigError with `problem` if there is none."""
    found = None
    if kind is Kind.MODEL:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, _FILES[kind])
        found = Path(file).parent if isinstance(file, str) else None
    else:
        from datasets import config

        folder = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")
        found = folder if folder.is_dir() else None
    if found is None:
        raise ConfigError(problem)
    return found
