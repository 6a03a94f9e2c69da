"""Fused kernels on CPU: right by float64, left aside where they do not fit, and used by servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telescope_train.inference.server import StartActivity

pytestmark = pytest.mark.engine
EPSILON = 1e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def operations() -> Iterator[Any]:
    """vLLM's operations with the kernels preferred."""
    from vllm import ir

    from telescope_train.inference.vllm_plugin import cpu_kernels

    cpu_kernels.install()
    preferred = ["telescope_cpu", "native"]
    with (
        ir.ops.rms_norm.set_priority(preferred),
        ir.ops.fused_add_rms_norm.set_priority(preferred),
    ):
        yield ir.ops


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("width", [32, 128])
def test_a_norm_of_rows_and_of_heads_in_a_row(operations, width, scale):
    torch.manual_seed(0)
    weight = torch.rand(width) + 0.5
    rows = torch.randn(7, 3 * width) * scale
    heads = rows.split([2 * width, width], dim=-1)[0].view(7, 2, width)
    assert not heads.is_contiguous()
    for x in (rows[:, :width], rows[:, :width].contiguous(), heads):
        before = x.clone()
        normed = operations.rms_norm(x, weight, EPSILON)
        torch.testing.assert_close(normed.double(), plain_norm(x, weight), **CLOSE)
        assert torch.equal(x, before)


def test_a_norm_of_a_sum(operations):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 128), torch.randn(5, 128), torch.rand(128)
    total = x.double() + residual.double()
    normed, new_residual = operations.fused_add_rms_norm.maybe_inplace(x, residual, weight, EPSILON)
    torch.testing.assert_close(normed.double(), plain_norm(total, weight), **CLOSE)
    torch.testing.assert_close(new_residual.double(), total, **CLOSE)


def test_what_does_not_fit_is_computed_by_torch(operations):
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(
        operations.rms_norm(x, None, EPSILON).double(), plain_norm(x, torch.ones(64)), **CLOSE
    )
    half = x.double().div((x[:, :32].double().square().mean(-1, keepdim=True) + EPSILON).sqrt())
    normed = operations.rms_norm(x, torch.ones(64), EPSILON, 32)
    torch.testing.assert_close(normed.double(), half, **CLOSE)


def test_the_gated_activation(operations):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    torch.manual_seed(0)
    x = torch.randn(5, 2 * 384) * 5
    with set_current_vllm_config(VllmConfig()):
        layer = SiluAndMul()
    gate, up = x.double().chunk(2, dim=-1)
    assert type(layer) is not SiluAndMul
    torch.testing.assert_close(
        layer.forward_cpu(x).double(), torch.nn.functional.silu(gate) * up, **CLOSE
    )


def test_a_server_uses_them(vllm_server: str, server_log: Path):
    assert "rms_norm=['telescope_cpu', 'native']" in server_log.read_text()


def test_what_a_server_does_as_it_starts_is_read_from_its_log(vllm_server: str, server_log: Path):
    """On a GPU it also compiles, and captures graphs."""
    activity, seen = StartActivity(), []
    for line in server_log.read_text().splitlines():
        activity.hear(line)
        seen.append(activity.now)
    assert list(dict.fromkeys(seen)) == [
        "importing its libraries",
        "starting its engine",
        "loading the model",
        "warming up",
        "opening its address",
    ]
