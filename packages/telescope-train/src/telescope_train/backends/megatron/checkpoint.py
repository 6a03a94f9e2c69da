"""Checkpoints by megatron-core's dist_checkpointing, which any other layout can read.

Every rank calls every function, and `read` inside `library.using`. Beside the library's files a
folder holds `megatron.json` and the state of each rank's random generators.
"""

import pickle
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from telescope_core.base.errors import ConfigError
from telescope_core.records.files import read_json, write_json
from telescope_train.backends.distributed_checkpoint import (
    Saving,
    folder_of_all_ranks,
    reading,
    write_in_background,
)
from telescope_train.backends.megatron.library import using
from telescope_train.backends.megatron.optimizer import Stepper
from telescope_train.backends.progress import Progress, random_state, set_random_state

_FACTS = "megatron.json"
"""File for facts that the library's own files lack."""
_REFERENCE = "reference."
"""Beginning of the names of the reference model's tensors in the files."""
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathered in CPU memory by the rank that writes it, not by every rank on its GPU.
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
"""Format of the distributed optimizer's state that other numbers of ranks can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The objects whose state a checkpoint holds."""

    model: Any
    stepper: Stepper
    reference: Any | None
    """The reference model, if it has been updated."""
    is_distributed: bool
    """Whether the optimizer's state is divided over data-parallel ranks."""


def save(folder: Path, trained: Trained, progress: Progress, *, device: torch.device) -> None:
    """Write everything to `folder`, completely or not at all."""
    with folder_of_all_ranks(folder) as partial:
        start(partial, trained, progress, device=device, with_training_state=True).wait()


def start(
    folder: Path,
    trained: Trained,
    progress: Progress,
    *,
    device: torch.device,
    with_training_state: bool,
) -> Saving:
    """Copy the state, or only the weights, to CPU memory and write it in the background."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with using(device):
        saving = _start(folder, trained, progress, with_training_state=with_training_state)
    if with_training_state:
        path = folder / f"random-{dist.get_rank()}.pkl"
        path.write_bytes(pickle.dumps(random_state()))
    if dist.get_rank() == 0:
        facts = {
            "progress": asdict(progress) if with_training_state else None,
            "is_distributed": trained.is_distributed,
            "has_reference": trained.reference is not None,
        }
        write_json(folder / _FACTS, facts)
    return saving


def _start(
    folder: Path, trained: Trained, progress: Progress, *, with_training_state: bool
) -> Saving:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    started: list[Saving] = []

    class InThisProcess(strategies.TorchDistSaveShardedStrategy):
        """Saves in this process: the library starts processes, which needs one without threads."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, True
            )
            for parts in by_key.values():
                for part in parts:
                    # What was gathered is a copy already.
                    is_copy = trained.is_distributed and "optimizer.state." in part.key
                    if torch.is_tensor(part.data) and not is_copy:
                        # Training may change the tensors once this returns.
                        part.data = part.data.detach().to("cpu", copy=True)
            planner = strategies.MCoreSavePlanner(
                flatten_state_dict=False, dedup_replicated_tensors=False
            )
            state = strategies.mcore_to_pyt_state_dict(by_key, False)
            started.append(write_in_background(folder, state, planner))

    state = _state(trained, progress, with_training_state=with_training_state, is_loading=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = InThisProcess("torch_dist", 1)
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
    return started[0]


def read(folder: Path, trained: Trained) -> Progress:
    """Load a checkpoint into a rank of any layout; returns the progress."""
    from megatron.core import dist_checkpointing

    facts = _facts(folder)
    if facts["progress"] is None:
        raise ConfigError(
            f"{str(folder)!r} holds weights alone (checkpoint_save_training_state = false), so "
            "training cannot continue from it; use `telescope export`, and start from the export"
        )
    if facts["is_distributed"] != trained.is_distributed:
        raise ConfigError(
            f"{str(folder)!r} was written with megatron_use_distributed_optimizer = "
            f"{str(facts['is_distributed']).lower()}, and the optimizer's state has another form "
            "without; set it as it was"
        )
    progress = Progress(**facts["progress"])
    state = _state(trained, progress, with_training_state=True, is_loading=True)
    with warnings.catch_warnings(), reading(folder):
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(state, str(folder))
    trained.model.load_state_dict(loaded["model"])
    if "optimizer" in loaded:
        trained.stepper.load_state(loaded["optimizer"])
    if trained.reference is not None:
        trained.reference.load_state_dict(loaded["reference"])
    own = folder / f"random-{dist.get_rank()}.pkl"
    # A rank that did not exist then keeps the state that it was seeded with.
    if own.is_file():
        set_random_state(pickle.loads(own.read_bytes()))
    return progress


def has_reference(folder: Path) -> bool:
    """Return whether a checkpoint holds a reference model."""
    return bool(_facts(folder)["has_reference"])


def _facts(folder: Path) -> dict[str, Any]:
    facts = read_json(folder / _FACTS)
    if facts is None and not (folder / ".metadata").is_file():
        raise ConfigError(f"{str(folder)!r} holds no checkpoint; give the folder of one")
    if facts is None:
        raise ConfigError(
            f"expected a checkpoint of train_backend 'megatron' in {str(folder)!r}, which is of "
            "another backend; continue with the backend that wrote it"
        )
    return facts


def _state(
    trained: Trained, progress: Progress, *, with_training_state: bool, is_loading: bool
) -> dict[str, Any]:
    """Return the sharded state; without that of an optimizer that has taken no step."""
    metadata = {**_METADATA, "non_homogeneous_layers": True}
    state: dict[str, Any] = {"model": trained.model.sharded_state_dict(metadata=dict(metadata))}
    if not with_training_state:
        return state
    if progress.num_taken:
        if is_loading:
            trained.stepper.make_state()
        own: dict[Any, Any] = trained.stepper.optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=dict(metadata)
        )
        # Of several optimizers, each has a dictionary. A rank that gathered nothing has a None,
        # and the library would warn that rank 0 has none.
        for one in (own, *own.values()):
            if isinstance(one, dict) and one.get("param_state", one) is None:
                del one["param_state"]
        state["optimizer"] = own
    if trained.reference is not None:
        named = trained.reference.sharded_state_dict(prefix=_REFERENCE, metadata=dict(metadata))
        # The prefix tells its tensors from the policy's in the files; a model loads names without.
        state["reference"] = {
            name.removeprefix(_REFERENCE): tensor for name, tensor in named.items()
        }
    return state
