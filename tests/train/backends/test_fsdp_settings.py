"""What one rank does as FSDP does it, and what `fp32_lm_head` changes."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telescope_train.backends.fsdp.sharding import shard, weight_mesh
from telescope_train.backends.step_loss import StepLoss
from telescope_train.models import packed
from telescope_train.models.load import torch_dtype
from telescope_train.models.logprobs import chunked_logprobs

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import backend_settings, grpo_batches


def sharded(worker):
    """Make FSDP hold the policy of `worker` as it does on several ranks."""
    backend = worker.backend
    layout = backend.rank_layout(backend._settings, 1)
    dtype = torch_dtype(backend._settings.compute_dtype)
    mesh = weight_mesh(layout, torch.device("cpu"))
    shard(backend._policy, mesh, dtype, offload=False)
    backend._computing = nullcontext
    return worker


def with_dtype(tiny, dtype):
    settings = backend_settings(tiny)
    model = settings.model.model_copy(update={"mixed_precision_dtype": dtype})
    return replace(settings, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_has_the_gradient_of_fsdp_bit_for_bit(tiny, start, dtype):
    found = []
    for change in (lambda worker: worker, sharded):
        worker = change(start(with_dtype(tiny, dtype)))
        (batches,) = grpo_batches(seq_len=64)
        assert len(batches) > 1
        worker.backend.accumulate_gradient(batches, version=0)
        values = {name: value.clone() for name, value in worker.backend.export_gradient()}
        assert all(value.dtype == torch.float32 for value in values.values())
        found.append((values, worker.logprobs(batches)))
    (ours, our_logprobs), (theirs, their_logprobs) = found
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert all(map(np.array_equal, our_logprobs, their_logprobs))


@pytest.mark.slow
def test_weights_are_rounded_once_for_all_rows_of_a_call(tiny, start, monkeypatch):
    worker = start(with_dtype(tiny, "bfloat16"))
    (batches,) = grpo_batches(seq_len=64)
    assert len(batches) > 1
    rounded = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda copies, masters: rounded.append(copy(copies, masters))
    )
    before = worker.logprobs(batches)
    worker.train_step(batches, version=0)
    after = worker.logprobs(batches)
    assert len(rounded) == 3
    assert not np.array_equal(before[0], after[0])
    weights = dict(worker.backend._policy.named_parameters())
    with worker.backend._computing():
        copies = dict(worker.backend._policy.named_parameters())
    assert {value.dtype for value in copies.values()} == {torch.bfloat16}
    assert all(torch.equal(copies[name], value.bfloat16()) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_float32_head_computes_the_log_probs_of_the_weights_it_has(
    tiny, start, monkeypatch, is_wide
):
    """Beside a head in float64 over the same bfloat16 values; without it logits are rounded."""
    seen = []

    def spy(hidden_TH, head, targets_T, temperatures_T, **options):
        result = chunked_logprobs(hidden_TH, head, targets_T, temperatures_T, **options)
        plain_TV = hidden_TH.double() @ head.weight_VH.double().T
        logits_TV = plain_TV / temperatures_T.double()[:, None]
        exact_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]
        seen.append((exact_T.detach(), result[0].detach().double()))
        return result

    settings = with_dtype(tiny, "bfloat16")
    model = settings.model.model_copy(update={"fp32_lm_head": is_wide})
    worker = start(replace(settings, model=model))
    monkeypatch.setattr(packed, "chunked_logprobs", spy)
    worker.logprobs(grpo_batches(seq_len=128)[0])
    errors = np.concatenate([(exact_T - found_T).abs().numpy() for exact_T, found_T in seen])
    assert errors.max() < 1e-5 if is_wide else errors.max() > 1e-3


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
"""Operations whose answer the host needs: on a GPU it waits for all that was launched before."""


class Waits(TorchDispatchMode):
    """Collects the operations that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        masks = tree_leaves(args[1:]) if name in ("index", "index_put_") else ()
        if name.startswith(WAITS) or any(getattr(one, "dtype", 0) == torch.bool for one in masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


ALGORITHMS = ("gspo", "cispo")


def of_algorithm(tiny, start, algorithm):
    """Return a worker of `algorithm` and several batches whose old log-probs are known."""
    settings = backend_settings(tiny)
    changes = {"algorithm": algorithm, "kl_in_loss": False, "entropy_coef": 0.01}
    section = settings.algorithm.model_copy(update=changes)
    (batches,) = grpo_batches(seq_len=64)
    assert len(batches) > 1
    batches = [replace(one, proximal_logprobs_T=one.behavior_logprobs_T) for one in batches]
    return start(replace(settings, algorithm=section)), batches


def when_numbers_are_read(monkeypatch, call):
    """Make the backend call `call` when the last backward pass is over, before it reads numbers."""
    read = StepLoss.after_backward

    def after_backward(losses):
        call()
        read(losses)

    monkeypatch.setattr(StepLoss, "after_backward", after_backward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS)]
)
def test_nobody_waits_for_a_gpu_between_the_first_forward_and_the_last_backward(
    tiny, start, monkeypatch, algorithm
):
    """Numbers are read once, when all is launched; an operation that would wait shows on a CPU."""
    worker, batches = of_algorithm(tiny, start, algorithm)
    # As on a GPU, where whether a mask is all true is not asked.
    for module in ("objective", "terms"):
        name = f"telescope_train.algorithms.{module}"
        monkeypatch.setattr(sys.modules[name], "all_true", lambda mask_T: False)
    reading = []
    when_numbers_are_read(monkeypatch, lambda: reading.append(list(waits.found)))
    with Waits() as waits:
        worker.backend.accumulate_gradient(batches, version=0)
    assert reading == [[]]
    assert waits.found, "reading the numbers waits: else this test could not see it"


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["grpo", *ALGORITHMS])
def test_cuda_itself_reports_no_wait_before_the_last_backward(tiny, start, monkeypatch, algorithm):
    """CUDA raises an error at each operation for which the host would wait."""
    worker, batches = of_algorithm(tiny, start, algorithm)
    worker.backend.accumulate_gradient(batches, version=0)  # compiles kernels, which may wait
    when_numbers_are_read(monkeypatch, lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
        worker.backend.accumulate_gradient(batches, version=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
