"""Layers with fused kernels beside transformers' own layers, in Triton's interpreter on a CPU."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from telescope_train.models.fused_layers import fuse_layers, gpu_kernels

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "scripts")]
from gpu_parts.kernels import check  # noqa: E402
from test_head import FAMILIES, SIZES  # noqa: E402

pytest.importorskip("triton", reason="Triton comes with vLLM and with torch for CUDA")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels():
    """A kernel is defined for the interpreter, as the functions of the language are in conftest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield gpu_kernels()


@pytest.fixture(autouse=True)
def _own_rotations():
    """Put back the rotations of the architectures: one of them is replaced for all its models."""
    yield
    for name, module in list(sys.modules.items()):
        rotation = vars(module).get("apply_rotary_pos_emb")
        if name.startswith("transformers.models.") and hasattr(rotation, "own"):
            module.apply_rotary_pos_emb = rotation.own


def made(family, **changes):
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms begin at 1 or 0, where a forgotten offset would not show.
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def gradients(model, dtype):
    """Return hidden states and gradients of one row, in float64.

    It is short, as each token is a program that the interpreter runs, and longer than a window.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (1, 7), generator=generator)
    model.zero_grad()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.backward(torch.randn(hidden.shape, generator=generator).to(dtype))
    found = {"hidden states": hidden.detach()}
    found |= {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }
    return {name: value.double() for name, value in found.items()}


def distance(found, expected):
    """Return the greatest distance of a tensor from what is expected, relative to its norm."""
    return max(
        float((found[name] - value).norm() / value.norm())
        for name, value in expected.items()
        if value.norm() > 1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "norms", "mlps", "rotations"),
    [
        ("qwen3", 9, 2, 1),
        pytest.param("llama", 5, 2, 1, marks=pytest.mark.slow),
        pytest.param("mistral", 5, 2, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 5, 2, 1, marks=pytest.mark.slow),
        pytest.param("gemma2", 9, 2, 1, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 13, 2, 1, marks=pytest.mark.slow),
        pytest.param("phi3", 5, 0, 1, marks=pytest.mark.slow),
        pytest.param("granite", 5, 2, 1, marks=pytest.mark.slow),
        pytest.param("cohere", 0, 2, 0, marks=pytest.mark.slow),
        pytest.param("olmo2", 9, 2, 1, marks=pytest.mark.slow),
        pytest.param("glm4", 9, 0, 0, marks=pytest.mark.slow),
    ],
)
def test_a_family_keeps_its_numbers(kernels, family, norms, mlps, rotations):
    """And what it computes in a way of its own, its own code: the counts say what was fused."""
    model = made(family)
    expected = gradients(model, torch.float32)
    fused = fuse_layers(model, kernels, CPU, torch.float32)
    assert fused[:3] == (norms, mlps, rotations)
    assert distance(gradients(model, torch.float32), expected) < 1e-5


@pytest.mark.parametrize("strided", ["queries", "keys"])
def test_states_whose_numbers_are_apart_keep_the_models_own_rotation(kernels, strided):
    """The kernels read a head's numbers one after the other."""
    model = made("qwen3")
    assert fuse_layers(model, kernels, CPU, torch.float32).rotations == 1
    rotation = sys.modules[type(model).__module__].apply_rotary_pos_emb
    states = {"queries": torch.randn(1, 4, 3, 8), "keys": torch.randn(1, 2, 3, 8)}
    states[strided] = states[strided].mT.contiguous().mT
    arguments = (*states.values(), torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    for found, expected in zip(rotation(*arguments), rotation.own(*arguments), strict=True):
        torch.testing.assert_close(found, expected)


class Rounding:
    """Kernels that compute in float32 and round, as on a GPU: the interpreter cuts bits off."""

    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        def rounded(*args, **options):
            wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
            found = getattr(self._kernels, name)(*wide, **options)
            if name == "rms_norm":
                return found._replace(values_RN=found.values_RN.bfloat16())
            if isinstance(found, tuple):
                return tuple(one.bfloat16() for one in found)
            return found.bfloat16()

        return rounded


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_bfloat16_gradient_is_no_further_from_float64(kernels, family):
    model = made(family)
    rounded = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(rounded).double()
    expected = gradients(exact, torch.float64)
    plain = distance(gradients(rounded, torch.bfloat16), expected)
    fused = fuse_layers(rounded, Rounding(kernels), CPU, torch.bfloat16)
    assert min(fused[:3]) > 0
    assert distance(gradients(rounded, torch.bfloat16), expected) < plain


def test_what_is_not_the_same_is_left_alone_and_named(kernels, caplog):
    """An activation of another kind, a norm without a scale, and a model in float64."""
    model = made("llama", hidden_act="relu")
    caplog.set_level("INFO")
    fused = fuse_layers(model, kernels, CPU, torch.float32)
    assert (fused.mlps, fused.kept) == (0, ("LlamaMLP",))
    assert "5 norms, 0 gated MLPs, 1 rotations" in caplog.text
    assert "LlamaMLP" in caplog.text
    assert fuse_layers(made("llama"), kernels, CPU, torch.float64)[:3] == (0, 0, 0)
    for norm in (module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"):
        norm.forward = lambda values: 2.0 * values
    assert fuse_layers(model, kernels, CPU, torch.float32).norms == 0


@pytest.mark.slow
def test_modules_of_one_class_may_compute_in_different_ways(kernels):
    """By another activation, or by a number that is no parameter; some models have both kinds."""
    model = made("llama")
    layers = model.base_model.layers
    layers[1].mlp.act_fn = torch.nn.ReLU()
    layers[1].input_layernorm.variance_epsilon = 0.5
    expected = gradients(model, torch.float32)
    assert fuse_layers(model, kernels, CPU, torch.float32).mlps == 1
    assert distance(gradients(model, torch.float32), expected) < 1e-5


def test_a_model_without_memory_is_judged_by_copies_of_its_modules(kernels):
    with torch.device("meta"):
        model = made("qwen3")
    assert fuse_layers(model, kernels, CPU, torch.float32) == (9, 2, 1, ())
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
def test_gpu_check_finds_a_kernel_that_is_wrong(kernels, monkeypatch):
    # Few, as each token is a program that the interpreter runs.
    found = check(CPU, torch.float32, num_samples=3)
    assert found.is_met, found.text
    assert "9 norms, 2 MLPs, 1 rotations fused" in found.text
    gated = kernels.gated
    monkeypatch.setattr(kernels, "gated", lambda *args: 1.2 * gated(*args))
    found = check(CPU, torch.float32, num_samples=3)
    assert found.is_met is False
    assert "0 MLPs" in found.text, "what disagrees with the layers' own code is not used"
