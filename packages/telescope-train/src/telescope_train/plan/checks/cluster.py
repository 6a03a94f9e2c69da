"""Check `[ray]`, `[inference]`, `[weights]`, and what one GPU for trainer and server needs."""

from collections.abc import Iterator

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import unknown_name
from telescope_train.config.fields import unused
from telescope_train.config.inference_section import AUTO_TRANSPORT, STORED, TRANSPORTS_GROUP
from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import Device, cpu_has_amx

_SETTINGS = {
    "--model": "model",
    "--host": "inference_host",
    "--port": "inference_base_port",
    "--dtype": "mixed_precision_dtype",
    "--max-num-seqs": "max_num_seqs",
    "--scheduling-policy": "vllm_scheduling_policy",
    "--chat-template": "chat_template",
    "--max-model-len": "max_model_len",
    "--tensor-parallel-size": "inference_tensor_parallel_size",
    "-tp": "inference_tensor_parallel_size",
    "--data-parallel-size": "inference_data_parallel_size",
    "-dp": "inference_data_parallel_size",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--otlp-traces-endpoint": "enable_vllm_tracing",
    "--trust-remote-code": "trust_remote_code",
    "--hf-overrides": "fp32_lm_head",
    "--quantization": "inference_quantization",
    "-q": "inference_quantization",
    "--quantization-config": "inference_quantization",
    "--enable-lora": "lora_transfer",
    "--weight-transfer-config": "weight_transport",
}
"""Arguments of vLLM that are settings of their own."""
_OWN = """
    --config --served-model-name --logprobs-mode --generation-config --enable-scale-out
    --middleware --disable-uvicorn-access-log --distributed-executor-backend --worker-extension-cls
    --max-lora-rank --max-loras --max-cpu-loras --lora-dtype --lora-modules --api-key --uds
    --ssl-keyfile --ssl-certfile --root-path --headless --api-server-count --nnodes --node-rank
    --master-addr --master-port --pipeline-parallel-size -pp
    --data-parallel-rank --data-parallel-address --data-parallel-rpc-port --data-parallel-backend
    --data-parallel-size-local --data-parallel-hybrid-lb --data-parallel-external-lb
    --enable-elastic-ep
"""
RESERVED_ARGUMENTS = frozenset({*_OWN.split(), *_SETTINGS})
"""Those, and arguments that Telescope needs as it sets them or that change what a server is."""


def cluster_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem with places of processes and arguments of servers."""
    if config.ray.ray_address is None:
        yield from _own_cluster_problems(config)
    else:
        yield from _joined_cluster_problems(config)
    if not _places_environments(config):
        yield from unused(
            config.ray,
            "ray.ray_environment_cpus_per_worker",
            "while environments are played on this machine; set ray_environment_placement, or "
            "remove it",
        )
    yield from _argument_problems(config)


def _own_cluster_problems(config: TrainConfig) -> Iterator[str]:
    for name in ("ray_inference_placement_strategy", "ray_trainer_placement_strategy"):
        yield from unused(
            config.ray,
            f"ray.{name}",
            "without ray_address: a cluster of the run's own is one node; set ray_address, or "
            "remove it",
            holds=("PACK", "STRICT_PACK"),
        )
    if _places_environments(config):
        yield (
            "ray.ray_environment_placement has no effect without ray_address: a cluster of the "
            "run's own is this machine; set ray_address, or use 'driver'"
        )


def _joined_cluster_problems(config: TrainConfig) -> Iterator[str]:
    host = config.inference.inference_host
    if host is not None and _is_loopback(host):
        yield (
            f"inference.inference_host ({host}) cannot be reached from other nodes of the cluster "
            "at ray_address; leave it out, so that each server takes the address of its node"
        )
    if not _places_environments(config):
        return
    if config.rollout.env_isolation == "none":
        yield (
            "ray.ray_environment_placement has no effect with env_isolation = 'none', which plays "
            "environments in the driver; remove one"
        )
    gateway = config.inference.gateway_host
    if gateway is not None and _is_loopback(gateway):
        yield (
            f"inference.gateway_host ({gateway}) cannot be reached from environments on other "
            "nodes; leave it out, or give the address that this machine has in the cluster"
        )


def _argument_problems(config: TrainConfig) -> Iterator[str]:
    given = config.inference.vllm_arguments
    if given and not given[0].startswith("-"):
        yield (
            f"inference.vllm_arguments must begin with an option such as '--kv-cache-dtype', got "
            f"{given[0]!r}; write each word as an item of its own"
        )
    for word in given:
        if not word.startswith("-"):
            continue
        # vLLM takes underscores for hyphens, and the beginning of a name for the name.
        option = word.partition("=")[0].replace("_", "-")
        option = option.lower() if option.startswith("--") else option
        known = next((one for one in sorted(RESERVED_ARGUMENTS) if _means(option, one)), None)
        if known is None:
            continue
        setting = _SETTINGS.get(known)
        instead = f"set {setting}" if setting else "remove it"
        yield (
            f"inference.vllm_arguments: {word!r} is an argument that Telescope sets itself; "
            f"{instead}"
        )


def _means(option: str, known: str) -> bool:
    return option == known or (len(option) > 3 and known.startswith(option))


def _places_environments(config: TrainConfig) -> bool:
    return config.ray.ray_environment_placement != "driver"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def weights_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[weights]` on any machine."""
    section = config.weights
    name = section.weight_transport
    known = entry_points(group=TRANSPORTS_GROUP).names
    if name != AUTO_TRANSPORT and name not in known:
        yield str(unknown_name("weight_transport", name, (AUTO_TRANSPORT, *sorted(known))))
    if name == "ipc" and not config.inference.shares_gpu:
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
    section, kind = config.weights, config.inference.inference_quantization
    if kind != "none" and not cpu_has_amx():
        yield (
            f"inference.inference_quantization = {kind!r} needs a GPU, or a CPU with AMX, whose "
            "products of 8 bits vLLM uses; this machine has neither: remove it"
        )
    elif kind != "none" and config.model.mixed_precision_dtype is None:
        yield (
            f"inference.inference_quantization = {kind!r} needs layers in bfloat16, and without a "
            "GPU they are in float32; set mixed_precision_dtype = 'bfloat16'"
        )
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
    if config.inference.shares_gpu:
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
    if not inference.shares_gpu:
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
