"""Muon: its numbers against float64 and torch's own, its properties, and the plan of its products.

The steps of several ranks are in tests/train/trainer/test_several_ranks.py.
"""

import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from telescope_train.backends.fsdp import muon
from telescope_train.backends.fsdp.muon import Matrix, deal, hidden_matrices, orthogonalize
from telescope_train.backends.fsdp.optimizer import make_optimizer
from telescope_train.config.schema import TrainerSection
from telescope_train.models.facts import ModelFacts
from telescope_train.plan import memory
from telescope_train.plan.load import load_train_config

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import backend_settings, grpo_batches, make_mixture, slow_orthogonalized  # noqa: E402

CPU = torch.device("cpu")
SHAPES = st.tuples(st.integers(1, 24), st.integers(1, 24))
SECTION = TrainerSection(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)


def random(*shape, seed=0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def moved(parameters, gradients, section=SECTION, matrices=None) -> list[torch.Tensor]:
    """Return copies of `parameters` after one step for each row of `gradients`."""
    copies = [torch.nn.Parameter(one.clone()) for one in parameters]
    chosen = {one: (one.shape[-2],) for one in copies if one.ndim > 1} if matrices is None else {}
    optimizer = make_optimizer(copies, section, CPU, seed=0, matrices=chosen)
    for row in gradients:
        for one, gradient in zip(copies, row, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
    return [one.detach() for one in copies]


@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_it_is_the_iteration_written_out(shape, seed):
    matrices = random(3, *shape, seed=seed)
    found = orthogonalize(matrices)
    for one, matrix in zip(found, matrices, strict=True):
        expected = slow_orthogonalized(matrix.numpy())
        assert np.abs(one.numpy() - expected).max() < 1e-9


@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_singular_values_end_in_the_band_of_the_quintic_and_directions_stay(shape, seed):
    """The bounds are those of the polynomial, five times, over [1/500, 1]."""
    x = torch.logspace(math.log10(1 / 500), 0, 10_000, dtype=torch.float64)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    matrix = random(*shape, seed=seed)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    seen = left.T @ orthogonalize(matrix[None])[0] @ right.T
    kept = seen.diagonal()[values > values.norm() / 500]
    assert torch.all((kept >= x.min() - 1e-6) & (kept <= x.max() + 1e-6))
    assert (seen - seen.diagonal().diag()).abs().max() < 1e-8


@given(shape=SHAPES, power=st.integers(-10, 10), seed=st.integers(0, 2**31))
def test_the_scale_of_a_gradient_changes_nothing_and_its_transpose_transposes(shape, power, seed):
    matrices = random(2, *shape, seed=seed)
    found = orthogonalize(matrices)
    assert torch.equal(orthogonalize(matrices * 2.0**power), found)
    assert torch.allclose(orthogonalize(matrices.mT), found.mT, rtol=0, atol=1e-9)
    assert not orthogonalize(torch.zeros_like(matrices)).any()


def test_a_tall_matrix_costs_what_a_wide_one_does():
    """Of 64 rows and 8 columns, the product with itself is to have 8 rows and not 64."""
    costs = []
    for shape in ((8, 64), (64, 8)):
        with FlopCounterMode(display=False) as counter:
            orthogonalize(random(1, *shape))
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] == 5 * 2 * 8 * 8 * (64 + 8 + 64)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
def test_steps_are_those_of_torch_to_the_rounding_of_bfloat16(shape):
    """Torch multiplies in bfloat16 on any device; ours does so on a GPU."""
    weights, gradients = random(*shape, dtype=torch.float32), random(4, *shape, seed=1).float()
    theirs = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    (ours,) = moved([weights], [[one] for one in gradients])
    assert (ours - theirs).norm() < 0.03 * (theirs - weights).norm()
    low = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32))
    low.grad = gradients[0].clone()
    torch.optim.Muon([low], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    found = -0.2 * max(shape) ** 0.5 * orthogonalize(gradients[:1].bfloat16())[0].float()
    assert (found - low).norm() < 0.03 * low.norm()


def test_an_update_is_as_large_as_one_of_adamw():
    """So its learning rate carries over: the root mean square of elements is 0.2, as AdamW's is."""
    for shape in ((64, 64), (96, 24), (24, 96)):
        section = TrainerSection(optimizer="muon", learning_rate=1.0)
        weights, gradient = torch.zeros(shape), random(*shape, dtype=torch.float32)
        (after,) = moved([weights], [[gradient]], section)
        # Of a full rank, singular values between 0.68 and 1.21 are about 0.9 in the middle.
        assert after.square().mean().sqrt() == pytest.approx(0.2, rel=0.25)


def test_what_is_no_matrix_moves_as_with_adamw_bit_for_bit():
    weights = [random(5, 4).float(), random(6, seed=1).float()]
    gradients = [[random(5, 4, seed=k).float(), random(6, seed=k + 9).float()] for k in range(3)]
    adam = SECTION.model_copy(update={"optimizer": "adamw"})
    for ours, theirs in zip(
        moved(weights, gradients, matrices={}), moved(weights, gradients, adam), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_fused_matrices_and_experts_move_as_each_would_alone():
    fused = random(3, 8, 5)
    gradients = [random(3, 8, 5, seed=seed) for seed in (1, 2)]
    parameter = torch.nn.Parameter(fused.clone())
    optimizer = make_optimizer([parameter], SECTION, CPU, seed=0, matrices={parameter: (2, 6)})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    for expert in range(3):
        for rows in (slice(0, 2), slice(2, 8)):
            (alone,) = moved(
                [fused[expert, rows]], [[gradient[expert, rows]] for gradient in gradients]
            )
            assert torch.allclose(parameter[expert, rows], alone, rtol=0, atol=1e-12)


def tiny_model(kind, **more):
    sizes = {
        **{"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    }
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes, **more))


def test_embeddings_heads_norms_and_biases_are_no_hidden_matrices(tmp_path):
    def names(model) -> dict[str, tuple[int, ...]]:
        named = {value: name for name, value in model.named_parameters()}
        return {
            named[value].partition(".0.")[2].removesuffix(".weight"): rows
            for value, rows in hidden_matrices(model).items()
        }

    attention = {f"self_attn.{one}_proj": (8,) for one in "kv"} | {"self_attn.q_proj": (16,)}
    up = {"mlp.gate_proj": (24,), "mlp.up_proj": (24,), "mlp.down_proj": (16,)}
    assert names(tiny_model("qwen2")) == attention | up | {"self_attn.o_proj": (16,)}
    fused = {"self_attn.qkv_proj": (16, 8, 8), "mlp.gate_up_proj": (24, 24)}
    assert names(tiny_model("phi3")) == fused | {
        "self_attn.o_proj": (16,),
        "mlp.down_proj": (16,),
    }
    granite = tiny_model(
        "granitemoehybrid", layer_types=["attention"], shared_intermediate_size=24, mamba_n_heads=4
    )
    assert names(granite)["shared_mlp.input_linear"] == (24, 24)
    mixture = AutoModelForCausalLM.from_pretrained(make_mixture(tmp_path / "m", "qwen3_moe"))
    found = names(mixture)
    assert found["mlp.experts.gate_up_proj"] == (24, 24)
    assert found["mlp.experts.down_proj"] == (32,)
    assert found["mlp.gate"] == (5,), "routers too"
    assert len(hidden_matrices(mixture)) == 2 * 7
    mixture.requires_grad_(False)
    assert hidden_matrices(mixture) == {}


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6),
    num_ranks=st.integers(1, 5),
)
def test_each_row_has_one_rank_as_fsdp_deals_it_and_each_matrix_one_owner(shapes, num_ranks):
    matrices = []
    for number, sizes in enumerate(shapes):
        total = sum(sizes)
        dealt = torch.arange(total).chunk(num_ranks)
        first = 0
        for rows in sizes:
            one = Matrix(number, first, rows, 3 + number, math.ceil(total / num_ranks))
            matrices.append(one)
            for rank in range(num_ranks):
                own = set(dealt[rank].tolist()) if rank < len(dealt) else set()
                assert set(one.rows_of(rank)) == own & set(range(first, first + rows))
            first += rows
    rounds = list(deal(matrices, num_ranks))
    assert Counter(one for owned in rounds for mine in owned for one in mine) == Counter(matrices)
    assert all(len(owned) == num_ranks for owned in rounds)


def test_owners_have_equal_work_and_rounds_fit_their_memory(monkeypatch):
    """A decoder of 9 layers on 4 ranks: no rank has more than a matrix above the average."""
    monkeypatch.setattr(muon, "MUON_BATCH_VALUES", 64 * 64 * 2)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)] * 9
    matrices = [Matrix(k, 0, *shape, shape[0] // 4) for k, shape in enumerate(shapes)]

    def cost(one):
        narrow, wide = sorted(one.shape)
        return narrow * narrow * (2 * wide + narrow)

    rounds = list(deal(matrices, 4))
    work = [sum(cost(one) for owned in rounds for one in owned[rank]) for rank in range(4)]
    assert max(work) < 1.03 * sum(work) / 4
    for mine in (mine for owned in rounds for mine in owned):
        assert len(mine) <= 1 or sum(math.prod(one.shape) for one in mine) <= 64 * 64 * 2


class Watch(TorchDispatchMode):
    """Counts operators, and the bytes of what they made that are alive at one time."""

    def __init__(self):
        super().__init__()
        self.counts, self.peak, self._made = Counter(), 0, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.is_view or "split" in operator.name():
            return result
        self.counts[operator.overloadpacket.__name__] += 1
        if isinstance(result, torch.Tensor) and operator.overloadpacket.__name__[-1] != "_":
            storage = result.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


@pytest.mark.parametrize("num", [2, 12])
def test_one_product_is_for_all_matrices_of_a_shape_and_no_number_is_read(num):
    """On the device `meta` whoever asks for a number fails."""
    parameters = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(num)]
    matrices = dict.fromkeys(parameters, (6,))
    optimizer = make_optimizer(parameters, SECTION, parameters[0].device, seed=0, matrices=matrices)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.empty_like(one)
        with Watch() as watch:
            optimizer.step()
    assert watch.counts["baddbmm"] == 10
    # And the products of matrices with themselves, five; whatever the number of matrices.
    assert watch.counts.total() < 35


@pytest.fixture
def four_ranks():
    """This process is one of four, and what is sent arrives nowhere."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    torch.distributed.destroy_process_group()


def test_what_ranks_send_and_hold_is_what_the_plan_and_its_estimate_say(four_ranks, monkeypatch):
    """Each row travels to its owner and back, unless the owner is the rank itself."""
    monkeypatch.setattr(muon, "MUON_BATCH_VALUES", 2**13)
    monkeypatch.setattr(memory, "MUON_BATCH_VALUES", 2**13)
    facts = ModelFacts(
        **{"num_parameters": 10**6, "vocab_size": 60, "max_positions": 64},
        **{"kv_values_per_token": 1, "hidden_size": 64, "ffn_size": 192},
        num_matrix_parameters=8 * (4 * 64 * 64 + 3 * 64 * 192),
    )
    given = ["--name", "a", "--number_of_steps", "1", "--model", "a/b", "--optimizer", "muon"]
    config = load_train_config([], [*given, "--environments", '[{"name": "countdown"}]'])
    shapes = [*[(64, 64)] * 4, *[(192, 64)] * 2, (64, 192)] * 8
    for is_sharded in (False, True):
        sent = []

        def exchanged(received, values, from_ranks, to_owners, *, group, sent=sent):
            sent.append((sum(to_owners) - to_owners[group.rank()]) * values.itemsize)
            received.zero_()

        monkeypatch.setattr(torch.distributed, "all_to_all_single", exchanged)
        whole = [torch.zeros(shape) for shape in shapes]
        if is_sharded:
            whole = [distribute_tensor(one, four_ranks, [Shard(0)]) for one in whole]
        parameters = [torch.nn.Parameter(one) for one in whole]
        matrices = {one: (one.shape[0],) for one in parameters}
        optimizer = make_optimizer(parameters, SECTION, CPU, seed=0, matrices=matrices)
        for _ in range(2):
            for one in parameters:
                one.grad = torch.ones_like(one)
            sent.clear()
            with Watch() as watch:
                optimizer.step()
        assert 0.3 < watch.peak / memory._products(config, facts, "cpu") < 1
        own = 4 * sum(math.prod(shape) for shape in shapes) / 4
        assert sum(sent) == (pytest.approx(2 * own * 3 / 4, rel=0.05) if is_sharded else 0)


@pytest.mark.slow
def test_a_step_continues_from_a_checkpoint_bit_for_bit(tiny, start, tmp_path):
    settings = backend_settings(tiny, optimizer="muon", weight_decay=0.1)
    batches = grpo_batches(seq_len=128)[0]
    worker = start(settings)
    worker.train_step(batches, version=0)
    worker.save_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=1)
    expected = {name: value.clone() for name, value in worker.export_weights()}
    worker = start(settings)
    worker.load_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=1)
    assert all(torch.equal(value, expected[name]) for name, value in worker.export_weights())
    named = dict(worker.backend._policy.lm.named_parameters())
    keys = {name: set(worker.backend._optimizer.state[value]) for name, value in named.items()}
    for name, kept in keys.items():
        is_matrix = ".layers." in name and named[name].ndim > 1
        assert kept == ({"momentum_buffer"} if is_matrix else {"step", "exp_avg", "exp_avg_sq"})
