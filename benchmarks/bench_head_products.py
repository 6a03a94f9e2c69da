"""Log-probs and their gradients: the head's products by torch's default and by oneDNN, in turns.

Processor time of one thread, medians. Where oneDNN is not the faster one by the choice that is made
at the start (AMD processors with AVX-512), both sides are the same.
Run: OMP_NUM_THREADS=1 python benchmarks/bench_head_products.py
"""

import statistics
import time

import torch
from machine import facts_of_run, table, write_results

from telescope_train.models import cpu_kernels
from telescope_train.models.logprobs import chunked_logprobs

SHAPES = ((2048, 192, 4096), (1024, 576, 49_152), (2048, 1024, 32_000))
REPEATS = 5
HEAD = (
    *("tokens", "hidden", "vocabulary", "dtype"),
    *("forward before, ms", "now", "with backward before, ms", "now", "times as fast"),
)
NOTE = """\
# Products of the output head

`chunked_logprobs` with blocks of 2,048 tokens, forward alone and with the gradients of both inputs.
`before` the products are torch's, `now` those for logits and for the gradient of the hidden states
are oneDNN's in float32; in bfloat16 the logits are multiplied in float32 too, all else is torch's,
which calls oneDNN itself. The sum into the gradient of the head is no faster in oneDNN and stays.

{facts}
"""


def measured(num_tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> list[str]:
    """Return one row."""
    torch.manual_seed(0)
    hidden_TH = (torch.randn(num_tokens, hidden) / 2).to(dtype).requires_grad_()
    head_VH = (torch.randn(vocab, hidden) / 20).to(dtype).requires_grad_()
    targets_T, ones_T = torch.randint(0, vocab, (num_tokens,)), torch.ones(num_tokens)
    times: dict[str, list[tuple[float, float]]] = {"before": [], "now": []}
    chosen = cpu_kernels.has_onednn_product
    for repeat in range(REPEATS + 1):
        for name, found in times.items():
            cpu_kernels.has_onednn_product = chosen if name == "now" else _never
            started_s = time.process_time()
            scored = chunked_logprobs(hidden_TH, head_VH, targets_T, ones_T, chunk_size=2048)
            forward_s = time.process_time() - started_s
            scored.logprobs_T.sum().backward()
            if repeat:
                found.append((forward_s, time.process_time() - started_s))
    cpu_kernels.has_onednn_product = chosen
    before, now = (
        [1e3 * statistics.median(c) for c in zip(*f, strict=True)] for f in times.values()
    )
    return [
        *(f"{one:,}" for one in (num_tokens, hidden, vocab)),
        str(dtype).removeprefix("torch."),
        *(f"{one:.0f}" for one in (before[0], now[0], before[1], now[1])),
        f"{before[1] / now[1]:.2f}",
    ]


def _never() -> bool:
    return False


def main() -> None:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    facts = facts_of_run("OMP_NUM_THREADS=1 python benchmarks/bench_head_products.py", "torch")
    dtypes = (torch.float32, torch.bfloat16)
    rows = [measured(*shape, dtype) for shape in SHAPES for dtype in dtypes]
    text = table(HEAD, rows)
    print(text)
    found = [dict(enumerate(row)) for row in rows]
    write_results("head_products", f"{NOTE}\n{text}", facts, found)


if __name__ == "__main__":
    main()
