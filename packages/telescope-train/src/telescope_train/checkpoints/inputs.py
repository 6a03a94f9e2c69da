"""The files that a run reads besides its environments, each with a digest of its content.

Settings name the place of a model, a template or a function, but not its content. Imports no torch.
"""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from telescope_core.base.code_files import source_files
from telescope_core.base.file_proofs import quick_digest
from telescope_train.rollouts.accept import BUILT_IN

_MODEL = "model.model"
FIXED = (_MODEL, "model.chat_template", "dataset", "environments")
"""Inputs that must not change, because the saved state depends on them."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "*.txt", "*.py")


def inputs_of(
    model: str,
    *,
    chat_template: str | None,
    accept_fn: str | None = None,
    dataset: str | None = None,
) -> dict[str, str]:
    """Return the digest of each input, by `setting: file`; for a Hub id, its commit.

    `accept_fn`: `module:function` in the settings. `dataset`: a file of examples. Missing files are
    left out; their readers report them.
    """
    found = dict(_of_model(model))
    given = {"model.chat_template": chat_template, "dataset": dataset}
    for setting, name in given.items():
        # A template may also be its text, which is longer than a path may be.
        if name is not None and len(name) < 1024 and (path := Path(name).expanduser()).is_file():
            found[f"{setting}: {name}"] = quick_digest(path)
    if accept_fn is not None and accept_fn not in BUILT_IN:
        sources = source_files(accept_fn.partition(":")[0])
        found |= {f"rollout.should_accept_fn: {name}": value for name, value in sources.items()}
    return found


def _of_model(name: str) -> Iterator[tuple[str, str]]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        for path in sorted({path for kind in _MODEL_FILES for path in folder.glob(kind)}):
            yield f"{_MODEL}: {path.name}", quick_digest(path)
        return
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return
    if isinstance(cached, str):
        yield f"{_MODEL}: commit", Path(cached).parent.name
