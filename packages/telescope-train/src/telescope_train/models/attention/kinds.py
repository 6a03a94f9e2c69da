"""The kinds of attention of the trainer for packed rows, in the order in which they are tried.

A kind states when it cannot be used and which arguments the layers get. `attention.choice` tests
whether it really keeps packed sequences apart. Dims: T tokens of the row, K keys that all samples
attend to, H heads, D head size.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from telescope_train.models.attention.blocks import (
    PACKED_ATTENTION,
    Sequences,
    cumulative,
    packed_attention,
    refuse_options,
)
from telescope_train.models.attention.cascade import (
    CASCADE_ATTENTION,
    CascadeLayout,
    cascade_attention,
)
from telescope_train.models.moving import take_shared, to_device

VARLEN_ATTENTION = "telescope_varlen"
GATHERED_ATTENTION = "telescope_gathered"

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The conditions for an attention."""

    device: torch.device
    dtype: torch.dtype
    """The dtype of the layers."""
    is_row_shared: bool = False
    """Whether each rank has only a slice of the row (context parallelism)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One implementation of attention."""

    name: str
    implementation: str
    """Its name in transformers."""
    reason_against: Callable[[AttentionNeeds], str | None] = lambda needs: None
    """Returns why it cannot work under these conditions; None = it may be tried."""
    arguments: Callable[[Sequences], dict[str, object]] = lambda sequences: {}
    """Returns the arguments of every layer besides queries, keys and values."""
    functions: Mapping[str, Callable[..., Any]] = field(
        default_factory=dict[str, Callable[..., Any]]
    )
    """Name in transformers -> what computes it, for those that transformers does not have."""
    takes_sequences: bool = False
    """Whether it needs only `arguments`, no mask or positions, as for context parallelism."""

    def prepare(self) -> None:
        """Make its functions known to transformers. Idempotent."""
        for name, function in self.functions.items():
            AttentionInterface.register(name, function)


def has_varlen() -> bool:
    """Return whether this torch has variable-length attention."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


# Not compiled, like the attention in blocks: sequences differ from row to row.
@torch.compiler.disable
def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence by torch's own kernels: CUDA, half precision.

    [1, H, T, D] in, [1, T, H, D] out, as transformers expects.
    """
    refuse_options(options)
    from torch.nn.attention.varlen import varlen_attn

    # transformers' window includes the token itself, the kernel counts only tokens to its left. 0
    # tokens to the right make it causal: the last query sees the last key.
    window = options.get("sliding_window")
    left = -1 if window is None else window - 1
    output_THD = varlen_attn(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        cu_seq_lens_q,
        options["cu_seq_lens_k"],
        options["max_length_q"],
        options["max_length_k"],
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=True,
    )
    # It returns a tuple only if the log-sum-exp is asked for.
    assert isinstance(output_THD, torch.Tensor)
    return output_THD.unsqueeze(0), None


@torch.compiler.disable
def gathered_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    over: str,
    keys_K: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the implementation `over` to the keys at positions `keys_K`; None = to all.

    In rows with shared prefixes, each sample's own tokens attend to all that it begins with, causal
    from the end.
    """
    if keys_K is not None:
        key, value = (take_shared(states, 2, keys_K) for states in (key, value))
    # Some models rotate in float32, which the kernels do not take.
    query, key = query.to(value.dtype), key.to(value.dtype)
    # transformers' flash attention takes its kernels by the name in the config of the module, where
    # the name of this function stands.
    asked: Any = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=over), is_causal=module.is_causal
    )
    output, _ = AttentionInterface()[over](asked, query, key, value, attention_mask, **options)
    return output, None


def _no_half_cuda(needs: AttentionNeeds) -> str | None:
    # The kernels of flash attention exist for 16-bit floats on a GPU only.
    if needs.device.type != "cuda":
        return "needs a CUDA device"
    return None if needs.dtype in HALF else "needs layers in bfloat16 or float16"


def _against_flash(
    advice: str,
    is_available: Callable[[], bool],
    needs: AttentionNeeds,
    majors: tuple[int, ...] = (),
) -> str | None:
    """`majors`: first numbers of the compute capabilities that have kernels; () = tried on all."""
    if (reason := _no_half_cuda(needs)) is not None:
        return reason
    if majors and torch.cuda.get_device_capability(needs.device)[0] not in majors:
        return "needs a Hopper or Blackwell card for data centers"
    # The package is asked for last: on a machine that cannot use it, nobody should install it. One
    # that transformers does not find it would look for on the Hub.
    return None if is_available() else advice


def _against_varlen(needs: AttentionNeeds) -> str | None:
    return _no_half_cuda(needs) if has_varlen() else "this torch has no varlen attention"


def _against_flex(needs: AttentionNeeds) -> str | None:
    # torch's flex attention has no backward pass on the CPU.
    return None if needs.device.type == "cuda" else "needs a CUDA device"


def _gathered_arguments(over: str, sequences: Sequences) -> dict[str, object]:
    # The names are those of transformers' flash attention, which passes them to its kernels and
    # would otherwise work out the sequences from the positions again in every layer.
    arguments = {
        "over": over,
        "keys_K": None,
        "cu_seq_lens_q": sequences.starts,
        "cu_seq_lens_k": sequences.starts,
        "max_length_q": sequences.longest,
        "max_length_k": sequences.longest,
    }
    shared = sequences.shared
    if shared is None:
        return arguments
    device, lengths_S = sequences.starts.device, shared.lengths_S[shared.own_S > 0]
    return arguments | {
        "keys_K": to_device(shared.keys(), device),
        "cu_seq_lens_k": cumulative(lengths_S, device),
        "max_length_k": int(lengths_S.max()),
    }


def _gathered(
    name: str, implementation: str, reason_against: Callable[[AttentionNeeds], str | None]
) -> AttentionKind:
    """Return the kind that computes pieces of sequences by an `implementation` that has them."""
    return AttentionKind(
        name=name,
        implementation=GATHERED_ATTENTION,
        reason_against=reason_against,
        arguments=partial(_gathered_arguments, implementation),
        functions={
            GATHERED_ATTENTION: gathered_attention,
            VARLEN_ATTENTION: varlen_attention,
        },
        takes_sequences=True,
    )


_PIECEWISE = (
    _gathered(
        "flash_attn_3",
        "flash_attention_3",
        partial(_against_flash, "install flash-attn-3", is_flash_attn_3_available),
    ),
    _gathered(
        "flash_attn_4",
        "flash_attention_4",
        partial(
            _against_flash,
            "install telescope-train[flash-attn-4]",
            is_flash_attn_4_available,
            majors=(9, 10),
        ),
    ),
    _gathered(
        "flash_attn",
        "flash_attention_2",
        partial(_against_flash, "install telescope-train[flash-attn]", is_flash_attn_2_available),
    ),
    _gathered("varlen", VARLEN_ATTENTION, _against_varlen),
)
SDPA = AttentionKind(name="sdpa", implementation="sdpa")
"""transformers' own, with a [T, T] mask from the positions. It ignores soft caps."""
EAGER = AttentionKind(name="eager", implementation="eager")
"""The formulas of the model itself: slow, because of all scores [heads, T, T]."""
# An empty `arguments` is enough for SDPA and flex: without a cache, transformers takes positions
# that restart for packed sequences and keeps them apart in its mask. An implementation that it does
# not know gets no mask at all, so the others must be told where sequences begin.
ATTENTION_KINDS = (
    *_PIECEWISE,
    AttentionKind(
        name="flex",
        implementation="flex_attention",
        reason_against=_against_flex,
    ),
    AttentionKind(
        name="packed_blocks",
        implementation=PACKED_ATTENTION,
        # Layers with a window say so when they call it, and it refuses then.
        arguments=lambda sequences: {"packed_layout": sequences.layout},
        functions={PACKED_ATTENTION: packed_attention},
        takes_sequences=True,
    ),
    SDPA,
    EAGER,
)
"""Fastest first."""


def _cascade_arguments(sequences: Sequences) -> dict[str, object]:
    shared = sequences.shared
    layout = CascadeLayout(
        own=sequences.layout,
        parts=() if shared is None else tuple(shared.parts()),
        positions_T=sequences.positions_T.numpy(),
    )
    return {"cascade_layout": layout}


def _against_cascade(needs: AttentionNeeds) -> str | None:
    # It uses an operator that torch has for the CPU only.
    return None if needs.device.type == "cpu" else "needs the CPU"


SHARING_KINDS = (
    *(replace(kind, name=f"{kind.name} over prefixes") for kind in _PIECEWISE),
    AttentionKind(
        name="cascade",
        implementation=CASCADE_ATTENTION,
        reason_against=_against_cascade,
        arguments=_cascade_arguments,
        functions={CASCADE_ATTENTION: cascade_attention},
        takes_sequences=True,
    ),
)
"""For rows in which samples share prefixes, and for all rows of a run that has such."""
