"""Find the model that a run began with, when a checkpoint of it is exported.

Settings name a folder as it was typed, which means another one from another working directory. So
the folder that a checkpoint records comes first, and files are compared with the digests of then.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import AutoConfig

from telescope_core.base.code_files import file_changes
from telescope_core.base.errors import ConfigError
from telescope_train.checkpoints.folders import RunCheckpoint
from telescope_train.checkpoints.resume import MODEL, inputs_of
from telescope_train.config.schema import ModelSection
from telescope_train.models.hub import Kind, look_on_hub
from telescope_train.models.location import locate_model
from telescope_train.models.source import problems_of

_COMMIT = f"{MODEL}: commit"
"""Input of a run whose model is on the Hub."""
_MERGED = (".safetensors", ".bin", ".index.json", ".py", f"{MODEL}: config.json", _COMMIT)
"""Endings of the inputs that decide what adapters are merged into; a tokenizer does not."""


def base_folders(checkpoint: RunCheckpoint) -> list[Path]:
    """Return the folders that may be the model that the run began with; none for a Hub id.

    It is the recorded one. If that is gone, as after a move to another machine, or was not recorded
    by an earlier version, it may be any folder of its name here or around the checkpoint.
    """
    manifest = checkpoint.manifest
    if _COMMIT in manifest.inputs:
        return []
    recorded = Path(manifest.model_folder)
    if manifest.model_folder and recorded.is_dir():
        return [recorded]
    names = [Path(manifest.config["model"]["model"]).expanduser()]
    if manifest.model_folder:
        names += [Path(*recorded.parts[start:]) for start in range(1, len(recorded.parts))]
    around = [Path.cwd(), *checkpoint.path.resolve().parents]
    found = dict.fromkeys(place / name for name in names for place in around)
    # Some other folder may have the name by chance.
    return [folder for folder in found if (folder / "config.json").is_file()]


def find_base(
    checkpoint: RunCheckpoint, settings: ModelSection, tell: Callable[[str], None]
) -> str:
    """Return the folder or Hub id of the model that the adapters of `checkpoint` belong to.

    `tell` gets a line if it is not where it was. Raises ConfigError if it is not there, or is not
    what the adapters were trained on.
    """
    name, was_in = settings.model, checkpoint.manifest.model_folder
    folders = base_folders(checkpoint)
    if not folders:
        return _on_hub(checkpoint, settings)
    changes = {folder: _changes(checkpoint, str(folder)) for folder in folders}
    folder = next((one for one in folders if not changes[one]), None)
    if folder is None:
        raise _changed(checkpoint, f"model {name!r} in {folders[0]}", changes[folders[0]])
    if was_in and folder != Path(was_in):
        tell(f"the model that training began with is not in {was_in} now; {folder} is taken")
    return str(folder)


def _on_hub(checkpoint: RunCheckpoint, settings: ModelSection) -> str:
    """Return where the model is read from that is in no folder; ConfigError if it is nowhere."""
    name, manifest = settings.model, checkpoint.manifest
    was_folder = manifest.model_folder or f"{MODEL}: config.json" in manifest.inputs
    if was_folder:
        where = manifest.model_folder or "a folder that the checkpoint does not name"
        raise ConfigError(
            f"{str(checkpoint.path)!r} holds adapters alone, and the model that they belong to, "
            f"{name!r}, is not there any more (it was in {where}); bring it back, or call the "
            "export from the folder that training was started in"
        )
    location = locate_model(name)
    copy = look_on_hub(Kind.MODEL, name)
    if copy is not None:
        location = str(copy)
    with problems_of(f"model {name!r}", location=location):
        # The commit is known once its config is here.
        AutoConfig.from_pretrained(location, trust_remote_code=settings.trust_remote_code)
    if changed := _changes(checkpoint, name):
        raise _changed(checkpoint, f"model {name!r} on the Hub", changed)
    return location


def _changes(checkpoint: RunCheckpoint, model: str) -> list[str]:
    """Return one line for each file of `model` that is not what the run began with."""
    now = inputs_of(model, chat_template=None)
    return file_changes(_merged(checkpoint.manifest.inputs), _merged(now))


def _merged(inputs: Mapping[str, str]) -> dict[str, str]:
    of_model = {name: one for name, one in inputs.items() if name.startswith(f"{MODEL}: ")}
    return {name: one for name, one in of_model.items() if name.endswith(_MERGED)}


def _changed(checkpoint: RunCheckpoint, what: str, changes: list[str]) -> ConfigError:
    lines = "".join(f"\n  {line}" for line in changes)
    return ConfigError(
        f"{what} is not what the adapters in {str(checkpoint.path)!r} were trained on, so merged "
        f"weights would be neither; bring these files back:{lines}"
    )
