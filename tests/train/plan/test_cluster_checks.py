"""Settings of the cluster and of vLLM that would have no effect, or break a run, are refused."""

from pathlib import Path
from typing import Any

import pytest

from telescope_train.config.schema import TrainConfig
from telescope_train.inference.fleet import server_settings
from telescope_train.plan.checks.cluster import RESERVED_ARGUMENTS, cluster_problems
from telescope_train.plan.node_checks import Seen, Wanted, look_here, markers, node_problems

CLUSTER = {"ray_address": "10.0.0.1:6379"}


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run": {"name": "one", "number_of_steps": 1},
            "model": {"model": "/models/one"},
            "environments": [{"name": "countdown"}],
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"ray": {"ray_trainer_placement_strategy": "SPREAD"}}, "has no effect without ray_addr"),
        ({"ray": {"ray_inference_placement_strategy": "SPREAD"}}, "has no effect without ray_addr"),
        ({"ray": {"ray_environment_placement": "SPREAD"}}, "has no effect without ray_address"),
        ({"ray": {"ray_environment_cpus_per_worker": 2.0}}, "set ray_environment_placement"),
        ({"ray": CLUSTER, "inference": {"inference_host": "127.0.0.1"}}, "cannot be reached from"),
        (
            {
                "ray": {**CLUSTER, "ray_environment_placement": "SPREAD"},
                "inference": {"gateway_host": "localhost"},
            },
            "cannot be reached from environments on other nodes",
        ),
        (
            {
                "ray": {**CLUSTER, "ray_environment_placement": "SPREAD"},
                "rollout": {"env_isolation": "none"},
            },
            "has no effect with env_isolation = 'none'",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(sections, expected):
    (problem,) = cluster_problems(config(**sections))
    assert expected in problem


def test_a_cluster_takes_every_strategy():
    ray = {
        **CLUSTER,
        "ray_trainer_placement_strategy": "STRICT_PACK",
        "ray_inference_placement_strategy": "STRICT_SPREAD",
        "ray_environment_placement": "PACK",
        "ray_environment_cpus_per_worker": 0.5,
    }
    assert list(cluster_problems(config(ray=ray))) == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--max-model-len", "set max_model_len"),
        ("--max_model_len=32", "set max_model_len"),
        ("--max-model", "set max_model_len"),
        ("-tp", "set inference_tensor_parallel_size"),
        ("--api-key", "remove it"),
        ("--config", "remove it"),
    ],
)
def test_arguments_that_telescope_sets_are_refused_by_the_name_of_their_setting(argument, expected):
    found = config(inference={"vllm_arguments": [argument, "7"]})
    (problem,) = cluster_problems(found)
    assert repr(argument) in problem
    assert problem.endswith(expected)


def test_other_arguments_of_vllm_arrive():
    given = ["--kv-cache-dtype", "fp8", "--enforce-eager", "-O2", "--seed=3"]
    found = config(
        inference={
            "vllm_arguments": given,
            "inference_tensor_parallel_size": 4,
            "inference_data_parallel_size": 2,
        }
    )
    assert list(cluster_problems(found)) == []
    (server,) = server_settings(
        found, device="cuda", dtype="bfloat16", max_model_len=256, log_folder=Path("logs")
    )
    arguments = server.arguments()
    assert arguments[-len(given) :] == given
    for option, value in {
        "--tensor-parallel-size": "4",
        "--data-parallel-size": "2",
    }.items():
        assert arguments[arguments.index(option) + 1] == value


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_argument_of_a_server_is_refused_from_others(device):
    (server,) = server_settings(
        config(inference={"inference_tensor_parallel_size": 2}),
        device=device,
        dtype="bfloat16",
        max_model_len=256,
        log_folder=Path("logs"),
        traces_endpoint="http://127.0.0.1:1",
    )
    free = {"--enforce-eager", "--no-async-scheduling", "--block-size"}
    options = {one for one in server.arguments() if one.startswith("-") and one != "-m"}
    assert options - free <= RESERVED_ARGUMENTS


def test_a_group_shares_short_prompts_on_cpu_unless_blocks_of_another_size_are_asked_for():
    given = config(inference={"vllm_arguments": ["--block-size", "128"]})
    for device, sizes in {"cpu": ["32", "128"], "cuda": ["128"]}.items():
        (server,) = server_settings(
            given, device=device, dtype="float32", max_model_len=256, log_folder=Path("logs")
        )
        words = server.arguments()
        # vLLM takes the last one.
        found = [words[at + 1] for at, word in enumerate(words) if word == "--block-size"]
        assert found == sizes


def test_a_first_word_that_is_no_option_is_refused():
    (problem,) = cluster_problems(config(inference={"vllm_arguments": ["fp8"]}))
    assert "'fp8'" in problem
    allowed = config(inference={"vllm_arguments": ["--kv-cache-dtype", "fp8"]})
    assert list(cluster_problems(allowed)) == []


def test_a_node_sees_the_folders_that_it_shares_and_no_others(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with markers(tmp_path / "run", tmp_path / "checkpoints", str(model)) as wanted:
        seen = look_here(wanted)
        assert seen.shares_run
        assert seen.shares_checkpoints
        assert seen.has_model
        # Another machine may have a folder of that name, with a file of another run in it.
        Path(wanted.run_marker).write_text("of another run")
        (model / "config.json").unlink()
        other = look_here(wanted)
        assert not other.shares_run
        assert other.shares_checkpoints
        assert not other.has_model
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "checkpoints").exists()


def seen(**changes: Any) -> Seen:
    own = look_here(Wanted(model=None, run_marker="", checkpoint_marker="", text="x"))
    found = {
        "has_model": True,
        "has_reference": True,
        "shares_run": False,
        "shares_checkpoints": True,
        "has_cuda": True,
        "version": own.version,
    }
    return Seen(**(found | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"has_model": False}, ["node b has no model at /models/one"]),
        ({"has_reference": False}, ["node b would train and has no model at /models/two"]),
        ({"has_cuda": False}, ["node b has GPUs, but its torch computes on CPU only"]),
        ({"version": "9.9"}, ["node b has telescope-train 9.9, and this machine"]),
        ({"shares_checkpoints": False}, ["node b would train and does not share the folder"]),
    ],
)
def test_what_a_node_lacks_is_told_with_its_name(changes, expected):
    wanted = Wanted(
        **{"model": "/models/one", "reference": "/models/two", "text": "x"},
        **{"run_marker": "/runs/m", "checkpoint_marker": "/checkpoints/m"},
    )
    nodes = {"a": seen(shares_checkpoints=False), "b": seen(**changes), "c": seen(has_model=False)}
    problems = list(node_problems(nodes, wanted, servers={"a"}, ranks={"b"}, device="cuda"))
    assert len(problems) == len(expected)
    assert all(one.startswith(begin) for one, begin in zip(problems, expected, strict=True))


def test_a_node_that_does_not_answer_is_named():
    wanted = Wanted(model=None, run_marker="", checkpoint_marker="", text="x")
    wants = {"servers": {"a"}, "ranks": set(), "device": "cpu"}
    (problem,) = node_problems({}, wanted, **wants)
    assert problem.split()[:2] == ["node", "a"]
    assert list(node_problems({"a": seen()}, wanted, **wants)) == []
