"""torch's own variable-length attention, registered with transformers; CUDA, half precision.

And, for it and for flash-attn, rows with shared prefixes: keys and values are gathered, so that
each sample's own tokens attend to all that it begins with, causal from the end.
Dims: T tokens of the row, K keys that all samples attend to, H heads, D head size.
"""

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface

from telescope_train.models.attention.blocks import refuse_options

VARLEN_ATTENTION = "telescope_varlen"
GATHERED_ATTENTION = "telescope_gathered"


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
    """Attend within each sequence; [1, H, T, D] in, [1, T, H, D] out, as transformers expects."""
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
    """Attend by the implementation `over` to the keys at positions `keys_K`; None = to all."""
    if keys_K is not None:
        key, value = (states.index_select(2, keys_K) for states in (key, value))
    # transformers' flash attention takes its kernels by the name in the config of the module, where
    # the name of this function stands.
    asked: Any = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=over), is_causal=module.is_causal
    )
    output, _ = AttentionInterface()[over](asked, query, key, value, attention_mask, **options)
    return output, None
