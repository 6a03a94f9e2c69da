"""Check that the output head follows its `HeadRule`, against transformers' own forward.

The forward gets hidden states instead of computing them, so that only the head is compared, in
float32 whatever the layers compute in. Some of them give logits far beyond any soft cap. The
reverse is available too: a head in float32, so that only the layers are compared. Dims: N tokens, H
hidden size, V rows of the head.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from telescope_core.base.errors import ConfigError
from telescope_train.models.logprobs import Head, chunked_logprobs

NUM_ROWS = 1024
"""Number of the head's first rows that are compared: a few megabytes in float32."""
HEAD_LIMIT = 1e-3
"""Nats; largest difference due to rounding in float32, for logits of up to 400."""
_SIZES = (0.5, 5.0, 30.0, 100.0)
"""Root mean square of the logits of a token."""
_TOKENS_OF_A_SIZE = 4
_TEMPERATURE = 0.7


class _GivenOutput(MoeModelOutputWithPast):
    """The output of the layers, with hidden states only, whatever a forward reads from it."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def head_difference(lm: PreTrainedModel, head: Head) -> float:
    """Return the largest difference of log-probs and entropies from those of `lm`, nats.

    `head` has all of the vocabulary; its first rows are compared. `lm` needs no memory for its
    weights. ConfigError if its forward cannot be called in this way.
    """
    weight_VH = head.weight_VH[:NUM_ROWS].float()
    bias_V = None if head.bias_V is None else head.bias_V[:NUM_ROWS].float()
    num_rows, width = weight_VH.shape
    generator = torch.Generator().manual_seed(0)
    num_tokens = len(_SIZES) * _TOKENS_OF_A_SIZE
    hidden_NH = torch.randn(num_tokens, width, generator=generator).to(weight_VH.device)
    targets_N = torch.randint(num_rows, (num_tokens,), generator=generator).to(weight_VH.device)
    sizes_N = torch.tensor(_SIZES, device=weight_VH.device).repeat(_TOKENS_OF_A_SIZE)
    found_N = (hidden_NH @ weight_VH.T).square().mean(1).sqrt().clamp_min(1e-30)
    hidden_NH *= (sizes_N / found_N / head.rule.scale).unsqueeze(1)
    logits_NV = _own_logits(lm, hidden_NH, weight_VH, bias_V)
    if logits_NV.shape != (num_tokens, num_rows):
        raise ConfigError(
            f"{type(lm).__name__} makes logits of shape {tuple(logits_NV.shape)} where its output "
            f"head has {num_rows} rows and {num_tokens} tokens are given; train another model"
        )
    all_NV = (logits_NV.float() / _TEMPERATURE).log_softmax(-1)
    ours = chunked_logprobs(
        hidden_NH,
        Head(weight_VH, 0, num_rows, None, bias_V, head.rule),
        targets_N,
        torch.full_like(sizes_N, _TEMPERATURE),
        chunk_size=num_tokens,
    )
    differences_2N = torch.stack(
        [
            ours.logprobs_T - all_NV.gather(1, targets_N[:, None])[:, 0],
            ours.entropy_T + (all_NV.exp() * all_NV).sum(-1),
        ]
    )
    return float(differences_2N.abs().max())


def _own_logits(
    lm: PreTrainedModel, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None
) -> Tensor:
    """Return the logits [N, V] that the forward of `lm` computes from these hidden states."""
    module = lm.get_output_embeddings()
    (prefix,) = (name for name, other in lm.named_modules() if other is module)
    weights = {f"{prefix}.weight": weight_VH}
    if bias_V is not None:
        weights[f"{prefix}.bias"] = bias_V
    arguments = {
        "input_ids": torch.zeros((1, len(hidden_NH)), dtype=torch.long, device=hidden_NH.device),
        "use_cache": False,
    }
    try:
        with _given_hidden_states(lm, hidden_NH):
            return functional_call(lm, weights, kwargs=arguments, strict=False).logits[0]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(lm).__name__} does more than this version knows between its last hidden "
            f"states and its logits ({error}); train another model"
        ) from error


def _given_hidden_states(lm: PreTrainedModel, hidden_NH: Tensor) -> AbstractContextManager[None]:
    """Make the layers of `lm` return `hidden_NH`, whatever their input."""

    def forward(*_: Any, **__: Any) -> _GivenOutput:
        return _GivenOutput(last_hidden_state=hidden_NH[None])

    return _other_forward(lm.base_model, forward)


def head_in_float32(lm: PreTrainedModel) -> AbstractContextManager[None]:
    """Make the head of `lm` compute in float32 or wider, so that the layers are compared.

    Rows of the head are widened a few at a time: a wide copy of all would take gigabytes.
    """
    head: Any = lm.get_output_embeddings()
    bias = getattr(head, "bias", None)

    def forward(hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        parts = [hidden.to(wide) @ rows.to(wide).T for rows in head.weight.split(NUM_ROWS)]
        logits = torch.cat(parts, -1)
        return logits if bias is None else logits + bias.to(wide)

    return _other_forward(head, forward)


@contextmanager
def _other_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
