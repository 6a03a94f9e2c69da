"""Run the Hugging Face model layer by layer on weights that arrive one at a time, for checks.

Its forward pass is transformers' own. A layer's weights are taken from the stream before it runs
and dropped after it, so the complete model is never in memory.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from telescope_core.base.errors import TelescopeError
from telescope_train.models.attention.kinds import SDPA
from telescope_train.models.row import PackedRow

_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_HALF = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Name of an expert's matrix -> its half of transformers' joined one; others are the down
matrix."""


class StreamedModel:
    """A model whose weights are loaded and freed while it runs."""

    def __init__(self, lm: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """`lm` has no memory for its weights."""
        self._lm, self._device, self._dtype = lm.eval(), device, dtype
        base = lm.base_model
        base.rotary_emb = type(base.rotary_emb)(config=lm.config.get_text_config()).to(device)
        lm.set_attn_implementation(SDPA.implementation)
        self._is_tied = bool(lm.config.get_text_config().tie_word_embeddings)
        self._stream: Iterator[tuple[str, Tensor]] = iter(())
        self._prefixes = {
            module: name
            for name, module in lm.named_modules()
            if module in (base.embed_tokens, base.norm, lm.get_output_embeddings(), *base.layers)
        }
        for module in self._prefixes:
            module.register_forward_pre_hook(self._fill)
            module.register_forward_hook(self._drop)

    @torch.no_grad()
    def logprobs(self, row: PackedRow, weights: Iterator[tuple[str, Tensor]]) -> Tensor:
        """Return logprobs_M [M], nats, of the trained tokens; `weights` is exhausted."""
        self._stream = weights
        output = self._lm(
            input_ids=row.token_ids_T[None],
            position_ids=row.sequences.positions_T[None],
            use_cache=False,
            **SDPA.arguments(row.sequences),
        )
        for _ in weights:
            pass  # every rank takes part in gathering each tensor
        logits_MV = output.logits[0].index_select(0, row.predictors_M).float()
        every_MV = (logits_MV / row.temperatures_M[:, None]).log_softmax(-1)
        return every_MV.gather(1, row.targets_M[:, None])[:, 0]

    def _fill(self, module: torch.nn.Module, _: Any) -> None:
        prefix = self._prefixes[module] + "."
        missing = {prefix + name for name, value in module.named_parameters() if value.is_meta}
        left = {name: self._parts_in(name) for name in missing}
        while any(left.values()):
            name, value = next(self._stream, ("", None))
            if value is None:
                raise TelescopeError(
                    f"weights ended before {sorted(n for n, number in left.items() if number)[:3]}"
                )
            target = self._put(name, value)
            if target in left:
                left[target] -= 1

    def _parts_in(self, name: str) -> int:
        """Return the number of tensors in the stream that form parameter `name`."""
        experts = self._lm.get_parameter(name).shape[0]
        if name.endswith("experts.gate_up_proj"):
            return 2 * experts
        return experts if name.endswith("experts.down_proj") else 1

    def _put(self, name: str, value: Tensor) -> str:
        """Write a tensor of the stream to its place in transformers; return that name."""
        value = value.to(self._device, self._dtype)
        found = _EXPERT.fullmatch(name)
        if found is None:
            name = name.replace(".block_sparse_moe.", ".mlp.")
            self._set(name, value)
            if name == "model.embed_tokens.weight" and self._is_tied:
                self._set("lm_head.weight", value)
            return name
        matrix = found[3]
        target = f"{found[1]}mlp.experts.{'gate_up_proj' if matrix in _HALF else 'down_proj'}"
        whole = self._lm.get_parameter(target)
        if whole.is_meta:
            self._set(target, torch.empty_like(whole, device=self._device, dtype=self._dtype))
            whole = self._lm.get_parameter(target)
        place = whole[int(found[2])]
        (place.chunk(2)[_HALF[matrix]] if matrix in _HALF else place).copy_(value)
        return target

    def _set(self, name: str, value: Tensor) -> None:
        holder, _, leaf = name.rpartition(".")
        parameter = torch.nn.Parameter(value, requires_grad=False)
        self._lm.get_submodule(holder)._parameters[leaf] = parameter

    def _drop(self, module: torch.nn.Module, *_: Any) -> None:
        for holder in module.modules():
            for name, value in holder._parameters.items():
                if value is not None:
                    holder._parameters[name] = torch.nn.Parameter(
                        torch.empty_like(value, device="meta"), requires_grad=False
                    )
