"""Resolve a model name: a folder on this machine, or an id on the Hugging Face Hub."""

from pathlib import Path

from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.file_proofs import SUMS, wrong_sums
from telescope_core.base.folders import why_not_writable
from telescope_core.records.files import read_json
from telescope_core.records.run_folder import where_its_model_is

ADAPTER_CONFIG = "adapter_config.json"
"""File of peft beside the weights of an adapter."""


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

    Also if no folder can be put in its place.
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


def _is_model(folder: Path) -> bool:
    """Return whether `folder` has a model's config.json; that of a run has no model_type."""
    fields = read_json(folder / "config.json")
    return fields is not None and "model_type" in fields


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; all of them if the first only announces more."""
    lines = str(error).split("\n")
    text = " ".join(str(error).split()) if lines[0].rstrip().endswith(":") else lines[0].strip()
    return text or type(error).__name__
