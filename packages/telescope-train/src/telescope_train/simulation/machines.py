"""Estimate the speed of a GPU in sampling and training a model, from data sheets.

Decoding reads every weight once per step, so memory bandwidth limits it; prefill and training are
limited by FLOP/s. The shares of the peak that are reached are rough means of public reports. For
better numbers, measure one server and one rank, and give what you measured.
"""

from dataclasses import dataclass
from typing import NamedTuple

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_train.models.facts import ModelFacts
from telescope_train.simulation.engine import EngineSpeed
from telescope_train.simulation.servers import ServerTimes
from telescope_train.simulation.trainer import TrainerSpeed
from telescope_train.step.throughput import PEAK_FLOPS

BANDWIDTH_SHARE, PREFILL_SHARE, TRAINING_SHARE, MEMORY_SHARE = 0.7, 0.5, 0.4, 0.9
"""Achieved share of the peak: bandwidth in decoding, FLOP/s in prefill and training, memory."""
LAUNCH_S = 0.002
"""Seconds of a decode step independent of bandwidth."""
NETWORK_BYTES_PER_S = 25e9
"""Bandwidth between two machines, for weights."""
_BYTES = 2
"""Bytes of a weight and of a value in the key-value cache: bfloat16."""
_OPTIMIZER_BYTES = 16
"""Bytes per parameter in an optimizer step: float32 weights, gradients, moments."""


class Gpu(NamedTuple):
    """A GPU by its data sheet."""

    bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""


GPUS = {
    "B200": Gpu(8000e9, 180e9),
    "H200": Gpu(4800e9, 141e9),
    "H100": Gpu(3350e9, 80e9),
    "A100": Gpu(2039e9, 80e9),
    "L40S": Gpu(864e9, 48e9),
    "L4": Gpu(300e9, 24e9),
    "A10": Gpu(600e9, 24e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of machines for a simulation."""

    engine: EngineSpeed
    servers: ServerTimes
    trainer: TrainerSpeed


def estimated_speeds(
    facts: ModelFacts, gpu: str, *, gpus_per_server: int, num_ranks: int, slots: int
) -> Speeds:
    """Return estimated speeds of servers and ranks for a model on a kind of GPU.

    `slots` is the most requests of one server. Raises ConfigError for an unknown GPU, or a model
    that does not fit.
    """
    if gpu not in GPUS:
        raise unknown_name("GPU", gpu, GPUS)
    parameters, kv_values = facts.num_parameters, facts.kv_values_per_token
    if parameters is None or kv_values is None:
        raise ConfigError(
            "the size of the model is not known: its config.json is not on this machine, or of "
            "another kind; give its number of parameters, such as --parameters 8B"
        )
    one, peak = GPUS[gpu], PEAK_FLOPS[gpu]
    weight_bytes, kv_bytes = parameters * _BYTES, kv_values * _BYTES
    cache_bytes = one.memory * gpus_per_server * MEMORY_SHARE - weight_bytes
    if cache_bytes < kv_bytes * 1024:
        raise ConfigError(
            f"{round(parameters / 1e9, 1):,g}B parameters take {weight_bytes / 2**30:,.0f} GiB, "
            f"which leaves no room for a cache on {gpus_per_server} x {gpu}; give each "
            "server more GPUs with --tensor-parallel"
        )
    bandwidth = one.bandwidth * gpus_per_server * BANDWIDTH_SHARE
    prefill = peak * gpus_per_server * PREFILL_SHARE / (2 * parameters)
    send_s = weight_bytes / NETWORK_BYTES_PER_S
    return Speeds(
        engine=EngineSpeed(
            slots=slots,
            cache_tokens=int(cache_bytes / kv_bytes),
            step_s=weight_bytes / bandwidth + LAUNCH_S,
            step_per_request_s=1 / prefill,
            step_per_cached_token_s=kv_bytes / bandwidth,
            prefill_tokens_per_s=prefill,
        ),
        servers=ServerTimes(transfer_s=send_s),
        trainer=TrainerSpeed(
            tokens_per_s=peak * TRAINING_SHARE / (6 * parameters),
            hidden_size=facts.hidden_size or 4096,
            optimizer_s=parameters * _OPTIMIZER_BYTES / (num_ranks * one.bandwidth),
            send_s=send_s,
        ),
    )


def facts_by_size(num_parameters: float) -> ModelFacts:
    """Return facts for a dense model of which only the size is known.

    The cache per token is computed from an 8B model with grouped attention, scaled with the square
    root of the size, because models grow in width and in depth.
    """
    return ModelFacts(
        num_parameters=int(num_parameters),
        vocab_size=None,
        max_positions=None,
        kv_values_per_token=int(65_536 * (num_parameters / 8e9) ** 0.5),
        hidden_size=int(4096 * (num_parameters / 8e9) ** (1 / 3)),
    )
