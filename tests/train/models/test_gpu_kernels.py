"""The Triton kernels in Triton's interpreter, on a CPU, beside the same formulas in float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from telescope_train.models import logprobs
from telescope_train.models.head import HeadRule
from telescope_train.models.logprobs import Head, LogitsUpstream, chunked_logprobs

pytest.importorskip("triton", reason="Triton comes with vLLM and with torch for CUDA")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels():
    """A kernel is defined for the interpreter, as the functions of the language are in conftest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module("telescope_train.models.gpu_kernels")


def drawn(*shape, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def require_near(found, expected):
    """Within what rounding once to the dtype of `found` explains, and float32 sums."""
    limit = 1e-2 if found.dtype == torch.bfloat16 else 2e-6
    size = float(expected.abs().max())
    assert float((found.double() - expected).abs().max()) <= limit * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 64), (75, 128), (5, 1000), (2, 5120)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(kernels, dtype, rows, width, offset):
    x, weight, grad = (
        drawn(rows, width, dtype=dtype),
        drawn(width, dtype=dtype, seed=1),
        drawn(rows, width, dtype=dtype, seed=2),
    )
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    scales = torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6)
    expected = exact[0] * scales * (exact[1] + offset)
    expected.backward(grad.double())
    found = kernels.rms_norm(x, weight, epsilon=1e-6, offset=offset, rounds=False)
    require_near(found.values_RN, expected.detach())
    grads = kernels.rms_norm_backward(grad, x, weight, found.scales_R, offset=offset, rounds=False)
    if width > 1:  # with a single column the gradient is 0 but for epsilon
        require_near(grads[0], exact[0].grad)
    require_near(grads[1], exact[1].grad)


def test_a_norm_that_rounds_first_is_that_of_transformers_bit_for_bit(kernels):
    """x / rms(x) becomes bfloat16 before the weight is multiplied, in Llama and most others."""
    x, weight = drawn(9, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    weight[::2] = 2.0
    plain = kernels.rms_norm(x, weight, epsilon=1e-6, offset=0.0, rounds=True).values_RN
    ones = kernels.rms_norm(x, weight * 0 + 1, epsilon=1e-6, offset=0.0, rounds=True).values_RN
    assert torch.equal(plain, ones * weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(1, 1, 2), (5, 3, 64), (4, 16, 128), (3, 5, 80)]
)
def test_rotations(kernels, dtype, tokens, heads, size):
    x, grad = (drawn(tokens, heads, size, dtype=dtype, seed=seed) for seed in (0, 1))
    cos, sin = (drawn(tokens, size, dtype=dtype, seed=seed) for seed in (2, 3))
    exact = x.double().requires_grad_()
    turned = torch.cat((-exact[..., size // 2 :], exact[..., : size // 2]), -1)
    expected = exact * cos.double()[:, None] + turned * sin.double()[:, None]
    expected.backward(grad.double())
    require_near(kernels.rotate(x, cos, sin), expected.detach())
    require_near(kernels.rotate(grad, cos, sin, is_backward=True), exact.grad)
    # As attention hands over its gradient: heads first in memory.
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    require_near(kernels.rotate(strided, cos, sin, is_backward=True), exact.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(kernels, dtype, activation):
    gate, up, grad = (drawn(7, 333, dtype=dtype, seed=seed, size=3.0) for seed in range(3))
    exact = gate.double().requires_grad_(), up.double().requires_grad_()
    act = F.silu(exact[0]) if activation == "silu" else F.gelu(exact[0], approximate="tanh")
    expected = act * exact[1]
    expected.backward(grad.double())
    require_near(kernels.gated(gate, up, activation), expected.detach())
    for found, right in zip(kernels.gated_backward(grad, gate, up, activation), exact, strict=True):
        require_near(found, right.grad)


def test_rotations_find_heads_that_are_far_apart(kernels):
    """Beyond 2^31 numbers, for which 32 bits are too few; what lies between is never touched."""
    # Bytes, and as many before them: who counts in 32 bits reads there.
    memory = torch.empty(2**32 + 2, dtype=torch.int8)
    far = memory.as_strided((1, 3, 2), (2, 2**30, 1), storage_offset=2**31)
    far.copy_(torch.arange(1, 7).view(1, 3, 2))
    found = kernels.rotate(far, torch.ones(1, 2), torch.zeros(1, 2))
    assert found.flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_outside_are_finite(kernels, activation):
    gate = torch.tensor([[-3e4, -200.0, -0.0, 0.0, 200.0, 3e4]])
    up, grad = torch.full_like(gate, 2.0), torch.ones_like(gate)
    for found in (
        kernels.gated(gate, up, activation),
        *kernels.gated_backward(grad, gate, up, activation),
    ):
        assert found.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "words", "block", "temperature", "scale", "cap", "has_entropy"),
    [
        (1, 1, 1, 1.0, 1.0, None, True),
        (3, 17, 17, 0.3, 1.0, None, False),
        (3, 17, 5, 2.0, 3.0, 50.0, True),
        (5, 1000, 300, 0.3, 0.25, None, True),
        (5, 1000, 300, 1.0, 1.0, 30.0, False),
        pytest.param(2, 151_936, 40_000, 0.7, 1.0, None, True, marks=pytest.mark.slow),
        pytest.param(2, 262_144, 131_072, 2.0, 1.0, 30.0, True, marks=pytest.mark.slow),
        pytest.param(2, 262_144, 262_144, 0.3, 0.5, None, False, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_logits(kernels, tokens, words, block, temperature, scale, cap, has_entropy):
    """Folded block by block, and the gradient of a block, with every token's target in one."""
    rule = HeadRule(scale=scale, cap=cap)
    products = drawn(tokens, words, size=20.0)
    targets = torch.arange(tokens) * 7919 % words
    temperatures = torch.full((tokens,), temperature)
    lowest = torch.finfo(torch.float32).min
    running = (torch.full((tokens,), lowest), *(torch.zeros(tokens) for _ in range(3)))
    starts = range(0, words, block)
    for start in starts:
        part = products[:, start : start + block]
        kernels.fold_logits(part, targets - start, temperatures, running, rule)
    largest, sums, weighted, chosen = running
    normalisers = largest + sums.log()
    entropies = sums.log() - weighted / sums

    exact = products.double().requires_grad_()
    logits = exact * rule.scale
    if rule.cap is not None:
        logits = rule.cap * (logits / rule.cap).tanh()
    logs = (logits / temperature).log_softmax(1)
    expected = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(1)
    torch.testing.assert_close(
        (chosen - normalisers).double(), expected[0].detach(), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(entropies.double(), expected[1].detach(), rtol=1e-4, atol=1e-4)

    grad, grad_entropy = drawn(tokens, seed=1), drawn(tokens, seed=2)
    total = expected[0] @ grad.double()
    if has_entropy:
        total = total + expected[1] @ grad_entropy.double()
    total.backward()
    for start in starts:
        upstream = LogitsUpstream(
            *(targets - start, temperatures, normalisers, entropies),
            *(grad, grad_entropy if has_entropy else None),
        )
        part = products[:, start : start + block]
        found = kernels.logits_gradient(part, upstream, rule, torch.float32)
        right = exact.grad[:, start : start + block]
        torch.testing.assert_close(found.double(), right, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("block", [5 * 31, 60, 16])
@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize(
    ("rule", "has_bias"),
    [(HeadRule(), False), (HeadRule(scale=0.5, cap=4.0), False), (HeadRule(scale=2.0), True)],
)
def test_log_probs_by_kernels_are_those_by_torch(
    kernels, monkeypatch, block, has_entropy, rule, has_bias
):
    """Whatever the blocks: of all tokens, of some, and of one word."""
    tokens, words, width = 5, 31, 8
    targets, temperatures = torch.arange(tokens) * 7, torch.linspace(0.5, 2.0, tokens)

    def both():
        hidden = drawn(tokens, width).requires_grad_()
        weight = drawn(words, width, seed=1).requires_grad_()
        bias = drawn(words, seed=2).requires_grad_() if has_bias else None
        head = Head(weight, 0, words, None, bias, rule)
        found = chunked_logprobs(
            *(hidden, head, targets, temperatures), chunk_size=2, entropy_grad=has_entropy
        )
        total = found.logprobs_T @ drawn(tokens, seed=3)
        if has_entropy:
            total = total + found.entropy_T @ drawn(tokens, seed=4)
        total.backward()
        inputs = [one for one in (hidden, weight, bias) if one is not None]
        return [*found, *(one.grad for one in inputs)]

    expected = both()
    monkeypatch.setattr(logprobs, "_kernels", lambda hidden: kernels)
    monkeypatch.setattr(logprobs, "DEVICE_BLOCK", block)
    monkeypatch.setattr(logprobs, "_DEVICE_WIDTH", min(31, block // 4))
    for found, right in zip(both(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_head_has_a_gradient_for_any_number_of_tokens(kernels, monkeypatch, tokens):
    """Also for none: under context parallelism a rank's slice may hold no trained token."""
    monkeypatch.setattr(logprobs, "_kernels", lambda hidden: kernels)
    empty_like = torch.empty_like
    # Memory as it may be found, of which a GPU gives no zeros.
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan)
    )
    hidden = drawn(tokens, 8).requires_grad_()
    weight = drawn(5, 8, seed=1).requires_grad_()
    targets = torch.arange(tokens)
    found = chunked_logprobs(hidden, weight, targets, torch.ones(tokens), chunk_size=4)
    found.logprobs_T.sum().backward()
    chosen = torch.nn.functional.one_hot(targets, 5) - (hidden @ weight.T).softmax(1)
    torch.testing.assert_close(weight.grad, (chosen.T @ hidden).detach())


@pytest.mark.parametrize("has_entropy", [False, True])
def test_gradients_and_temperatures_may_be_one_number_for_all_tokens(
    kernels, monkeypatch, has_entropy
):
    """Then they are one number in memory too, behind which kernels would read something else."""
    tokens, words, width = 5, 31, 8
    hidden, weight, targets = (
        drawn(tokens, width),
        drawn(words, width, seed=1),
        torch.arange(tokens),
    )
    # What lies behind the number shows whether it is read.
    numbers = torch.tensor([2.0, *[100.0] * tokens])

    def gradient():
        asked = hidden.clone().requires_grad_()
        found = chunked_logprobs(
            *(asked, weight, targets, numbers[:1].expand(tokens)),
            chunk_size=tokens,
            entropy_grad=has_entropy,
        )
        outputs = list(found) if has_entropy else [found.logprobs_T]
        upstream = [numbers[:1].expand(tokens)] * len(outputs)
        return *found, *torch.autograd.grad(outputs, asked, upstream)

    expected = gradient()
    monkeypatch.setattr(logprobs, "_kernels", lambda hidden: kernels)
    for found, right in zip(gradient(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
