"""The product that the output head uses gives what torch's own does, whichever library it is."""

import pytest
import torch

from telescope_train.models import cpu_kernels
from telescope_train.models.logprobs import chunked_logprobs


@pytest.mark.parametrize("is_onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_is_that_of_float64_up_to_rounding(is_onednn, dtype, monkeypatch):
    if is_onednn and not torch.backends.mkldnn.is_available():
        is_onednn = False  # torch was built without it, and it is never chosen there
    monkeypatch.setattr(cpu_kernels, "has_onednn_product", lambda: is_onednn)
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((1, 1, 1), (5, 33, 7), (64, 192, 130), (0, 4, 3)):
        left = torch.randn(rows, inner, generator=generator).to(dtype)
        right = torch.randn(columns, inner, generator=generator).to(dtype)
        expected = (left.double() @ right.double().T).to(dtype)
        torch.testing.assert_close(cpu_kernels.product(left, right), expected)
        # A view that is not contiguous, as the head's is in backward.
        torch.testing.assert_close(cpu_kernels.product(left, right.T.contiguous().T), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients_are_the_same_with_either_library(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, 32, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(300, 32, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 300, (50,), generator=generator)
    found = []
    for is_onednn in (False, torch.backends.mkldnn.is_available()):
        monkeypatch.setattr(cpu_kernels, "has_onednn_product", lambda chosen=is_onednn: chosen)
        scored = chunked_logprobs(hidden, head, targets, torch.ones(50), chunk_size=16)
        gradients = torch.autograd.grad(scored.logprobs_T.square().sum(), (hidden, head))
        found.append((scored.logprobs_T.detach(), *gradients))
    # Gradients are sums over the vocabulary, of numbers that cancel.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4
        )
