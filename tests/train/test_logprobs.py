import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telescope_train.logprobs import chunked_logprobs

T, H, V = 7, 5, 13


def inputs(dtype=torch.float64, *, num_tokens=T, hidden=H, vocab=V, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64) * scale
    weight_VH = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, vocab - 2, (num_tokens,), generator=generator)
    temperatures_T = torch.rand(num_tokens, generator=generator) + 0.5
    return (
        hidden_TH.to(dtype).requires_grad_(),
        weight_VH.to(dtype).requires_grad_(),
        targets_T,
        temperatures_T,
    )


def naive(hidden_TH, weight_VH, targets_T, temperatures_T):
    logits_TV = hidden_TH @ weight_VH.T / temperatures_T[:, None]
    all_TV = logits_TV.log_softmax(1)
    return all_TV.gather(1, targets_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(1)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_equals_log_softmax_forward_and_backward(chunk_size):
    grad_T = torch.linspace(-2, 3, T, dtype=torch.float64)
    ours, theirs = inputs(), inputs()
    logprobs_T, entropy_T = chunked_logprobs(*ours, chunk_size=chunk_size)
    expected_T, expected_entropy_T = naive(*theirs)
    torch.testing.assert_close(logprobs_T, expected_T)
    torch.testing.assert_close(entropy_T, expected_entropy_T)
    logprobs_T.backward(grad_T)
    expected_T.backward(grad_T)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)


def test_gradient_is_right_in_float64():
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()

    def logprobs(hidden, weight):
        arguments = hidden, weight, targets_T, temperatures_T
        return chunked_logprobs(*arguments, chunk_size=3, vocab_size=V - 2).logprobs_T

    assert torch.autograd.gradcheck(logprobs, (hidden_TH, weight_VH))


def test_rows_beyond_the_vocabulary_have_no_probability_and_no_gradient():
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()
    arguments = targets_T, temperatures_T
    padded = chunked_logprobs(hidden_TH, weight_VH, *arguments, chunk_size=4, vocab_size=V - 2)
    cut = naive(hidden_TH, weight_VH[: V - 2], *arguments)
    torch.testing.assert_close(tuple(padded), cut)
    padded.logprobs_T.sum().backward()
    assert not weight_VH.grad[V - 2 :].any()
    assert weight_VH.grad[: V - 2].any()


def test_only_what_needs_a_gradient_gets_one():
    hidden_TH, weight_VH, *arguments = inputs()
    chunked = chunked_logprobs(hidden_TH, weight_VH.detach(), *arguments, chunk_size=4)
    assert not chunked.entropy_T.requires_grad
    chunked.logprobs_T.sum().backward()
    assert hidden_TH.grad is not None
    frozen = chunked_logprobs(hidden_TH.detach(), weight_VH, *arguments, chunk_size=4)
    frozen.logprobs_T.sum().backward()
    assert weight_VH.grad is not None


def test_reductions_are_wide_for_a_narrow_model():
    hidden_TH, weight_VH, *arguments = inputs(torch.bfloat16, vocab=4000, hidden=16)
    logprobs_T, entropy_T = chunked_logprobs(hidden_TH, weight_VH, *arguments, chunk_size=4)
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    logits_TV = (hidden_TH @ weight_VH.T).double()
    exact_T, exact_entropy_T = naive(logits_TV, torch.eye(4000).double(), *arguments)
    torch.testing.assert_close(logprobs_T.double(), exact_T, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_T.double(), exact_entropy_T, atol=1e-5, rtol=0)
    logprobs_T.sum().backward()
    assert hidden_TH.grad.dtype == weight_VH.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    hidden_TH, weight_VH, *arguments = inputs(torch.float32, scale=1e4)
    logprobs_T, entropy_T = chunked_logprobs(hidden_TH, weight_VH, *arguments, chunk_size=2)
    logprobs_T.sum().backward()
    for values in (logprobs_T, entropy_T, hidden_TH.grad, weight_VH.grad):
        assert values.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def test_the_logits_of_all_tokens_never_exist():
    num_tokens, vocab, chunk_size = 64, 200, 8
    arguments = inputs(torch.float32, num_tokens=num_tokens, vocab=vocab)
    with LargestTensor() as seen:
        chunked_logprobs(*arguments, chunk_size=chunk_size).logprobs_T.sum().backward()
    assert chunk_size * vocab <= seen.largest < num_tokens * vocab / 4
    with LargestTensor() as seen:
        naive(*inputs(torch.float32, num_tokens=num_tokens, vocab=vocab))
    assert seen.largest == num_tokens * vocab
