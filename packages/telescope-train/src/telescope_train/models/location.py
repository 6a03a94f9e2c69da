"""Resolve a model name: a folder on this machine, or an id on the Hugging Face Hub."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.file_proofs import SUMS, wrong_sums
from telescope_core.base.folders import why_not_writable
from telescope_core.records.files import read_json
from telescope_core.records.run_folder import where_its_model_is

ADAPTER_CONFIG = "adapter_config.json"
"""File of peft beside the weights of an adapter."""
ADAPTER_FOLDER = "adapter"
"""Folder of the adapter beside the model that it was merged into."""
_OF_MODEL = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", SUMS, "TINY_MODEL"),
    *("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.json", "merges.txt"),
    *("vocab.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    *("additional_chat_templates", "preprocessor_config.json", "processor_config.json"),
    *(".metadata", "*.distcp"),
)
"""Names in the folder of a model, or of the state of a checkpoint. Others are somebody's own."""


def locate_model(name: str, *, output_dir: str = "runs") -> str:
    """Return the folder or Hub id that `name` means; raises ConfigError if it can be neither.

    `owner/name` that is not a folder is taken as a Hub id, unless `owner` is a folder or
    `output_dir`. Then it is taken as a path that is mistyped or does not exist yet.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (advice := where_its_model_is(path)) is not None:
            raise ConfigError(f"model {name!r} holds no model in Hugging Face format; {advice}")
        if (path / ADAPTER_CONFIG).is_file():
            raise ConfigError(_adapter(name, path))
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model {name!r} is a folder without config.json, so it holds no model; "
                "give the folder that a model was saved to"
            )
        return str(path)
    if path.exists():
        raise ConfigError(f"model {name!r} is a file; give the folder that holds config.json")
    looks_local = name.startswith((".", "~", "/")) or name.count("/") != 1
    if looks_local or path.parent.is_dir() or path.is_relative_to(output_dir):
        raise ConfigError(f"model {name!r} does not exist{_advice(path)}")
    return name


def _adapter(name: str, path: Path) -> str:
    base = (read_json(path / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
    of = f" of {base!r}" if base else ""
    merge = "merge it with peft's merge_and_unload, save that, and give the folder"
    if not (path / "config.json").is_file():
        return f"model {name!r} is an adapter{of} ({ADAPTER_CONFIG}), not a whole model; {merge}"
    return (
        f"model {name!r} holds a model and an adapter{of} ({ADAPTER_CONFIG}): transformers would "
        f"load both, and servers the model alone; {merge}, or remove the adapter's files"
    )


def require_written(name: str) -> None:
    """Raise ConfigError if weights in the folder `name` do not match its checksums.

    Reads all of them, where an export of this project has left checksums; about 1 GB/s and thread.
    """
    folder = Path(name).expanduser()
    try:
        wrong = wrong_sums(folder)
    except ValueError as error:
        raise ConfigError(f"model {name!r}: {error}; remove {SUMS} or bring it back") from None
    if wrong:
        raise ConfigError(
            f"model {name!r} is damaged: {'; '.join(wrong[:3])}; copy it again, or remove "
            f"{folder / SUMS} if you changed the weights yourself"
        )


def _advice(path: Path) -> str:
    if not path.parent.is_dir():
        return (
            f": there is no folder {str(path.parent)!r} either; give the folder of a model "
            "(`telescope sft` makes one), or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    folders = [
        entry.name
        for entry in path.parent.iterdir()
        if (entry / "config.json").is_file() and any(entry.glob("*.safetensors"))
    ]
    close = nearest(path.name, folders) or sorted(folders)[:5]
    if not close:
        return f"; {str(path.parent)!r} holds no model folders (`telescope sft` makes one)"
    return f"; did you mean {' or '.join(repr(str(path.parent / name)) for name in close)}?"


def require_replaceable(folder: Path) -> None:
    """Raise ConfigError if `folder` holds something that is neither a model nor a checkpoint.

    All of it would be deleted, so each name in it counts. Also if no folder can be put in its
    place.
    """
    if why := why_not_writable(folder.absolute().parent):
        raise ConfigError(f"{str(folder)!r} cannot be written: {why}; name another folder")
    if not folder.exists():
        return
    is_ours = _is_model(folder) or (folder / ".metadata").is_file()
    if not folder.is_dir() or (any(folder.iterdir()) and not is_ours):
        raise ConfigError(
            f"{str(folder)!r} exists and holds no model or checkpoint that could be replaced; "
            "name another folder, or remove it"
        )
    # Code of a model's own has any name.
    names = (*_OF_MODEL, *(("*.py",) if "auto_map" in _config(folder) else ()))
    others = sorted(one.name for one in folder.iterdir() if not _is_of_model(one, names))
    if others:
        raise ConfigError(
            f"{str(folder)!r} holds a model and {', '.join(map(repr, others[:3]))}"
            f"{' and more' * (len(others) > 3)}, which are no part of a model and would be "
            "deleted with it; move them away, or name another folder"
        )


def _is_of_model(entry: Path, names: Sequence[str]) -> bool:
    if entry.name == ADAPTER_FOLDER:
        known = (ADAPTER_CONFIG, "adapter_model.safetensors", SUMS)
        return all(one.name in known for one in entry.iterdir())
    return any(fnmatch(entry.name, pattern) for pattern in names)


def _is_model(folder: Path) -> bool:
    """Return whether `folder` has a model's config.json; that of a run has no model_type."""
    return "model_type" in _config(folder)


def _config(folder: Path) -> Mapping[str, Any]:
    return read_json(folder / "config.json") or {}


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; all of them if the first only announces more."""
    lines = str(error).split("\n")
    text = " ".join(str(error).split()) if lines[0].rstrip().endswith(":") else lines[0].strip()
    return text or type(error).__name__
