"""Every kind of attention the trainer can use over packed rows, in the order they are tried.

A kind says when it is out of the question and what the layers are given; whether it really keeps
packed sequences apart is proved by `attention_choice`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from telescope_train.models.attention.blocks import PACKED_ATTENTION, register_packed_attention
from telescope_train.models.attention.sequences import Sequences
from telescope_train.models.attention.varlen import (
    VARLEN_ATTENTION,
    has_varlen,
    register_varlen_attention,
)

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What an attention has to work with."""

    device: torch.device
    dtype: torch.dtype
    """That the layers compute in."""
    has_windows: bool
    """Some layers attend to a sliding window only."""
    is_row_shared: bool = False
    """Each rank has a slice of the row: context parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One way to attend."""

    name: str
    implementation: str
    """What transformers calls it."""
    reason_against: Callable[[AttentionNeeds], str | None]
    """Why it cannot serve these needs; None = it may be tried."""
    arguments: Callable[[Sequences], dict[str, object]]
    """What every layer is given beside queries, keys and values."""
    prepare: Callable[[], None] = lambda: None
    """Make it known to transformers."""
    takes_sequences: bool = False
    """It needs no more than `arguments`: no mask, no positions. Context parallelism asks for it."""


def _varlen_arguments(sequences: Sequences) -> dict[str, object]:
    return {
        "cu_seq_lens_q": sequences.starts,
        "cu_seq_lens_k": sequences.starts,
        "max_length_q": sequences.longest,
        "max_length_k": sequences.longest,
    }


def _no_half_cuda(needs: AttentionNeeds) -> str | None:
    if needs.device.type != "cuda":
        return "needs a CUDA device"
    return None if needs.dtype in HALF else "needs layers in bfloat16 or float16"


def _against_flash(needs: AttentionNeeds) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return _no_half_cuda(needs)


def _against_varlen(needs: AttentionNeeds) -> str | None:
    return _no_half_cuda(needs) if has_varlen() else "this torch has no varlen attention"


def _against_flex(needs: AttentionNeeds) -> str | None:
    # torch's flex attention has no backward on the CPU.
    return None if needs.device.type == "cuda" else "needs a CUDA device"


def _against_packed(needs: AttentionNeeds) -> str | None:
    return "knows no sliding windows" if needs.has_windows else None


SDPA = AttentionKind(
    name="sdpa",
    implementation="sdpa",
    reason_against=lambda needs: None,
    arguments=lambda sequences: {},
)
"""transformers' own, with a [T, T] mask made from the positions: slow, and always there."""
ATTENTION_KINDS = (
    AttentionKind(
        name="flash_attn",
        implementation="flash_attention_2",
        reason_against=_against_flash,
        arguments=_varlen_arguments,
    ),
    AttentionKind(
        name="varlen",
        implementation=VARLEN_ATTENTION,
        reason_against=_against_varlen,
        arguments=_varlen_arguments,
        prepare=register_varlen_attention,
        takes_sequences=True,
    ),
    AttentionKind(
        name="flex",
        implementation="flex_attention",
        reason_against=_against_flex,
        arguments=lambda sequences: {},
    ),
    AttentionKind(
        name="packed_blocks",
        implementation=PACKED_ATTENTION,
        reason_against=_against_packed,
        arguments=lambda sequences: {"packed_layout": sequences.layout},
        prepare=register_packed_attention,
        takes_sequences=True,
    ),
    SDPA,
)
"""Fastest first."""
