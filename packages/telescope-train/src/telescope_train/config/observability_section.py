"""Records and displays of a run besides its metrics and rollouts."""

from typing import Annotated

from pydantic import Field

from telescope_train.config.fields import Host, Section


class ObservabilitySection(Section):
    """Meters, traces, and access to them."""

    system_metrics_collection_interval_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two readings of the meters of nodes, GPUs and inference servers; 0 = they are
    not read."""
    record_token_facts: bool = True
    """Write what the trainer finds of each token that it trains on beside the rollouts of the step:
    its log-prob, the entropy, and how hard it was pushed. It takes 5 to 8 bytes on disk per
    token."""
    track_gpu_events: bool = True
    """Time the parts of a step on a GPU by events in its stream, so that they are as long as they
    were there. Without, the timeline has no parts of a step on a GPU but those that wait for it."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port at which Prometheus finds metrics and meters; 0 = a free one, which is shown at the
    start; null = none."""
    prometheus_host: Host = "127.0.0.1"
    """Address of this machine at which Prometheus finds them: whoever reaches it can read them."""
    otlp_export_endpoint: Annotated[str, Field(pattern=r"^https?://.+")] | None = None
    """Collector that gets the spans of rollouts and model calls, and with `enable_vllm_tracing`
    those of servers, as OTLP over HTTP: its whole address, such as http://localhost:4318/v1/traces;
    null = none."""
    use_wandb: bool = False
    """Send metrics, settings, meters and some rollouts to Weights & Biases; offline with
    WANDB_MODE=offline."""
    wandb_project: Annotated[str, Field(min_length=1)] = "telescope"
    """Project there; the run is called there as it is here."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run there."""
    wandb_upload_logs: bool = True
    """With `use_wandb`: send the logs of all processes, compressed, every few minutes and at the
    end of the run, without debug messages."""
    wandb_upload_logs_detailed: bool = False
    """With `use_wandb`: write debug messages to the logs, as with `debug`, and send them too."""
    wandb_upload_logs_stdout: bool = False
    """With `use_wandb`: send what inference servers and environment workers print with the logs. It
    may hold what their code prints of rollouts."""
    use_tensorboard: bool = False
    """Write metrics, meters and some rollouts to `tensorboard` in the run folder."""
    trackers: tuple[str, ...] = ()
    """Further installed trackers, by the names of their entry points (`telescope.trackers`), such
    as trackio."""
