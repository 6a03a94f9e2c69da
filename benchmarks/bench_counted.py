"""What a training step launches, moves and multiplies on a GPU, counted without one.

The trainer's own code runs on tensors of the device "meta", which have a size and no numbers, and
for which it takes the way of a GPU. An operation that reaches torch's dispatcher, and a kernel of
`gpu_kernels`, is one launch; its bytes are those of its inputs and outputs, but for products and
attention, of which FLOPs are counted. A model of an H100 predicts the time: 6 us of CPU a launch,
2.5 TB/s, 650 TFLOP/s, and attention at the rate measured on 26 November 2026. It predicted the step
of that day, before the kernels, to 3 %.
Run: python benchmarks/bench_counted.py
"""

import os

# The kernels have to agree with a layer before they stand for it: here in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import RESULTS, facts_of_run, table, write_results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from training.shapes import QWEN3, Shape, sample_lengths
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from telescope_train.backends.fsdp.policy import compute_copies
from telescope_train.models.fused_layers import fuse_layers, gpu_kernels
from telescope_train.models.logprobs import chunked_logprobs

LAUNCH_S, BYTES_PER_S, FLOPS_PER_S = 6e-6, 2.5e12, 650e12
"""Of the model of an H100 80 GB HBM3: what a launch costs the CPU, and what the GPU can do."""
ATTENTION_S, ATTENTION_PASSES = 0.141 / 4, 4.5
"""Measured for a batch of 8,192 tokens of Qwen3 0.6B: forward twice and backward, in forwards, with
FlashAttention 2."""
NEWER = 1.5
"""How many times as fast FlashAttention 3 is on Hopper at least, as its paper says
(arXiv:2407.08608); FlashAttention 4 has the same design there."""
PEAK = 989e12
BATCHES = 4
"""Of a step, in the predictions."""
MULTI_TENSOR_NUMBERS, MULTI_TENSOR_PARTS = 320 * 65_536, 36
"""What one launch of torch's operations over lists of tensors takes at most: numbers, and tensors
with their gradients and moments."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_NO_KERNEL = {
    *("detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh"),
    *("sym_size", "is_same_size", "promote_types"),
}
_COUNTED = "telescope_counted"
NOTE = """\
# What a step on a GPU launches and moves, counted without one

One decoder layer, the head and the optimizer of Qwen3 0.6B for {tokens:,} tokens in bfloat16, as
the trainer computes them on one GPU. `before` is the state of 26 November 2026 (commit d5988a58).
Bytes are those of all but products and attention. The optimizer is all of AdamW; its launches are
those of torch's operations over lists of tensors.

{parts}

Steps of {batches} packed batches, predicted for an H100 80 GB HBM3 by the model in the script. The
predictions are no measurements. FlashAttention 2 is as it was measured there, and FlashAttention 4,
which the CUDA stack brings, is taken to be {newer} times as fast.

{steps}

{facts}
"""
PARTS_HEAD = ("part", "launches", "before", "MB", "before", "GFLOP of products")
STEPS_HEAD = (
    *("shape", "tokens of a batch", "recomputed", "tokens/s, FlashAttention 2", "MFU"),
    *("tokens/s, FlashAttention 4", "MFU"),
)
BEFORE = {
    "layer, forward": (54, 297),
    "layer, backward": (103, 694),
    "head, forward": (150, 8_125),
    "head, backward": (120, 10_304),
}
"""Launches and MB, counted the same way before."""


@dataclass(kw_only=True)
class Count:
    """What one part of a step does."""

    launches: float = 0
    num_bytes: float = 0
    """Read and written by what is no product."""
    flops: float = 0
    operations: Counter = field(default_factory=Counter)

    def add(self, operation: str, num_bytes: float) -> None:
        """Add a launch."""
        self.launches += 1
        self.num_bytes += num_bytes
        self.operations[operation] += 1

    def plus(self, other: "Count", factor: float = 1.0) -> "Count":
        """Return this and `factor` times the other."""
        return Count(
            launches=self.launches + factor * other.launches,
            num_bytes=self.num_bytes + factor * other.num_bytes,
            flops=self.flops + factor * other.flops,
        )

    @property
    def gpu_s(self) -> float:
        """Predicted for an H100, without attention."""
        return self.num_bytes / BYTES_PER_S + self.flops / FLOPS_PER_S


class _Counting(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in _NO_KERNEL:
            is_product = name in _PRODUCTS
            self._count.add(name, 0 if is_product else bytes_of(args, kwargs, out))
        return out


def bytes_of(*tensors: Any) -> int:
    """Return the bytes of all tensors in nested containers, each once."""
    leaves = (one for one in tree_leaves(tensors) if isinstance(one, Tensor))
    return sum({id(one): one.nbytes for one in leaves}.values())


class _Launch:
    """Stands for a Triton kernel, and counts it where it would be launched."""

    def __init__(self, name: str, count: Count) -> None:
        self._name, self._count = name, count

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches the kernel."""
        return lambda *args, **options: self._count.add(self._name, bytes_of(args, options))


@contextmanager
def counting() -> Iterator[Count]:
    """Count what is computed inside the block."""
    count, kernels = Count(), gpu_kernels()
    own = {name: value for name, value in vars(kernels).items() if name.endswith("_kernel")}
    try:
        for name in own:
            setattr(kernels, name, _Launch(name, count))
        with FlopCounterMode(display=False) as flops, _Counting(count):
            yield count
    finally:
        for name, value in own.items():
            setattr(kernels, name, value)
    count.flops = flops.get_total_flops()


class _Attention(torch.autograd.Function):
    """Stands for attention over packed samples, whose launches and time are added afterwards."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _Attention.apply(query, key, value), None


def made(shape: Shape, num_layers: int) -> Qwen3ForCausalLM:
    """Return a model without memory, with the kernels that a GPU's has."""
    AttentionInterface.register(_COUNTED, _attention)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        attn_implementation=_COUNTED,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    fused = fuse_layers(model, gpu_kernels(), torch.device("cpu"), torch.bfloat16)
    assert fused.norms == 4 * num_layers + 1, "the kernels agree with the layers"
    assert fused.mlps == num_layers
    return model


@cache
def layer(shape: Shape, num_tokens: int) -> tuple[Count, Count]:
    """Return forward and backward of one decoder layer: half of what a model of 3 does beyond 1."""
    one, three = (_body(shape, number, num_tokens) for number in (1, 3))
    pairs = zip(three, one, strict=True)
    forward, backward = (Count().plus(large.plus(small, -1), 0.5) for large, small in pairs)
    # Attention: one kernel forward; backward one before, one for all gradients, and one after.
    return forward.plus(Count(launches=1)), backward.plus(Count(launches=3))


def _body(shape: Shape, num_layers: int, num_tokens: int) -> tuple[Count, Count]:
    model = made(shape, num_layers).to(torch.bfloat16)
    ids = torch.empty(1, num_tokens, dtype=torch.long, device="meta")
    with counting() as forward:
        positions = torch.empty_like(ids)
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    with counting() as backward:
        hidden.last_hidden_state.sum().backward()
    return forward, backward


def head(shape: Shape, num_tokens: int, *, entropy_grad: bool = False) -> tuple[Count, Count]:
    """Return forward and backward of log-probs and entropies from hidden states."""
    hidden_TH, weight_VH = (
        torch.empty(size, shape.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for size in (num_tokens, shape.vocab)
    )
    targets_T = torch.empty(num_tokens, dtype=torch.long, device="meta")
    temperatures_T = torch.empty(num_tokens, device="meta")
    with counting() as forward:
        found = chunked_logprobs(
            *(hidden_TH, weight_VH, targets_T, temperatures_T),
            chunk_size=1024,
            entropy_grad=entropy_grad,
        )
    total = found.logprobs_T.sum() + (found.entropy_T.sum() if entropy_grad else 0.0)
    with counting() as backward:
        total.backward()
    return forward, backward


@cache
def weights(shape: Shape) -> tuple[Count, Count, Count]:
    """Return what a step does to weights: rounding, adding up one batch's gradients, AdamW.

    The rounded copies and the sums are those of `compute_copies`; of AdamW and the norm it is
    counted how many numbers they read and write.
    """
    model = made(shape, shape.layers)
    with counting() as rounding, compute_copies(model, torch.bfloat16):
        rounded = list(model.parameters())
    sizes = [parameter.numel() for parameter in model.parameters()]
    for copy_, master in zip(rounded, model.parameters(), strict=True):
        copy_.grad = torch.empty_like(copy_)
        master.grad = torch.empty_like(master)
    with counting() as adding:
        for copy_, master in zip(rounded, model.parameters(), strict=True):
            master.grad.add_(copy_.grad)
    launches = max(-(-sum(sizes) // MULTI_TENSOR_NUMBERS), -(-len(sizes) // MULTI_TENSOR_PARTS))
    rounding.launches = launches
    # AdamW reads weight, gradient and two moments and writes all but the gradient.
    adamw = Count(launches=launches, num_bytes=28 * sum(sizes))
    return rounding, adding, adamw


def step_s(shape: Shape, lengths: list[int], *, recomputed: bool, speed: float = 1.0) -> float:
    """Return the predicted seconds of a step of `BATCHES` rows that hold samples of `lengths`.

    Attention is `speed` times as fast as it was measured.
    """
    forward, backward = layer(shape, 1024)
    num_tokens = sum(lengths) // BATCHES  # of a row: its padding is not computed
    factor = num_tokens / 1024
    forwards = 2 if recomputed else 1
    gpu_s = shape.layers * factor * (forwards * forward.gpu_s + backward.gpu_s)
    launches = shape.layers * (forwards * forward.launches + backward.launches)
    for part in head(shape, num_tokens):
        gpu_s, launches = gpu_s + part.gpu_s, launches + part.launches
    small, measured = QWEN3[0], sample_lengths(np.random.default_rng(0), 8192, BATCHES)
    pairs = sum(one**2 for one in lengths) / sum(one**2 for one in measured)
    pairs *= shape.layers * shape.heads * shape.head_dim
    pairs /= small.layers * small.heads * small.head_dim
    gpu_s += ATTENTION_S / speed * pairs * (forwards + 2.5) / ATTENTION_PASSES
    rounding, adding, adamw = weights(shape)
    gpu_s, launches = gpu_s + adding.gpu_s, launches + adding.launches
    once = rounding.plus(adamw)
    return BATCHES * max(gpu_s, launches * LAUNCH_S) + once.gpu_s


def main() -> None:
    """Count, predict, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--shapes", type=int, default=len(QWEN3), help="only so many, the first")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    small = QWEN3[0]
    rounding, adding, adamw = weights(small)
    named = dict(
        zip(
            ("layer, forward", "layer, backward", "head, forward", "head, backward"),
            (*layer(small, args.tokens), *head(small, args.tokens)),
            strict=True,
        )
    )
    named |= {
        "weights rounded, once a step": rounding,
        "gradients added up, a batch": adding,
        "optimizer, once a step": adamw,
    }
    parts = [
        {
            "part": name,
            "launches": round(count.launches),
            "mb": count.num_bytes / 1e6,
            "gflop": count.flops / 1e9,
            "before": BEFORE.get(name) if args.tokens == 1024 else None,
        }
        for name, count in named.items()
    ]
    steps = []
    for shape, seq_len, recomputed in (
        *((small, 8_192, one) for one in (True, False)),
        *((small, 32_768, one) for one in (True, False)),
        *(
            (shape, seq_len, False)
            for shape in QWEN3[1 : args.shapes]
            for seq_len in (8_192, 32_768)
        ),
    ):
        lengths = sample_lengths(np.random.default_rng(0), seq_len, BATCHES)
        seconds = step_s(shape, lengths, recomputed=recomputed)
        newer_s = step_s(shape, lengths, recomputed=recomputed, speed=NEWER)
        steps.append(
            {
                "shape": shape.name,
                "seq_len": seq_len,
                "recomputed": "all" if recomputed else "nothing",
                "tokens_per_s": sum(lengths) / seconds,
                "mfu": shape.training_flops(lengths) / seconds / PEAK,
                "newer_tokens_per_s": sum(lengths) / newer_s,
                "newer_mfu": shape.training_flops(lengths) / newer_s / PEAK,
            }
        )
    facts = facts_of_run("python benchmarks/bench_counted.py", "torch", "transformers")
    page = NOTE.format(
        tokens=args.tokens,
        batches=BATCHES,
        newer=NEWER,
        parts=table(PARTS_HEAD, [_part_row(one) for one in parts]),
        steps=table(STEPS_HEAD, [_step_row(one) for one in steps]),
        facts="{facts}",
    )
    write_results("counted", page, facts, [*parts, *steps], args.results)
    print(page)


def _part_row(part: dict[str, Any]) -> list[str]:
    launches, megabytes = part["before"] or ("", "")
    before = [f"{one:,}" if one else "" for one in (launches, megabytes)]
    return [
        part["part"],
        *(f"{part['launches']:,}", before[0], f"{part['mb']:,.0f}", before[1]),
        f"{part['gflop']:,.0f}",
    ]


def _step_row(step: dict[str, Any]) -> list[str]:
    return [
        *(step["shape"], f"{step['seq_len']:,}", step["recomputed"]),
        *(f"{step['tokens_per_s']:,.0f}", f"{100 * step['mfu']:.0f} %"),
        *(f"{step['newer_tokens_per_s']:,.0f}", f"{100 * step['newer_mfu']:.0f} %"),
    ]


if __name__ == "__main__":
    main()
