"""Where routing replay is refused, and what a server is started with where it is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_train.inference.fleet import server_settings
from telescope_train.models.facts import UNKNOWN_FACTS
from telescope_train.plan.checks.trainer import routing_device_problems, routing_model_problems
from telescope_train.plan.load import load_train_config

FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m", "--routing_replay", "true"]
ENVIRONMENTS = ["--environments", '[{"name": "a"}]']


def config(*more: str):
    return load_train_config([], [*FLAGS, *ENVIRONMENTS, *more])


def test_servers_on_a_cpu_cannot_say_how_they_routed():
    (said,) = routing_device_problems(config(), "cpu")
    assert "needs servers on GPUs" in said
    assert not list(routing_device_problems(config(), "cuda"))
    assert not list(routing_device_problems(config("--routing_replay", "false"), "cpu"))


def test_a_dense_model_has_no_routes():
    dense = replace(UNKNOWN_FACTS, num_layers=2)
    (said,) = routing_model_problems(config(), dense)
    assert "is no mixture of experts" in said
    assert not list(routing_model_problems(config(), replace(dense, num_experts=4)))
    assert not list(routing_model_problems(config(), UNKNOWN_FACTS))


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [("compile", "true", "false"), ("train_backend", "megatron", "fsdp")],
)
def test_what_does_not_go_with_it_is_refused(name, value, works):
    with pytest.raises(ConfigError, match=f"routing_replay.*{name}"):
        config(f"--{name}", value)
    assert config(f"--{name}", works).trainer.routing_replay


def test_servers_are_told_to_return_routes():
    for given in (config(), config("--routing_replay", "false")):
        (settings,) = server_settings(
            given, device="cuda", dtype="bfloat16", max_model_len=64, log_folder=Path("logs")
        )
        is_on = given.trainer.routing_replay
        runner = settings.environment().get("VLLM_USE_V2_MODEL_RUNNER")
        returned = [one for one in settings.arguments() if "routed" in one]
        assert returned == (["--enable-return-routed-experts"] if is_on else [])
        assert (runner == "1") == is_on
