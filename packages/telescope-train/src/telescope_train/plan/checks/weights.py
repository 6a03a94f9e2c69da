"""Check the settings of `[weights]`, and those for one GPU shared by trainer and server."""

from collections.abc import Iterator
from importlib.metadata import entry_points

from telescope_core.base.errors import unknown_name
from telescope_train.config.fields import unused
from telescope_train.config.schema import TrainConfig
from telescope_train.config.weights_section import AUTO_TRANSPORT, STORED, TRANSPORTS_GROUP
from telescope_train.models.device import Device


def weights_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[weights]` on any machine."""
    section = config.weights
    name = section.weight_transport
    known = entry_points(group=TRANSPORTS_GROUP).names
    if name != AUTO_TRANSPORT and name not in known:
        yield str(unknown_name("weight_transport", name, (AUTO_TRANSPORT, *sorted(known))))
    if name == "ipc" and config.inference.colocate in (False, "auto"):
        yield (
            "weights.weight_transport = 'ipc' works inside one GPU, which trainer and server share "
            "with colocate = true or 'resident'; set it, or use 'auto'"
        )
    if section.weight_broadcast_staging != "none" and name in STORED:
        yield (
            f"weights.weight_broadcast_staging has no effect with weight_transport = {name!r}: "
            "weights are in files before servers pause; remove it"
        )
    backend = config.trainer.train_backend
    if backend != "megatron":
        yield from unused(
            section,
            "weights.weight_broadcast_free_grad_buffers",
            f"with train_backend = {backend!r}, which frees gradients after each step; remove it",
        )


def weights_device_problems(config: TrainConfig, device: Device) -> Iterator[str]:
    """Yield a message for each problem on `device` with weight transfers or a shared GPU."""
    if device == "cuda":
        return
    section = config.weights
    if section.weight_transport in ("nccl", "ipc"):
        yield (
            f"weights.weight_transport = {section.weight_transport!r} needs a GPU, and this "
            "machine has none; use 'auto', 'gloo' or 'disk'"
        )
    if section.weight_broadcast_staging == "pinned":
        yield (
            "weights.weight_broadcast_staging = 'pinned' is for a GPU, which would read from it, "
            "and this machine has none; use 'pageable'"
        )
    if config.inference.colocate:
        yield (
            "inference.colocate shares a GPU between trainer and server, and this machine has "
            "none: on CPU both run beside each other anyway, and a vLLM that sleeps there frees "
            "nothing; remove it"
        )


def colocation_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each setting that does not fit a GPU shared by trainer and server."""
    inference = config.inference
    if inference.colocate in (False, "resident"):
        yield from unused(
            inference,
            "inference.colocate_sleep_level",
            "without colocate = true: servers sleep only where they take turns with the trainer; "
            "set that, or remove it",
        )
    if inference.colocate in (False, "auto"):
        return
    if inference.colocate is True and config.scheduling.max_async_rollout:
        yield (
            f"scheduling.max_async_rollout must be 0 with colocate = true, got "
            f"{config.scheduling.max_async_rollout}: trainer and server take turns on one GPU; set "
            "max_async_rollout = 0, or colocate = 'resident' if both fit"
        )
    for where, value, expected in (
        ("trainer.trainer_num_workers", config.trainer.trainer_num_workers, 1),
        ("inference.inference_num_workers", inference.inference_num_workers, 1),
        ("inference.inference_tensor_parallel_size", inference.inference_tensor_parallel_size, 1),
        ("inference.inference_data_parallel_size", inference.inference_data_parallel_size, 1),
    ):
        if value != expected:
            yield (
                f"{where} must be {expected} with colocate, got {value}: one trainer and one "
                f"server share one GPU; set {where.rpartition('.')[2]} = {expected}, or remove "
                "colocate"
            )
    if config.ray.ray_address is not None:
        yield (
            "inference.colocate uses a GPU of this machine, and ray_address places processes "
            "anywhere; remove one"
        )
    if config.weights.weight_transport == "nccl":
        yield (
            "weights.weight_transport = 'nccl' cannot connect two processes on one GPU, which "
            "colocate makes of trainer and server; use 'auto' or 'ipc'"
        )
    if inference.colocate_sleep_level == 2 and config.trainer.use_lora:
        yield (
            "inference.colocate_sleep_level = 2 forgets the weights of the server, and with "
            "use_lora only what is adapted is sent again; use 1, or remove it"
        )
