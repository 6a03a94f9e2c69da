"""Every attention over packed rows, and over rows with shared prefixes, against float64.

The reference is transformers' own model in float64 on the CPU, one sample at a time.
Dims: M trained tokens of a batch, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from gpu_parts.part import Found, Part, left_out, within
from prefix_trees import plain_batches, random_tree, sharing_all
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.batches.batch import PackedBatch
from telescope_train.models.attention.kinds import (
    ATTENTION_KINDS,
    SHARING_KINDS,
    AttentionKind,
    AttentionNeeds,
)
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.row import packed_row

VOCAB = 61
MOST = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest relative difference of log-probs and gradient. A leak between samples gives 0.5."""
Columns = tuple[torch.Tensor, torch.Tensor]


def model() -> Qwen3ForCausalLM:
    """Return a random model whose attention is far from uniform."""
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
        )
    )
    for parameter in lm.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[-1] ** -0.5)
    return lm


def batches(num_samples: int = 12) -> tuple[PackedBatch, PackedBatch]:
    """Return samples that begin alike, each by itself in a row, and the same with shared tokens."""
    samples = random_tree(np.random.default_rng(0), num=num_samples, vocab=VOCAB)
    ((plain,),) = plain_batches(samples)
    return plain, sharing_all(plain)


def loss_of(logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return a loss to which each token counts differently."""
    weights_M = torch.from_numpy(np.cos(np.arange(len(logprobs_M)) * 1.7))
    return (weights_M.to(logprobs_M) * logprobs_M).sum()


def gradient_of(lm: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of all parameters, in float64 on the CPU."""
    return torch.cat([one.grad.double().cpu().flatten() for one in lm.parameters()])


def reference(lm: Qwen3ForCausalLM, batch: PackedBatch) -> Columns:
    """Return log-probs and gradient, one sample at a time."""
    lm = copy.deepcopy(lm).double()
    row = packed_row(batch, torch.device("cpu"))
    own = [batch.token_ids_T[batch.sequence_ids_T == n] for n in range(len(batch.lengths_S))]
    logits = [lm(torch.tensor(ids, dtype=torch.long)[None], use_cache=False).logits for ids in own]
    logits_MV = torch.cat([one[0] for one in logits])[row.predictors_M]
    all_MV = (logits_MV / row.temperatures_M[:, None].double()).log_softmax(-1)
    logprobs_M = all_MV.gather(1, row.targets_M[:, None])[:, 0]
    loss_of(logprobs_M).backward()
    return logprobs_M.detach(), gradient_of(lm)


def packed(
    lm: Qwen3ForCausalLM,
    batch: PackedBatch,
    kind: AttentionKind,
    device: torch.device,
    change: Callable[[torch.nn.Module], None] = lambda _: None,
) -> Columns:
    """Return the same of a whole row, by `kind`; `change` changes the copy that computes it."""
    copied = copy.deepcopy(lm).to(device)
    change(copied)
    policy = PackedPolicy(copied, chunk_size=64, vocab_size=VOCAB)
    policy.use_attention(kind)
    row = packed_row(batch, device, multiple_of=8, share=kind in SHARING_KINDS)
    logprobs_M, _ = policy(row)
    loss_of(logprobs_M).backward()
    return logprobs_M.detach().double().cpu(), gradient_of(policy.lm)


def difference(found: Columns, expected: Columns) -> float:
    """Return the larger relative difference, of log-probs and of the gradient."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def check(kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> Found:
    """Compare `kind` with the reference."""
    if (why := kind.reason_against(AttentionNeeds(device=device, dtype=dtype))) is not None:
        return left_out(why)
    # The reference has the weights that 16 bits can say, so only the computation is rounded.
    lm = model().to(dtype)
    plain, shared = batches()
    expected = reference(lm, plain)
    rows = [plain, shared] if kind in SHARING_KINDS else [plain]
    worst = max(difference(packed(lm, row, kind, device), expected) for row in rows)
    return within(f"{worst:.1e} on {device.type}", worst, MOST[dtype])


def parts(on_gpu: bool) -> Iterator[Part]:
    """Yield one part for each kind and dtype."""
    device = torch.device("cuda" if on_gpu else "cpu")
    for dtype in MOST if on_gpu else (torch.float32,):
        for kind in (*ATTENTION_KINDS, *SHARING_KINDS):
            said = str(dtype).removeprefix("torch.")

            def run(kind: AttentionKind = kind, dtype: torch.dtype = dtype) -> Found:
                return check(kind, device, dtype)

            yield Part(
                name=f"attention: {kind.name}, {said}",
                limit=f"{MOST[dtype]:g} from float64, log-probs and gradient",
                run=run,
            )
