"""The optimizer of backend megatron in CPU memory, where it steps or where its state is gathered.

Without a GPU nothing would be offloaded, so one function of the library is replaced by one that
copies the first parameters all the same.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import grpo_batches
from megatron_cases import make_model, megatron_settings

from telescope_train.algorithms import loss_function
from telescope_train.backends.megatron import checkpoint
from telescope_train.backends.megatron.backend import MegatronBackend
from telescope_train.backends.megatron.library import using

pytestmark = [
    pytest.mark.engine,
    # The library is quieted once, and each test begins with the warnings of all.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CPU = torch.device("cpu")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def copied(optimizer, fraction):
    """Return the groups and maps of the original, as if all parameters were on a GPU."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    first = set(params[: round(fraction * len(params))])
    wide = {param: param.detach().clone().float() for param in params}
    there = {param: wide[param] for param in first}

    def groups(moved):
        chosen = [
            {**group, "params": [wide[one] for one in group["params"] if (one in first) is moved]}
            for group in optimizer.param_groups
        ]
        return [group for group in chosen if group["params"]]

    return groups(True), groups(False), there, {copy: one for one, copy in there.items()}, wide


def offloading_class():
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    return HybridDeviceOptimizer


def trained(folder, section, *, steps):
    settings = megatron_settings(str(folder), section, dtype="bfloat16")
    backend = MegatronBackend(settings, loss_function(settings.algorithm), CPU)
    for inner in backend._stepper.inner_optimizers():
        inner.pin_cpu_grads = False
    step(backend, steps)
    return backend


def step(backend, number):
    for _ in range(number):
        backend.accumulate_gradient(grpo_batches(seq_len=64, num_ranks=1)[0], version=0)
        backend.apply_gradient()


def weights(backend):
    return {name: value.clone() for name, value in backend.export_weights()}


def require_equal(found, expected):
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_an_offloaded_optimizer_takes_the_same_steps_and_resumes(
    alone, tmp_path, monkeypatch, fraction
):
    folder, saved = make_model("qwen3", tmp_path / "model"), tmp_path / "checkpoint"
    with using(CPU):
        monkeypatch.setattr(offloading_class(), "_get_sub_optimizer_param_groups", copied)
    section = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    plain = weights(trained(folder, {}, steps=2))
    first = trained(folder, section, steps=2)
    require_equal(weights(first), plain)
    first.save_checkpoint(saved)
    step(first, 1)
    resumed = trained(folder, section, steps=0)
    resumed.load_checkpoint(saved)
    require_equal(weights(resumed), plain)
    step(resumed, 1)
    require_equal(weights(resumed), weights(first))


def test_loaded_state_goes_where_its_parameter_is():
    """Also where both optimizers are of one class, as without Transformer Engine."""
    param = torch.ones(2, device="meta")
    state = {param: {"exp_avg": torch.ones(2), "step": torch.ones(())}}
    adam = torch.optim.AdamW([param])
    adam.state = state
    held = SimpleNamespace(
        sub_optimizers=[adam],
        state=state,
        inner_param_to_orig_param={},
        defaults={"cpu_optimizer_cls": torch.optim.AdamW},
    )
    with using(CPU):
        offloading_class()._move_new_state_to_right_device(held)
    assert {value.device.type for value in state[param].values()} == {"meta"}


def test_the_state_of_all_ranks_is_gathered_in_cpu_memory_and_copied_once(
    alone, tmp_path, monkeypatch
):
    """By the rank that writes it: on every GPU there is no room for the whole state."""
    backend = trained(make_model("qwen3", tmp_path / "model"), {}, steps=1)
    groups, written = [], []
    gather, write = dist.gather, checkpoint.write_in_background
    with using(CPU):
        from megatron.core import parallel_state

        over_gloo = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    monkeypatch.setattr(dist, "all_gather", lambda *_: pytest.fail("gathered on every rank"))
    monkeypatch.setattr(
        dist, "gather", lambda sent, *rest: (groups.append(rest[-1]), gather(sent, *rest))
    )
    monkeypatch.setattr(
        checkpoint, "write_in_background", lambda *args: (written.append(args[1]), write(*args))[1]
    )
    backend.save_checkpoint(tmp_path / "checkpoint")
    assert set(groups) == {over_gloo}
    moment = written[0]["optimizer.state.exp_avg.decoder.final_layernorm.weight"]
    weight = written[0]["decoder.final_layernorm.weight"]
    # A part of the gathered memory, and a copy of what training changes.
    assert storage_numbers(moment) > storage_numbers(weight)


def storage_numbers(sharded):
    tensor = sharded._sh_ten.data
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def test_a_rank_that_gathered_nothing_says_nothing_of_it():
    """The library compares the rest of the state with that of rank 0, and warns."""
    gathered = {"param_state": None, "optimizer": {}}
    for found in (gathered, {0: dict(gathered), 1: dict(gathered)}):
        holder = SimpleNamespace(sharded_state_dict=lambda *_, found=found, **__: found)
        state = checkpoint._state(
            SimpleNamespace(
                model=SimpleNamespace(sharded_state_dict=lambda **_: {}),
                stepper=SimpleNamespace(optimizer=holder),
                reference=None,
            ),
            SimpleNamespace(num_taken=1),
            with_training_state=True,
            is_loading=False,
        )
        assert "param_state" not in str(state)
