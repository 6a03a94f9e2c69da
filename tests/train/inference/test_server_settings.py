"""What a run's settings say about servers, in the commands that start them."""

from pathlib import Path
from typing import Any

import pytest

from telescope_train.config.schema import TrainConfig
from telescope_train.inference.fleet import server_settings


def arguments(**inference: Any) -> list[str]:
    """Return the command line of a run's first server."""
    config = TrainConfig.model_validate(
        {
            "run": {"name": "one", "number_of_steps": 1},
            "model": {"model": "/models/one"},
            "environments": [{"name": "countdown"}],
            "inference": inference,
        }
    )
    first, *_ = server_settings(
        config, device="cpu", dtype="float32", max_model_len=256, log_folder=Path("logs")
    )
    return first.arguments()


def value_of(option: str, arguments: list[str]) -> str:
    return arguments[arguments.index(option) + 1]


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_the_order_of_requests_that_wait_is_given(policy):
    found = arguments(vllm_scheduling_policy=policy)
    assert value_of("--scheduling-policy", found) == policy


def test_later_turns_go_first_unless_told_otherwise():
    assert value_of("--scheduling-policy", arguments()) == "priority"


def test_a_server_that_is_lost_before_it_has_an_address_is_named():
    config = TrainConfig.model_validate(
        {
            "run": {"name": "one", "number_of_steps": 1},
            "model": {"model": "/models/one"},
            "environments": [{"name": "countdown"}],
            "inference": {"inference_num_workers": 2},
            "ray": {"ray_address": "10.0.0.1:6379"},
        }
    )
    _, second = server_settings(
        config, device="cpu", dtype="float32", max_model_len=256, log_folder=Path("logs")
    )
    assert second.base_url == "http://server-1-not-placed:8101"
