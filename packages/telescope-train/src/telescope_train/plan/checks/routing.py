"""Check the conditions of `routing_replay`: other settings, the model and the device."""

from collections.abc import Iterator

from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import Device
from telescope_train.models.facts import ModelFacts


def routing_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each setting that does not fit it."""
    trainer = config.trainer
    if not trainer.routing_replay:
        return
    if trainer.train_backend != "fsdp":
        yield (
            "trainer.routing_replay is for train_backend = 'fsdp', and this is "
            f"{trainer.train_backend!r}, which routes tokens by itself; remove one of them"
        )
    if trainer.compile:
        yield (
            "trainer.routing_replay changes what routers do from one packed sequence to the next, "
            "and trainer.compile would compile layers anew for each; remove one of them"
        )


def routing_model_problems(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    """Yield why the model has no routes to replay."""
    if config.trainer.routing_replay and facts.num_layers is not None and not facts.num_experts:
        yield (
            f"trainer.routing_replay has no effect: {config.model.model!r} is no mixture of "
            "experts; remove it"
        )


def routing_device_problems(config: TrainConfig, device: Device) -> Iterator[str]:
    """Yield why servers on `device` cannot report their routes."""
    if config.trainer.routing_replay and device == "cpu":
        yield (
            "trainer.routing_replay needs servers on GPUs: of vLLM's model runners, the one for "
            "CPU does not return which experts it chose; remove it"
        )
