"""The settings of `[inference]` and `[weights]`: the servers, and how new weights reach them."""

from typing import Annotated, Literal

from pydantic import Field

from telescope_train.config.fields import Count, Host, Index, Port, Positive, Section

LOOPBACK = "127.0.0.1"
"""Address at which the servers of a run with its own Ray listen."""


class InferenceSection(Section):
    """The vLLM servers that sample rollouts."""

    inference_num_workers: Count = 1
    """Number of servers; each one takes `inference_tensor_parallel_size` times
    `inference_data_parallel_size` GPUs of one node, if there are GPUs."""
    opponent_num_servers: Index = 0
    """Number of the `inference_num_workers` servers that hold older versions of the policy, one
    each, for matches whose `opponents` have `older_version`. 0 = none, and no match can have
    them."""
    opponent_update_every: Count = 10
    """Steps after which the server with the oldest of these versions gets the present one."""
    inference_tensor_parallel_size: Count = 1
    """GPUs, or processes on CPU, that compute one model together."""
    inference_data_parallel_size: Count = 1
    """Copies of the model behind the address of one server, which share its requests."""
    inference_host: Host | None = None
    """Address on which the servers listen, IPv4 or IPv6 (`::1`); null = 127.0.0.1, or with
    `ray_address` the address that each server's own node has in the cluster. On every address they
    answer only who shows the secret of the run."""
    inference_base_port: Port = 8100
    """Port of the first server; the others take the ports after it. A server whose port is taken
    takes a later one, unless this is set: then the run does not start, and says which process has
    the port."""
    inference_startup_timeout_s: Positive = 300.0
    """Seconds that a starting server may stay silent, in its log and to health checks, before the
    run gives up on it."""
    inference_progress_timeout_s: Positive = 120.0
    """Seconds in which the engine of an inference server ends no step and sends no token, after
    which the server is ended and started again. Weight updates do not count. Its requests go on at
    the other servers."""
    gateway_host: Host | None = None
    """Address of this machine at which programs that environments start reach the model; null =
    127.0.0.1, or with environments on other nodes the address that this machine has in the
    cluster."""
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at `gateway_host`; 0 = a free one."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM may use; not set, and with the trainer resident on the same
    GPU, it is what all requests can fill, at most what the trainer leaves. Has no meaning without a
    GPU."""
    max_model_len: Count | None = None
    """Most tokens of prompt and answer together; null = the smaller of `seq_len` and the model's
    own limit."""
    max_num_seqs: Count = 256
    """Requests that one server works on at a time."""
    inference_quantization: Literal["none", "fp8"] = "none"
    """Type in which servers multiply the matrices of layers: `fp8` = 8 bits, to which they round
    the weights that they get. Needs layers in bfloat16, a GPU or a CPU with AMX, and a correction
    such as `use_tis`, which is then on where it is null."""
    colocate: bool | Literal["resident", "auto"] = "auto"
    """Let one trainer process and one server share a GPU: `true` = the server sleeps while the
    trainer works (`max_async_rollout = 0`), `resident` = both keep their memory and work at the
    same time, `auto` = each its own GPU if there are two, else resident if both fit, else taking
    turns."""
    colocate_sleep_level: Literal[1, 2] | None = None
    """Weights of a sleeping server: 1 = they are kept in CPU memory, 2 = they are discarded,
    because the server gets new ones anyway; null = 2, or 1 with `use_lora`."""
    vllm_scheduling_policy: Literal["priority", "fcfs"] = "priority"
    """Order of waiting requests: `priority` = first that of the rollout with the most turns so far,
    so that rollouts end soon; among equals that of the oldest batch; evaluations last, `fcfs` = in
    the order of arrival."""
    vllm_arguments: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further arguments of vLLM's command line, such as `["--kv-cache-dtype", "fp8"]` or
    `["--max-num-batched-tokens", "8192"]`; those that Telescope sets itself are refused."""
    enable_vllm_tracing: bool = False
    """Servers send their traces to the driver: requests of others are recorded too."""
    otlp_receiver_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at `gateway_host` at which the driver takes traces; 0 = a free one."""

    @property
    def processes_per_server(self) -> int:
        """GPUs, or computing processes on CPU, of one server."""
        return self.inference_tensor_parallel_size * self.inference_data_parallel_size

    @property
    def shares_gpu(self) -> bool:
        """Whether trainer and server share a GPU; for `auto` only the plan knows."""
        return self.colocate in (True, "resident")


TRANSPORTS_GROUP = "telescope.weight_transports"
"""Entry points of transports; see `telescope_train.weights.transport`."""
AUTO_TRANSPORT = "auto"
STORED = ("disk",)
"""Transports of this package whose servers read files, at any time."""


class WeightsSection(Section):
    """The transfer of new weights to the servers."""

    weight_transport: str = "auto"
    """Name of an installed transport: `gloo` over TCP, `nccl` from GPU to GPU, `ipc` inside one
    GPU, `disk` through files in the run folder; `auto` = `ipc` in a shared GPU, else `nccl` with
    GPUs and `gloo` without."""
    weight_broadcast_bucket_mb: Index = 256
    """Most MiB that are sent at once; a larger tensor is sent by itself, and with 0 every tensor
    is. A transfer needs room for two of them in the trainer and one in each worker of a server."""
    weight_broadcast_staging: Literal["none", "pinned", "pageable"] = "none"
    """Gather all weights in the CPU memory of rank 0 before servers pause, so that they pause for
    the transfer alone: `pinned` = in page-locked memory, from which a GPU reads faster, `pageable`
    = where the machine does not allow that, `none` = no."""
    weight_broadcast_free_grad_buffers: bool = True
    """Free the gradient buffers while weights are gathered; with `train_backend = "megatron"`
    only."""
    lora_transfer: Literal["merged", "adapter"] = "merged"
    """Form of the weights for servers with `use_lora`: `merged` = the matrices with the adapter
    added, `adapter` = the adapter alone, which is far less to send, but slows sampling, and in
    bfloat16 its first small changes are lost."""
