"""Export a checkpoint to a model in Hugging Face format, in one process, without Ray or servers.

The weights come from the distributed checkpoint, no matter how many ranks wrote it. Everything
else comes from the description that was saved beside them, so the original model is not needed.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.file_proofs import write_sums
from telescope_core.records.folders import whole_folder
from telescope_train.backends.distributed_checkpoint import reading
from telescope_train.backends.megatron.architecture import architecture_of
from telescope_train.backends.megatron.mapping import hugging_face_shapes
from telescope_train.backends.megatron.pretrained import read_weights as megatron_weights
from telescope_train.backends.megatron.pretrained import write_weights
from telescope_train.checkpoints.base_model import base_folders, find_base
from telescope_train.checkpoints.folders import (
    RunCheckpoint,
    by_exporting,
    removed,
    require_whole,
)
from telescope_train.config.schema import ModelSection, TrainerSection
from telescope_train.models.load import load_model, no_progress_bars, torch_dtype
from telescope_train.models.location import ADAPTER_FOLDER, require_replaceable
from telescope_train.models.lora import (
    adapter_weights,
    add_adapters,
    merged_weights,
    write_adapter,
)
from telescope_train.models.saving import save_model

_WEIGHTS = "model.lm."
"""Prefix of the names of the weights in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One exported model."""

    path: Path
    step: int
    """Number of steps that its training had taken."""
    num_parameters: int
    """Number of values in the exported weights."""
    num_files: int
    """Number of files that hold weights."""


def export_checkpoint(
    checkpoint: RunCheckpoint,
    output: Path,
    *,
    dtype: str | None,
    max_shard_size: str,
    tell: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write the model of `checkpoint` to `output`, completely or not at all.

    Raises ConfigError, before anything is written, if a file has changed since it was saved, and
    RemovedCheckpointError if the checkpoint is removed before all of it was read.

    `dtype`: type of the written weights; None = as they were trained. `max_shard_size`: largest
    size of one file of weights, such as "5GB". A model that is already in `output` is replaced,
    unless the run of the checkpoint began with it. `tell` gets a line if adapters are merged into a
    model that is not where it was.
    """
    require_replaceable(output)
    _require_expendable(output, checkpoint)
    require_whole(checkpoint, by_exporting)
    with _unless_removed(checkpoint, output):
        return _export(checkpoint, output, dtype, max_shard_size=max_shard_size, tell=tell)


@contextmanager
def _unless_removed(checkpoint: RunCheckpoint, output: Path) -> Generator[None]:
    """Raise RemovedCheckpointError if the block fails because its checkpoint was removed."""
    try:
        yield
    except (OSError, ValueError, TelescopeError) as error:
        if checkpoint.is_there():
            raise
        raise removed(checkpoint, by_exporting) from error
    finally:
        # Writers make the folders that they write to, also those that were just removed.
        if output.resolve().is_relative_to(checkpoint.path.resolve()) and not checkpoint.is_there():
            with suppress(OSError):
                output.parent.rmdir()


def _require_there(checkpoint: RunCheckpoint, output: Path) -> None:
    """Raise RemovedCheckpointError if `output` is in a checkpoint that is no longer there."""
    if output.resolve().is_relative_to(checkpoint.path.resolve()) and not checkpoint.is_there():
        raise removed(checkpoint, by_exporting)


def _export(
    checkpoint: RunCheckpoint,
    output: Path,
    dtype: str | None,
    *,
    max_shard_size: str,
    tell: Callable[[str], None],
) -> Exported:
    config = checkpoint.manifest.config
    settings = ModelSection.model_validate(config["model"])
    trainer = TrainerSection.model_validate(config["trainer"])
    wanted = torch_dtype(dtype or settings.model_dtype)
    if trainer.train_backend == "megatron":
        return _export_megatron(checkpoint, output, wanted, max_shard_size=max_shard_size)
    base = find_base(checkpoint, settings, tell) if trainer.use_lora else None
    with whole_folder(output) as partial:
        weights = read_weights(checkpoint.state_path)
        if trainer.use_lora:
            lm = load_model(
                settings.model,
                dtype=settings.model_dtype,
                trust_remote_code=settings.trust_remote_code,
                location=base,
            ).model
            named = base if base is not None and base_folders(checkpoint) else settings.model
            add_adapters(lm, trainer, model_name=named)
            folder = partial / ADAPTER_FOLDER
            weights = _merge(weights, lm, settings, adapter_folder=folder, dtype=wanted)
        weights = {name: value.to(wanted) for name, value in weights.items()}
        model = _model_with(weights, checkpoint, wanted)
        for path in checkpoint.model_path.iterdir():
            shutil.copyfile(path, partial / path.name)
        with no_progress_bars():
            save_model(model, partial, max_shard_size=max_shard_size)
        kept = checkpoint.model_path / "generation_config.json"
        if kept.is_file():
            shutil.copyfile(kept, partial / kept.name)
        write_sums(partial, "*.safetensors")
        _require_there(checkpoint, output)
    return Exported(
        path=output,
        step=checkpoint.step,
        num_parameters=model.num_parameters(),
        num_files=len(list(output.glob("*.safetensors"))),
    )


def _require_expendable(output: Path, checkpoint: RunCheckpoint) -> None:
    """Raise ConfigError if `output` holds what the run or the checkpoint itself needs."""
    needed = [
        *(("the model that the run began with", folder) for folder in base_folders(checkpoint)),
        ("the state of the checkpoint", checkpoint.state_path),
        ("the description of the model in the checkpoint", checkpoint.model_path),
    ]
    for what, folder in needed:
        if folder.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"{str(output)!r} holds {what}, which the export would replace; name another folder"
            )


def _export_megatron(
    checkpoint: RunCheckpoint, output: Path, dtype: torch.dtype, *, max_shard_size: str
) -> Exported:
    """Convert the weights and write them one file at a time; they are never all in memory."""
    trust = bool(checkpoint.manifest.config["model"]["trust_remote_code"])
    config = AutoConfig.from_pretrained(checkpoint.model_path, trust_remote_code=trust)
    architecture = architecture_of(config)
    shapes = hugging_face_shapes(architecture)
    with whole_folder(output) as partial:
        for path in checkpoint.model_path.iterdir():
            shutil.copyfile(path, partial / path.name)
        config.dtype = dtype
        config.save_pretrained(partial)
        num_files = write_weights(
            partial,
            megatron_weights(checkpoint.state_path, architecture),
            shapes=shapes,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )
        write_sums(partial, "*.safetensors")
        _require_there(checkpoint, output)
    return Exported(
        path=output,
        step=checkpoint.step,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        num_files=num_files,
    )


def read_weights(state_path: Path) -> dict[str, Tensor]:
    """Return the saved weights of all ranks, as whole CPU tensors with Hugging Face names."""
    reader = FileSystemReader(state_path)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(_WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(), reading(state_path):
        warnings.filterwarnings("ignore", message=".*load in a single process")  # what is meant
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(_WEIGHTS): value for name, value in state.items()}


def push(
    folder: Path,
    repository: str,
    *,
    token: str,
    is_private: bool,
    message: str,
) -> str:
    """Upload `folder` to the Hub as one commit of model `repository`; returns the commit's URL."""
    api = HfApi(token=token)
    try:
        created = api.create_repo(repository, private=is_private, exist_ok=True)
        done = api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=message
        )
    except HFValidationError as error:
        raise ConfigError(f"--push takes owner/name, got {repository!r}: {error}") from error
    # HTTPError belongs to the HTTP client that the library uses, whose lost connections are not
    # OSErrors.
    except (HTTPError, OSError) as error:
        why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise TelescopeError(
            f"{repository!r} could not be written on {api.endpoint}: {why}; the export "
            f"in {folder} is complete; check that the token may write there, and push again"
        ) from error
    return done.commit_url


def hub_token() -> str:
    """Return the token of this machine's user; raises ConfigError if there is none."""
    token = get_token()
    if token is None:
        raise ConfigError(
            "pushing needs a token of the Hugging Face Hub with write access, and none was found; "
            "set HF_TOKEN, or run: hf auth login"
        )
    return token


def _merge(
    adapters: dict[str, Tensor],
    lm: PreTrainedModel,
    settings: ModelSection,
    *,
    adapter_folder: Path,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the weights of the base model `lm` with the adapters merged into them.

    A checkpoint of adapters holds nothing else. The adapters alone are written as well.
    """
    left = lm.load_state_dict(adapters, strict=False)
    missing = [name for name in left.missing_keys if ".lora_" in name]
    if missing or left.unexpected_keys:
        raise ConfigError(
            f"the adapters do not fit model {settings.model!r}: missing {missing[:3]}, "
            f"unknown {left.unexpected_keys[:3]}; restore the model that they were trained on"
        )
    write_adapter(adapter_folder, lm, dict(adapter_weights(lm, _itself)))
    return {name: value.detach() for name, value in merged_weights(lm, _itself, dtype)}


def _itself(value: Tensor) -> Tensor:
    return value


def _model_with(
    weights: Mapping[str, Tensor], checkpoint: RunCheckpoint, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model of the checkpoint with `weights`, which are not copied."""
    trust = bool(checkpoint.manifest.config["model"]["trust_remote_code"])
    config = AutoConfig.from_pretrained(checkpoint.model_path, trust_remote_code=trust)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    left = model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, value in model.named_parameters() if value.is_meta]
    if empty or left.unexpected_keys:
        raise ConfigError(
            f"{str(checkpoint.path)!r} does not fit the model it describes: missing "
            f"{empty[:3] or 'nothing'}, unknown {list(left.unexpected_keys)[:3] or 'nothing'}"
        )
    return model
