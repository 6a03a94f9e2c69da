"""What the compilers for GPUs make of the kernels that a step launches, without a GPU.

Each Triton kernel is compiled as its function launches it, for shapes of Qwen3: the registers of a
thread, the bytes that do not fit into them, and the warps of it that a processor holds at once.
FlashAttention 4, where it is installed beside torch for CUDA, is compiled for forward and backward
as the trainer calls it, on tensors without numbers. Nothing is run, so no speed is known from this.
Run: make gpu-compiles, or, for the Triton kernels alone, python benchmarks/bench_compiled.py
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from machine import RESULTS, facts_of_run, table, write_results
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from training.shapes import QWEN3
from transformers import AttentionInterface
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from telescope_train.models import gpu_kernels
from telescope_train.models.attention.kinds import ATTENTION_KINDS
from telescope_train.models.head import HeadRule


class Card(NamedTuple):
    """What a kind of GPU is known by, and what one of its processors holds at most."""

    name: str
    warps: int
    programs: int
    processors: int


REGISTERS = 65_536
"""Of a processor, in 32 bits; a warp has 32 threads and takes them for each in eights."""
CARDS = {
    80: Card("A100", 64, 32, 108),
    89: Card("L40S", 48, 24, 142),
    90: Card("H100, H200", 64, 32, 132),
    100: Card("B200", 64, 32, 148),
    120: Card("RTX PRO 6000", 48, 24, 188),
}
TOKENS = 1024
HEADS = (
    *((64, 16, 8), (64, 14, 2), (96, 16, 8), (128, 16, 8), (128, 32, 4), (128, 16, 16)),
    *((192, 16, 8), (256, 16, 8)),
)
"""(size of a head, heads of queries, of keys and values) for which attention is compiled."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 128},
    {"softcap": 30.0},
    {"s_aux": True, "sliding_window": 128},
)
"""What layers of some models ask of attention besides; the last two are of Gemma and gpt-oss."""
NOTE = """\
# What compilers make of the kernels, for GPUs that are not here

Nothing was run: these are compiled for each card on a machine without one. Each Triton kernel is
compiled as its function launches it, for widths of 64 to 8,192, up to 64 heads, and 151,936 words.

{kernels}

The most registers of a thread and the fewest warps on a processor, over all shapes:

{rows}

FlashAttention 4 through the trainer's own attention, forward and backward, over packed samples:

{attention}

{facts}
"""


class _Driver:
    """Stands for the driver of a card: Triton asks it what to compile for."""

    def __init__(self, arch: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)
        # Kernels are kept by the number of the device.
        self.get_current_device = lambda: arch
        self.get_current_stream = lambda device: 0
        self.get_active_torch_device = lambda: torch.device("meta")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers of a thread, bytes of a thread in memory because they did not fit)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


@contextmanager
def compiling(arch: int) -> Iterator[list[dict[str, Any]]]:
    """Compile for a card what is launched inside the block, and collect what came of it."""
    card, rows = CARDS[arch], list[dict[str, Any]]()
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        registers, spilled = _usage(kernel.asm["cubin"])
        warps = kernel.metadata.num_warps
        of_program = -(-registers // 8) * 8 * 32 * warps
        programs = min(REGISTERS // of_program, card.warps // warps, card.programs)
        named = {name: value for name, value in options.items() if name.isupper()}
        rows.append(
            {
                "kernel": self.fn.__name__.strip("_").removesuffix("_kernel"),
                "card": arch,
                "dtype": str(args[0].dtype).removeprefix("torch."),
                **named,
                "registers": registers,
                "spilled": spilled,
                "warps": programs * warps,
                "shared": kernel.metadata.shared,
            }
        )
        return kernel

    processors = gpu_kernels._num_programs
    JITFunction.run = run
    gpu_kernels._num_programs = lambda device, num_warps: card.processors * 32 // num_warps
    driver.set_active(_Driver(arch))
    try:
        yield rows
    finally:
        JITFunction.run, gpu_kernels._num_programs = launch, processors


def launch_all(dtype: torch.dtype) -> None:
    """Call every function of the kernels for the shapes of models, with tensors of no memory."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def floats() -> Tensor:
        return new(TOKENS, dtype=torch.float32)

    for width in sorted({64, 128, 8_192} | {shape.hidden for shape in QWEN3}):
        for rounds in (False, True):
            x_RN, weight_N = new(TOKENS, width), new(width)
            normed = gpu_kernels.rms_norm(x_RN, weight_N, epsilon=1e-6, offset=0.0, rounds=rounds)
            gpu_kernels.rms_norm_backward(
                *(x_RN, x_RN, weight_N, normed.scales_R), offset=0.0, rounds=rounds
            )
    for heads, size in ((1, 64), (8, 64), (8, 128), (16, 128), (32, 128), (64, 128)):
        for is_backward in (False, True):
            cos_TD, sin_TD = new(TOKENS, size), new(TOKENS, size)
            gpu_kernels.rotate(new(TOKENS, heads, size), cos_TD, sin_TD, is_backward=is_backward)
    for activation in ("silu", "gelu_tanh"):
        gate = new(TOKENS, 3072)
        gpu_kernels.gated(gate, gate, activation)
        gpu_kernels.gated_backward(gate, gate, gate, activation)
    for cap in (None, 30.0):
        rule = HeadRule(scale=1.0, cap=cap)
        products_CW, targets_C = new(TOKENS, 151_936), new(TOKENS, dtype=torch.int64)
        running = (floats(), floats(), floats(), floats())
        gpu_kernels.fold_logits(products_CW, targets_C, floats(), running, rule)
        for grad_entropy_C in (None, floats()):
            upstream: Any = (targets_C, *(floats() for _ in range(4)), grad_entropy_C)
            gpu_kernels.logits_gradient(products_CW, upstream, rule, dtype)


def attention(arch: int, heads: tuple[int, int, int], options: dict[str, Any]) -> dict[str, Any]:
    """Compile FlashAttention 4 for a card, and return what came of it."""
    size, num_queries, num_keys = heads
    asked = ", ".join(f"{name} {value}" for name, value in options.items())
    row = {"card": arch, "head": size, "queries": num_queries, "keys": num_keys, "options": asked}
    (kind,) = (one for one in ATTENTION_KINDS if one.name == "flash_attn_4")
    kind.prepare()
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    started = time.perf_counter()
    with FakeTensorMode():

        def new(number: int) -> Tensor:
            shape = (1, number, TOKENS, size)
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)

        starts = torch.empty(5, dtype=torch.int32, device="cuda")
        if options.get("s_aux"):
            options = options | {"s_aux": torch.empty(num_queries, device="cuda")}
        try:
            output, _ = AttentionInterface()[kind.implementation](
                layer,
                *(new(number) for number in (num_queries, num_keys, num_keys)),
                None,
                scaling=size**-0.5,
                over="flash_attention_4",
                keys_K=None,
                cu_seq_lens_q=starts,
                cu_seq_lens_k=starts,
                max_length_q=TOKENS,
                max_length_k=TOKENS,
                **options,
            )
            function = output.grad_fn
            # torch's engine of gradients needs a GPU, what it would call does not.
            while not hasattr(type(function), "_forward_cls"):
                function = function.next_functions[0][0]
            grad = torch.empty_like(output[0])
            type(function)._forward_cls.backward(function, grad, None)
        except Exception as error:  # noqa: BLE001 - compilers of kernels have their own exceptions
            return row | {"refused": str(error).strip().splitlines()[0]}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def why_no_attention() -> str | None:
    """Return what is missing for compiling FlashAttention 4; None = nothing."""
    if torch.version.cuda is None:
        return "needs torch for CUDA"
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return "needs flash-attn-4"
    return None


def compile_attention(arch: int) -> list[dict[str, Any]]:
    """Return what came of FlashAttention 4 on a card, in a process that has none yet."""
    warnings.simplefilter("ignore")
    os.environ["FLASH_ATTENTION_ARCH"] = f"sm_{arch}"
    os.environ["CUTE_DSL_ARCH"] = f"sm_{arch}a"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(CARDS[arch].processors)
    return [
        *(attention(arch, heads, {}) for heads in HEADS),
        *(attention(arch, HEADS[3], options) for options in OPTIONS),
    ]


def _worst(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    own = [row for row in rows if row["kernel"] == name]
    cells = []
    for arch in dict.fromkeys(row["card"] for row in rows):
        mine = [row for row in own if row["card"] == arch]
        spilled = max(row["spilled"] for row in mine)
        cells.append(
            f"{max(row['registers'] for row in mine)}, {min(row['warps'] for row in mine)} of "
            f"{CARDS[arch].warps}" + (f", {spilled} bytes spilled" if spilled else "")
        )
    return [name, *cells]


def _attention_row(rows: Sequence[dict[str, Any]], key: tuple[Any, ...]) -> list[str]:
    size, queries, keys, options = key
    found = [
        row for row in rows if (row["head"], row["queries"], row["keys"], row["options"]) == key
    ]
    cells = [row.get("refused") or f"compiled in {row['seconds']} s" for row in found]
    return [f"{size}, {queries} and {keys}", options or "none", *cells]


def main() -> None:
    """Compile, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for arch in args.cards:
        with compiling(arch) as found:
            for dtype in (torch.bfloat16, torch.float32):
                launch_all(dtype)
        rows += found
        print(f"{CARDS[arch].name}: {len(found)} kernels", flush=True)
    why, tried = why_no_attention(), [arch for arch in args.cards if arch // 10 in (9, 10)]
    # What it compiles for is read once in a process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = pool.map(compile_attention, [] if why else tried)
        attention_rows = [row for rows_of_card in found for row in rows_of_card]
    heads = [CARDS[arch].name for arch in args.cards]
    keys = dict.fromkeys(
        (row["head"], row["queries"], row["keys"], row["options"]) for row in attention_rows
    )
    packages = ["torch", "triton", "transformers", *([] if why else ["flash-attn-4"])]
    command = "python benchmarks/bench_compiled.py" if why else "make gpu-compiles"
    facts = facts_of_run(command, *packages)
    counts = [str(sum(row["card"] == arch for row in rows)) for arch in args.cards]
    spills = [
        str(sum(row["card"] == arch and row["spilled"] > 0 for row in rows)) for arch in args.cards
    ]
    names = dict.fromkeys(row["kernel"] for row in rows)
    page = NOTE.format(
        kernels=table(("", *heads), [["compiled", *counts], ["of these spill", *spills]]),
        rows=table(("kernel", *heads), [_worst(rows, name) for name in names]),
        attention=f"Left out: it {why}."
        if why
        else table(
            ("size and heads", "more", *(CARDS[arch].name for arch in tried)),
            [_attention_row(attention_rows, key) for key in keys],
        ),
        facts="{facts}",
    )
    write_results("compiled", page, facts, [*rows, *attention_rows], args.results)
    print(page)


if __name__ == "__main__":
    main()
