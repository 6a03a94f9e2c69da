"""Check which settings of `[observability]` fit together."""

from collections.abc import Iterator

from telescope_core.base.errors import ConfigError
from telescope_train.config.fields import unused
from telescope_train.config.schema import TrainConfig
from telescope_train.observability.trackers.tracker import load_tracker, names_in_use

_NEEDS = {
    "prometheus_host": "prometheus_port",
    "wandb_project": "use_wandb",
    "wandb_tags": "use_wandb",
    "wandb_upload_logs": "use_wandb",
    "wandb_upload_logs_detailed": "use_wandb",
    "wandb_upload_logs_stdout": "use_wandb",
}
"""Setting -> the setting without which it has no effect."""


def observability_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[observability]`, and with traces of servers."""
    section = config.observability
    for name, needed in _NEEDS.items():
        value = getattr(section, needed)
        if value is None or value is False:
            # It is on by default, and off says what is so: nothing is uploaded.
            holds = (True, False) if name == "wandb_upload_logs" else None
            why = f"without {needed}; set {needed}, or remove {name}"
            yield from unused(section, f"observability.{name}", why, holds=holds)
    if not config.inference.enable_vllm_tracing:
        yield from unused(
            config.inference,
            "inference.otlp_receiver_port",
            "without enable_vllm_tracing; set enable_vllm_tracing = true, or remove "
            "otlp_receiver_port",
        )
    asked = {"wandb": section.use_wandb, "tensorboard": section.use_tensorboard}
    for name in names_in_use(asked, section.trackers):
        try:
            load_tracker(name)
        except ConfigError as error:
            yield f"observability: {error}"
