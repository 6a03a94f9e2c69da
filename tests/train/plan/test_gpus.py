"""What a run needs of GPUs: how many, how much memory, and what to change. Arithmetic alone."""

from typing import Any

import pytest
from tests.train.plan.models import LLAMA_70B, QWEN3

from telescope_core.errors import ConfigError
from telescope_train.config.fields import was_set
from telescope_train.models import device as device_module
from telescope_train.models.device import machine_gpus
from telescope_train.models.facts import facts_of
from telescope_train.plan.checks.cluster import weights_device_problems
from telescope_train.plan.gpus import (
    CONTEXT_BYTES,
    colocated,
    gpu_problems,
    num_gpus_needed,
    share_of_rank,
    shared_memory_note,
)
from telescope_train.plan.load import load_train_config
from telescope_train.plan.memory import (
    rank_memory,
    resident_bytes,
    server_memory,
    transfer_bytes,
)
from telescope_train.resources import transport_of
from telescope_train.step.stream_rules import needs_whole_batch

H100 = 80 * 10**9
FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m"]
FLAGS += ["--environments", '[{"name": "a"}]']
FACTS = facts_of(QWEN3["0.6B"])
SHARED = ["--colocate", "--max_async_rollout", "0"]


def config(*more: str) -> Any:
    return load_train_config([], [*FLAGS, *more])


def problems(size: str, *more: str, gpus: int = 1, gpu_bytes: int = H100) -> list[str]:
    facts = facts_of(QWEN3[size])
    return list(gpu_problems(config(*more), facts, 4096, [gpu_bytes] * gpus))


def test_one_gpu_is_too_few_and_the_message_says_how_to_share_it():
    (said,) = problems("0.6B", "--colocate", "false")
    assert "needs 2 GPUs" in said
    assert "this machine has 1" in said
    assert "colocate = 'auto'" in said
    assert problems("0.6B", gpus=2) == []


def test_every_server_and_every_rank_counts():
    many = ["--inference_num_workers", "3", "--trainer_num_workers", "4"]
    assert num_gpus_needed(config(*many)) == 7
    assert num_gpus_needed(config(*SHARED)) == 1
    (said,) = problems("0.6B", *many, gpus=4)
    assert "needs 7 GPUs" in said
    assert "lower trainer_num_workers or inference_num_workers" in said


def test_a_rank_that_does_not_fit_names_what_makes_it_smaller_one_after_another():
    (said,) = problems("8B", gpus=2)
    assert "trainer rank needs about" in said
    assert "adamw_bf16" in said
    (said,) = problems("8B", "--optimizer", "adamw_bf16", gpus=2)
    assert "fsdp_cpu_offload = true" in said
    assert problems("8B", "--fsdp_cpu_offload", gpus=2) == []
    assert problems("8B", "--trainer_num_workers", "4", gpus=5) == []


def decided_for(size: str, *more: str, gpus: int = 1, gpu_bytes: int = H100) -> Any:
    """Return the settings that a machine decides, which must fit it."""
    facts = facts_of(QWEN3[size])
    found = colocated(config(*more), facts, 4096, [gpu_bytes] * gpus)
    assert list(gpu_problems(found, facts, 4096, [gpu_bytes] * gpus)) == []
    return found


def test_the_machine_decides_how_trainer_and_server_share_a_gpu():
    assert decided_for("0.6B", gpus=2).inference.colocate is False
    found = decided_for("0.6B")
    assert found.inference.colocate == "resident"
    assert found.scheduling.max_async_rollout == 1
    # What the trainer leaves, and not the 0.9 of a server that is alone.
    rank = rank_memory(found, facts_of(QWEN3["0.6B"]), device="cuda")
    share = found.inference.gpu_memory_utilization
    assert rank.total_bytes + CONTEXT_BYTES + share * H100 <= H100
    assert rank.total_bytes + CONTEXT_BYTES + (share + 0.01) * H100 > H100
    # A model that is too large for both takes turns, which needs the whole batch first.
    little = ["--gpu_memory_utilization", "0.3"]
    turns = decided_for("1.7B", *little, gpu_bytes=38 * 10**9)
    assert turns.inference.colocate is True
    assert turns.scheduling.max_async_rollout == 0
    assert not was_set(turns.scheduling, "max_async_rollout")


def test_a_resident_server_takes_no_more_than_all_its_requests_can_fill():
    config_of_few, facts = (
        config("--colocate", "auto", "--max_num_seqs", "8"),
        facts_of(QWEN3["0.6B"]),
    )
    found = colocated(config_of_few, facts, 512, [H100])
    server = server_memory(found, facts, 512, device="cuda")
    assert server is not None
    share, needed = found.inference.gpu_memory_utilization, server.total_bytes + CONTEXT_BYTES
    assert needed <= share * H100 < needed + 0.01 * H100
    assert found.inference.colocate == "resident"
    # What a person sets holds.
    told = config("--colocate", "auto", "--max_num_seqs", "8", "--gpu_memory_utilization", "0.5")
    assert colocated(told, facts, 512, [H100]).inference.gpu_memory_utilization == 0.5


def test_without_a_gpu_or_with_several_ranks_nothing_is_shared():
    assert colocated(config("--colocate", "auto"), FACTS, 4096, []).inference.colocate is False
    several = config("--colocate", "auto", "--trainer_num_workers", "2")
    assert colocated(several, FACTS, 4096, [H100]).inference.colocate is False
    apart = config("--colocate", "auto", "--weight_transport", "nccl")
    assert colocated(apart, FACTS, 4096, [H100]).inference.colocate is False
    as_it_is = config(*SHARED)
    assert colocated(as_it_is, FACTS, 4096, [H100]) is as_it_is


def test_what_does_not_fit_together_says_what_to_change():
    resident = ["--colocate", "resident"]
    (said,) = problems("0.6B", *resident)
    assert "lower gpu_memory_utilization" in said, "0.9 for the server, unless the plan decides it"
    (said,) = problems("1.7B", *resident, gpu_bytes=38 * 10**9)
    assert "do not fit the GPU's 35.4 together; let them take turns with colocate = true" in said


def test_resident_processes_stream_gradients_and_never_sleep():
    resident = config("--colocate", "resident", "--max_async_rollout", "2")
    assert needs_whole_batch(resident) is None
    assert "take turns" in str(needs_whole_batch(config(*SHARED)))
    assert transport_of(resident, "cuda") == "ipc"
    assert num_gpus_needed(resident) == 1


def test_a_rank_beside_a_resident_server_leaves_its_share_while_it_is_down():
    resident = config("--colocate", "resident", "--gpu_memory_utilization", "0.3")
    assert share_of_rank(resident, [H100]) == pytest.approx(0.7 - CONTEXT_BYTES / H100)
    assert share_of_rank(resident, [0]) == share_of_rank(resident, []) == 0.7
    assert share_of_rank(config(*SHARED), [H100]) == 1.0
    assert share_of_rank(config("--colocate", "false"), [H100] * 2) == 1.0


def test_following_the_advice_for_one_gpu_ends_at_a_run_that_fits():
    (said,) = problems("1.7B", *SHARED)
    name = "gpu_memory_utilization"
    assert name in said
    share = said.rpartition("lower it to ")[2]
    assert problems("1.7B", *SHARED, f"--{name}", share) == []
    too_much = f"{float(share) + 0.02:g}"
    assert problems("1.7B", *SHARED, f"--{name}", too_much) != []


def test_the_advice_for_one_gpu_leaves_room_for_an_update_of_weights():
    """At its largest tensor there are four of it: rounded, sent, received and loaded."""
    facts, shared = facts_of(QWEN3["1.7B"]), config(*SHARED)
    embedding = 2 * 151936 * 2048
    assert transfer_bytes(shared, facts) == 4 * embedding
    adapters = config(*SHARED, "--use_lora")
    assert transfer_bytes(adapters, facts) == 4 * 256 * 2**20  # a bucket is larger than a layer
    (said,) = problems("1.7B", *SHARED)
    rank = rank_memory(shared, facts, device="cuda")
    assert rank is not None
    share = float(said.rpartition("lower it to ")[2])
    left = H100 - resident_bytes(shared, rank) - CONTEXT_BYTES - share * H100
    assert 0 <= left - 4 * embedding <= 0.01 * H100


def test_what_stays_on_the_gpu_beside_a_server_is_weights_and_moments():
    facts, shared = facts_of(QWEN3["1.7B"]), config(*SHARED)
    rank = rank_memory(shared, facts, device="cuda")
    assert rank is not None
    parameters = facts.num_parameters or 0
    assert resident_bytes(shared, rank) == 12 * parameters  # float32 weights, two moments
    offloaded = config(*SHARED, "--fsdp_cpu_offload")
    rank = rank_memory(offloaded, facts, device="cuda")
    assert rank is not None
    assert resident_bytes(offloaded, rank) == 0


def test_a_server_needs_its_weights_and_room_for_one_request():
    offloaded = "--fsdp_cpu_offload"
    small, large = (
        problems("32B", offloaded, gpus=2, gpu_bytes=size) for size in (48 * 10**9, H100)
    )
    assert [said for said in small if "server" in said]
    assert not [said for said in large if "server" in said]


def test_a_server_of_several_gpus_has_its_part_of_the_model_on_each():
    facts, trainer = facts_of(LLAMA_70B), ["--use_lora", "--trainer_num_workers", "4"]
    trainer += ["--model_dtype", "bfloat16"]

    def said_of(size: int, gpus: int) -> list[str]:
        found = config(*trainer, "--inference_tensor_parallel_size", str(size))
        return list(gpu_problems(found, facts, 4096, [H100] * gpus))

    (said,) = said_of(1, 5)
    assert "a server needs at least 134.7 GiB" in said
    assert "raise gpu_memory_utilization or inference_tensor_parallel_size, or lower" in said
    assert said_of(4, 8) == []
    (said,) = gpu_problems(
        config(*trainer, "--fsdp_cpu_offload", "--inference_tensor_parallel_size", "2"),
        facts,
        4096,
        [48 * 10**9] * 6,
    )
    assert "each of the 2 GPUs of a server needs at least 68.3 GiB" in said


@pytest.mark.parametrize(
    ("tensor", "data", "weights", "heads", "sequences"),
    [(1, 1, 1, 8, 128), (4, 1, 4, 2, 128), (16, 1, 16, 1, 128), (2, 4, 2, 4, 32)],
)
def test_what_a_server_divides_among_its_gpus(tensor, data, weights, heads, sequences):
    sizes = ["--inference_tensor_parallel_size", str(tensor)]
    sizes += ["--inference_data_parallel_size", str(data)]
    requests = ["--max_num_seqs", "256", "--max_concurrent_prompts_per_server", "8"]
    facts = facts_of(LLAMA_70B)
    server = server_memory(
        config(*sizes, *requests, "--group_size", "16"), facts, 10, device="cuda"
    )
    assert server is not None
    assert server.process == ("vLLM server" if tensor * data == 1 else "vLLM server, per GPU")
    assert facts.num_parameters is not None
    assert dict(server.parts) == {
        "weights": 2 * facts.num_parameters // weights,
        # Keys and values of 80 layers, in heads of 128 values, 2 bytes each.
        f"KV cache, {sequences} x 10 tokens": 2 * 80 * heads * 128 * 2 * sequences * 10,
    }


def test_the_parameter_counts_are_those_that_the_models_have():
    for size, billions in {
        "0.6B": 0.596,
        "1.7B": 1.72,
        "4B": 4.02,
        "8B": 8.19,
        "32B": 32.8,
    }.items():
        found = facts_of(QWEN3[size]).num_parameters
        assert found is not None
        assert found / 1e9 == pytest.approx(billions, rel=0.01)


def test_activations_grow_with_tokens_and_fall_with_checkpointing():
    facts = facts_of(QWEN3["4B"])

    def activations(*more: str) -> int:
        rank = rank_memory(config(*more), facts, device="cuda")
        assert rank is not None
        return dict(rank.parts)["activations"]

    full, kept = activations(), activations("--gradient_checkpointing", "false")
    assert 4 * full < kept
    assert full < activations("--gradient_checkpointing", "selective") < kept
    assert activations("--seq_len", "8192") == 2 * full


def test_on_a_cpu_one_gpu_for_all_is_refused_with_the_reason():
    (said,) = weights_device_problems(config(*SHARED), "cpu")
    assert "frees nothing" in said
    assert list(weights_device_problems(config(*SHARED), "cuda")) == []
    for name in ("nccl", "ipc"):
        flags = (
            [*SHARED, "--weight_transport", "ipc"]
            if name == "ipc"
            else ["--weight_transport", name]
        )
        assert any("needs a GPU" in one for one in weights_device_problems(config(*flags), "cpu"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--colocate"], "max_async_rollout must be 0 with colocate = true, got 1"),
        (["--colocate", "resident", "--inference_num_workers", "2"], "share one GPU"),
        (["--colocate", "resident", "--colocate_sleep_level", "1"], "take turns with the trainer"),
        (["--colocate", "auto", "--weight_transport", "ipc"], "colocate = true or 'resident'"),
        (["--colocate", "both"], "colocate"),
        ([*SHARED, "--trainer_num_workers", "2"], "trainer_num_workers must be 1 with colocate"),
        ([*SHARED, "--inference_num_workers", "2"], "inference_num_workers must be 1"),
        ([*SHARED, "--weight_transport", "nccl"], "cannot connect two processes on one GPU"),
        ([*SHARED, "--stream_gradients"], "take turns on the GPU"),
        ([*SHARED, "--use_lora", "--colocate_sleep_level", "2"], "forgets the weights"),
        (
            ["--colocate", "false", "--colocate_sleep_level", "1"],
            "has no effect without colocate = true",
        ),
        (["--weight_transport", "ipc"], "share with colocate = true"),
        (["--weight_transport", "disc"], "did you mean 'disk'"),
        (
            ["--weight_transport", "disk", "--weight_broadcast_staging", "pinned"],
            "weights are in files before servers pause",
        ),
        (
            ["--weight_broadcast_free_grad_buffers", "false"],
            "has no effect with train_backend = 'fsdp'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(more, expected):
    with pytest.raises(ConfigError) as caught:
        config(*more)
    assert expected in str(caught.value)


def test_the_transport_follows_from_where_processes_are():
    assert transport_of(config(), "cpu") == "gloo"
    assert transport_of(config(), "cuda") == "nccl"
    assert transport_of(config(*SHARED), "cuda") == "ipc"
    assert transport_of(config("--weight_transport", "disk"), "cuda") == "disk"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [(None, [80, 40, 80]), ("0", [80]), ("1,2", [40, 80]), ("GPU-1f,GPU-2a", [40, 40]), ("", [])],
)
def test_only_gpus_that_this_process_may_use_count(monkeypatch, tmp_path, shown, expected):
    for number in range(3):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(device_module, "DEVICES", tmp_path)
    monkeypatch.setattr(device_module, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(device_module, "_sizes_of_gpus", lambda: [80, 40, 80])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert machine_gpus() == expected


@pytest.mark.parametrize(
    ("flags", "has_note"),
    [
        ([], True),
        (["--weight_transport", "gloo"], False),
        (["--weight_transport", "gloo", "--trainer_num_workers", "2"], True),
        (["--weight_transport", "disk", "--inference_tensor_parallel_size", "2"], True),
        (SHARED, False),
    ],
)
def test_little_shared_memory_is_told_where_nccl_connects_gpus(flags, has_note):
    def note(size: int | None) -> str | None:
        return shared_memory_note(config(*flags), size)

    assert (note(64 * 2**20) is not None) is has_note
    assert not has_note or "/dev/shm has 64 MiB" in (note(64 * 2**20) or "")
    assert note(2**30) is None
    assert note(None) is None


def test_what_a_server_takes_is_what_its_parts_are():
    facts = facts_of(QWEN3["0.6B"])
    server = server_memory(config(), facts, 1000, device="cuda")
    assert server is not None
    assert dict(server.parts)["weights"] == 2 * (facts.num_parameters or 0)
    rounded = server_memory(config("--inference_quantization", "fp8"), facts, 1000, device="cuda")
    assert rounded is not None
    outside = 2 * (facts.vocab_size or 0) * (facts.hidden_size or 0)
    layers = (facts.num_parameters or 0) - outside
    assert dict(rounded.parts)["weights"] == 2 * outside + layers


def test_a_server_has_room_for_the_largest_group_of_any_environment():
    few = ("--max_concurrent_prompts_per_server", "2", "--group_size", "4")
    mixed = ("--environments", '[{"name": "a"}, {"name": "b", "group_size": 16}]')
    one, other = (
        server_memory(config(*few, *more), FACTS, 1000, device="cpu") for more in ((), mixed)
    )
    assert one is not None
    assert other is not None
    assert "KV cache, 8 x 1000 tokens" in dict(one.parts)
    assert "KV cache, 32 x 1000 tokens" in dict(other.parts)
    assert CONTEXT_BYTES < H100
