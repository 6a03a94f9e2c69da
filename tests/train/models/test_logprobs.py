from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telescope_train.models import logprobs
from telescope_train.models.head import PLAIN, HeadRule
from telescope_train.models.logprobs import Head, chunked_logprobs
from telescope_train.plan import memory

T, H, V = 7, 5, 13


@pytest.fixture(params=[2**20, 12], ids=["one block", "many blocks"])
def _block_size(request, monkeypatch):
    """Split the vocabulary too, as large ones are."""
    monkeypatch.setattr(logprobs, "CPU_BLOCK", request.param)


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


def naive(hidden_TH, weight_VH, targets_T, temperatures_T, *, bias_V=0.0, rule=PLAIN):
    logits_TV = rule.scale * (hidden_TH @ weight_VH.T + bias_V)
    if rule.cap is not None:
        logits_TV = rule.cap * torch.tanh(logits_TV / rule.cap)
    all_TV = (logits_TV / temperatures_T[:, None]).log_softmax(1)
    return all_TV.gather(1, targets_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(1)


@pytest.mark.usefixtures("_block_size")
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("entropy_share", [0.0, -0.4])
def test_equals_log_softmax_forward_and_backward(chunk_size, entropy_share):
    grad_T = torch.linspace(-2, 3, T, dtype=torch.float64)
    ours, theirs = inputs(), inputs()
    found = chunked_logprobs(*ours, chunk_size=chunk_size, entropy_grad=bool(entropy_share))
    expected = naive(*theirs)
    torch.testing.assert_close(tuple(found), expected)
    for logprobs_T, entropy_T in (found, expected):
        total = grad_T @ logprobs_T + entropy_share * (grad_T.flip(0) @ entropy_T)
        total.backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)


@pytest.mark.usefixtures("_block_size")
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_of_both_are_right_in_float64(entropy_grad):
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()

    def both(hidden, weight):
        found = chunked_logprobs(
            *(hidden, weight[: V - 2], targets_T, temperatures_T),
            chunk_size=3,
            entropy_grad=entropy_grad,
        )
        return tuple(found) if entropy_grad else found.logprobs_T

    assert torch.autograd.gradcheck(both, (hidden_TH, weight_VH))


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(2, 30),
    st.integers(1, 15),
    st.integers(1, 60),
    st.integers(0, 10**6),
)
def test_how_it_is_cut_does_not_matter(num_tokens, vocab, chunk_size, block, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(num_tokens, H, generator=generator, dtype=torch.float64) * 4
    weight_VH = torch.randn(vocab, H, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, vocab, (num_tokens,), generator=generator)
    temperatures_T = torch.rand(num_tokens, generator=generator) + 0.1
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        for size, block_size in ((num_tokens, 2**20), (chunk_size, block)):
            patch.setattr(logprobs, "CPU_BLOCK", block_size)
            leaves = [hidden_TH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
            found = chunked_logprobs(
                *leaves, targets_T, temperatures_T, chunk_size=size, entropy_grad=True
            )
            (found.logprobs_T.sum() - 2 * found.entropy_T.sum()).backward()
            parts.append([*(value.detach() for value in found), *(leaf.grad for leaf in leaves)])
    for whole, cut in zip(*parts, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("_block_size")
@pytest.mark.parametrize("shift", [-300.0, 0.5, 1e4])
def test_a_shift_of_all_logits_changes_nothing(shift):
    hidden_TH, weight_VH, *arguments = inputs()
    ones_T1, shift_V1 = torch.ones(T, 1).double(), torch.full((V, 1), shift).double()
    moved = chunked_logprobs(
        torch.cat([hidden_TH, ones_T1], 1), torch.cat([weight_VH, shift_V1], 1), *arguments,
        chunk_size=3, entropy_grad=True,
    )  # fmt: skip
    plain = chunked_logprobs(hidden_TH, weight_VH, *arguments, chunk_size=3, entropy_grad=True)
    torch.testing.assert_close(tuple(moved), tuple(plain))
    gradients = [
        torch.autograd.grad(found.logprobs_T.sum() + found.entropy_T.sum(), hidden_TH)[0]
        for found in (moved, plain)
    ]
    torch.testing.assert_close(*gradients)


def test_rows_beyond_the_vocabulary_have_no_probability_and_no_gradient():
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()
    arguments = targets_T, temperatures_T
    padded = chunked_logprobs(hidden_TH, weight_VH[: V - 2], *arguments, chunk_size=4)
    cut = naive(hidden_TH, weight_VH[: V - 2], *arguments)
    torch.testing.assert_close(tuple(padded), cut)
    padded.logprobs_T.sum().backward()
    assert not weight_VH.grad[V - 2 :].any()
    assert weight_VH.grad[: V - 2].any()


@pytest.mark.parametrize("wrong", [-1, V - 2])
def test_a_token_outside_the_vocabulary_is_refused(wrong):
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()
    targets_T[3] = wrong
    with pytest.raises(ValueError, match=rf"from 0 to {V - 3}, got .*{wrong}"):
        chunked_logprobs(*(hidden_TH, weight_VH[: V - 2], targets_T, temperatures_T), chunk_size=4)


def test_targets_of_a_part_of_the_head_count_from_its_first_row():
    """Of a group of one rank, so that the part is the whole softmax."""
    first, (hidden_TH, weight_VH, _, temperatures_T) = 4, inputs()
    targets_T = torch.tensor([4, 5, V - 1, 4, 8, 9, 10])
    head = Head(weight_VH[first:], first, V, None)
    found = chunked_logprobs(hidden_TH, head, targets_T, temperatures_T, chunk_size=3)
    alone = inputs()
    expected = naive(alone[0], alone[1][first:], targets_T - first, temperatures_T)
    torch.testing.assert_close(tuple(found), expected)
    for logprobs_T in (found.logprobs_T, expected[0]):
        logprobs_T.sum().backward()
    torch.testing.assert_close(weight_VH.grad, alone[1].grad)
    assert not weight_VH.grad[:first].any()


RULES = [
    HeadRule(scale=0.3),
    HeadRule(cap=2.0),
    HeadRule(scale=3.0, cap=2.0),
    HeadRule(scale=0.1, cap=50.0),
]


@pytest.mark.usefixtures("_block_size")
@pytest.mark.parametrize("rule", [PLAIN, *RULES], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("entropy_share", [0.0, -0.4])
def test_a_scale_a_cap_and_a_bias_come_before_the_temperature(rule, has_bias, entropy_share):
    grad_T, gradients = torch.linspace(-2, 3, T, dtype=torch.float64), []
    for is_ours in (True, False):
        hidden_TH, weight_VH, *arguments = inputs()
        bias_V = torch.linspace(-1, 2, V, dtype=torch.float64, requires_grad=True)
        if is_ours:
            head = Head(weight_VH, 0, V, None, bias_V if has_bias else None, rule)
            logprobs_T, entropy_T = chunked_logprobs(
                hidden_TH, head, *arguments, chunk_size=3, entropy_grad=bool(entropy_share)
            )
            found = (logprobs_T, entropy_T)
        else:
            bias = {"bias_V": bias_V} if has_bias else {}
            logprobs_T, entropy_T = naive(hidden_TH, weight_VH, *arguments, rule=rule, **bias)
            torch.testing.assert_close(found, (logprobs_T, entropy_T))
        (grad_T @ logprobs_T + entropy_share * (grad_T.flip(0) @ entropy_T)).backward()
        gradients.append((hidden_TH.grad, weight_VH.grad, bias_V.grad))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_every_rule_are_right_in_float64(rule):
    hidden_TH, weight_VH, *arguments = inputs()
    bias_V = torch.linspace(-1, 2, V, dtype=torch.float64, requires_grad=True)

    def both(hidden, weight, bias):
        head = Head(weight, 0, V, None, bias, rule)
        return tuple(chunked_logprobs(hidden, head, *arguments, chunk_size=3, entropy_grad=True))

    assert torch.autograd.gradcheck(both, (hidden_TH, weight_VH, bias_V))


@pytest.mark.parametrize("wide_logits", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_narrow_head_has_its_rule_as_well(rule, wide_logits):
    narrow = inputs(torch.bfloat16, vocab=400, hidden=16)
    bias_V = torch.linspace(-1, 2, 400).to(torch.bfloat16).requires_grad_()
    head = Head(narrow[1], 0, 400, None, bias_V, rule)
    found = chunked_logprobs(
        narrow[0], head, *narrow[2:], chunk_size=4, entropy_grad=True, wide_logits=wide_logits
    )
    wide = [tensor.detach().double().requires_grad_() for tensor in (*narrow[:2], bias_V)]
    exact = naive(*wide[:2], *narrow[2:], bias_V=wide[2], rule=rule)
    for ours, theirs in zip(found, exact, strict=True):
        error = (ours.double() - theirs).abs().max()
        assert error < (1e-4 if wide_logits else 0.2)
    for both in (found, exact):
        (both[0].sum() + both[1].sum()).backward()
    for ours, theirs in zip((*narrow[:2], bias_V), wide, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() < 0.05 * theirs.grad.norm()


@pytest.mark.parametrize("rule", [PLAIN, HeadRule(scale=2.0, cap=5.0)], ids=str)
@pytest.mark.parametrize(("where", "largest"), [(0, 5.0), (-1, 5.0), (0, 2000.0)])
def test_ranks_with_parts_of_the_head_find_what_one_with_all_of_it_does(rule, where, largest):
    """The largest logits are all in one rank's part, so that the sums of the other are rescaled."""
    cut, bias_V = 5, torch.zeros(V, dtype=torch.float64)
    bias_V[where] = largest
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()
    options = {"chunk_size": 3, "entropy_grad": True}
    whole = Head(weight_VH, 0, V, None, bias_V, rule)
    found = chunked_logprobs(hidden_TH, whole, targets_T, temperatures_T, **options)
    (found.logprobs_T.sum() - 2 * found.entropy_T.sum()).backward()
    store, results = HashStore(), {}

    def run(rank: int) -> None:
        part = slice(0, cut) if rank == 0 else slice(cut, V)
        hidden, weight = hidden_TH.detach().requires_grad_(), weight_VH.detach().requires_grad_()
        group = ProcessGroupGloo(store, rank, 2)
        head = Head(weight[part], part.start, V, group, bias_V[part], rule)
        mine = chunked_logprobs(hidden, head, targets_T, temperatures_T, **options)
        (mine.logprobs_T.sum() - 2 * mine.entropy_T.sum()).backward()
        results[rank] = (*mine, hidden.grad, weight.grad)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (0, 1)))
    for mine in results.values():
        torch.testing.assert_close(mine[:2], tuple(found))
    torch.testing.assert_close(results[0][2] + results[1][2], hidden_TH.grad)
    torch.testing.assert_close(results[0][3] + results[1][3], weight_VH.grad)


def test_no_tokens_have_no_log_probs():
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs(num_tokens=0)
    found = chunked_logprobs(hidden_TH, weight_VH, targets_T, temperatures_T, chunk_size=4)
    assert found.logprobs_T.shape == found.entropy_T.shape == (0,)
    found.logprobs_T.sum().backward()
    assert not weight_VH.grad.any()


def test_only_what_needs_a_gradient_gets_one():
    hidden_TH, weight_VH, *arguments = inputs()
    chunked = chunked_logprobs(hidden_TH, weight_VH.detach(), *arguments, chunk_size=4)
    assert not chunked.entropy_T.requires_grad
    chunked.logprobs_T.sum().backward()
    assert hidden_TH.grad is not None
    frozen = chunked_logprobs(hidden_TH.detach(), weight_VH, *arguments, chunk_size=4)
    frozen.logprobs_T.sum().backward()
    assert weight_VH.grad is not None


@pytest.mark.slow
@pytest.mark.usefixtures("_block_size")
def test_reductions_are_wide_for_a_narrow_model():
    hidden_TH, weight_VH, *arguments = inputs(torch.bfloat16, vocab=4000, hidden=16)
    logprobs_T, entropy_T = chunked_logprobs(
        hidden_TH, weight_VH, *arguments, chunk_size=4, wide_logits=False
    )
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    logits_TV = (hidden_TH @ weight_VH.T).double()
    exact_T, exact_entropy_T = naive(logits_TV, torch.eye(4000).double(), *arguments)
    torch.testing.assert_close(logprobs_T.double(), exact_T, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_T.double(), exact_entropy_T, atol=1e-5, rtol=0)
    logprobs_T.sum().backward()
    assert hidden_TH.grad.dtype == weight_VH.grad.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.usefixtures("_block_size")
def test_wide_logits_are_those_of_the_weights_without_a_rounding():
    narrow = inputs(torch.bfloat16, vocab=4000, hidden=64)
    exact_T, exact_entropy_T = naive(narrow[0].double(), narrow[1].double(), *narrow[2:])
    wide = chunked_logprobs(*narrow, chunk_size=4)
    torch.testing.assert_close(wide.logprobs_T.double(), exact_T, atol=1e-4, rtol=0)
    torch.testing.assert_close(wide.entropy_T.double(), exact_entropy_T, atol=1e-4, rtol=0)
    rounded = chunked_logprobs(*narrow, chunk_size=4, wide_logits=False)
    assert (rounded.logprobs_T - exact_T).abs().max() > 1e-3, "this is what it would cost"


def test_the_gradient_of_a_narrow_weight_is_summed_over_many_chunks_without_rounding():
    """Added up in bfloat16, whatever is below a 256th of the sum would be lost."""
    narrow = inputs(torch.bfloat16, vocab=40, hidden=8, num_tokens=2000)
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow[:2]]
    for found in (chunked_logprobs(*narrow, chunk_size=4), naive(*wide, *narrow[2:])):
        found[0].sum().backward()
    difference = narrow[1].grad.double() - wide[1].grad
    assert difference.norm() < 0.005 * wide[1].grad.norm()


def test_the_gradient_of_a_narrow_model_is_as_exact_as_its_numbers():
    narrow = inputs(torch.bfloat16, vocab=400, hidden=16)
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow[:2]]
    for found in (
        chunked_logprobs(*narrow, chunk_size=4, entropy_grad=True),
        naive(*wide, *narrow[2:]),
    ):
        (found[0].sum() + found[1].sum()).backward()
    for ours, exact in zip(narrow[:2], wide, strict=True):
        error = (ours.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 0.02


def test_a_temperature_scales_the_logits_of_its_own_tokens():
    hidden_TH, weight_VH, targets_T, temperatures_T = inputs()
    found = chunked_logprobs(hidden_TH, weight_VH, targets_T, temperatures_T, chunk_size=4)
    scaled_TH = hidden_TH / temperatures_T[:, None]
    plain = chunked_logprobs(scaled_TH, weight_VH, targets_T, torch.ones(T), chunk_size=4)
    torch.testing.assert_close(tuple(found), tuple(plain))


@pytest.mark.usefixtures("_block_size")
def test_extreme_logits_stay_finite():
    hidden_TH, weight_VH, *arguments = inputs(torch.float32, scale=1e4)
    logprobs_T, entropy_T = chunked_logprobs(
        hidden_TH, weight_VH, *arguments, chunk_size=2, entropy_grad=True
    )
    (logprobs_T.sum() + entropy_T.sum()).backward()
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
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as seen:
        patch.setattr(logprobs, "CPU_BLOCK", chunk_size * 50)
        chunked_logprobs(*arguments, chunk_size=chunk_size).logprobs_T.sum().backward()
    assert seen.largest < chunk_size * vocab
    with LargestTensor() as seen:
        naive(*inputs(torch.float32, num_tokens=num_tokens, vocab=vocab))
    assert seen.largest == num_tokens * vocab


def test_the_plan_of_a_run_knows_how_large_a_block_is():
    assert memory._logits_of_a_block("cuda") == logprobs.DEVICE_BLOCK
    assert memory._logits_of_a_block("cpu") == logprobs.CPU_BLOCK


def test_no_tokens_give_no_logprobs_and_a_gradient_of_zeros():
    """Under context parallelism a rank's slice may hold no trained token."""
    hidden = torch.zeros(0, 4, requires_grad=True)
    head = torch.ones(7, 4, requires_grad=True)
    empty = torch.zeros(0)
    logprobs, _ = chunked_logprobs(hidden, head, empty, empty, chunk_size=3)
    logprobs.sum().backward()
    assert len(logprobs) == 0
    assert torch.equal(head.grad, torch.zeros(7, 4))
