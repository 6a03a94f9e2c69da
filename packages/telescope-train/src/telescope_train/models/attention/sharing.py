"""Decide whether samples can share prefixes in a model, once before it trains.

Models that are known to need each sample separately are refused by their settings, and all other
differences by a test of the attention.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from telescope_train.models.attention.choice import AttentionChoice, choose_sharing_attention
from telescope_train.models.facts import EXPERT_SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """The way in which samples share prefixes, or the reason why they do not."""

    attention: AttentionChoice | None
    """The attention over rows with shared prefixes; None = samples are computed separately."""
    reason: str = ""
    """The reason against sharing, for people; empty if prefixes are shared."""


def no_sharing(reason: str) -> PrefixSharing:
    """Return that samples are computed separately, for the given reason."""
    return PrefixSharing(attention=None, reason=reason)


def choose_sharing(
    lm: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_on: bool,
    has_dropout: bool,
) -> PrefixSharing:
    """Return how samples share prefixes in `lm`; `is_on` is the setting.

    `has_dropout`: some activations are dropped at random in training.
    """
    if not is_on:
        return no_sharing("share_prefixes is off")
    if has_dropout:
        # One draw for all samples is another gradient than one for each.
        return no_sharing("dropout has to be drawn for each sample")
    if (experts := _experts(lm)) is not None:
        # Rounding may send a token to another expert, and then the gradient is another one.
        return no_sharing(f"the model is a mixture of experts ({experts})")
    choice, refused = choose_sharing_attention(lm, device, dtype)
    if choice is None:
        return no_sharing("; ".join(f"{name}: {why}" for name, why in refused.items()))
    return PrefixSharing(attention=choice)


def _experts(lm: PreTrainedModel) -> str | None:
    config = lm.config.get_text_config()
    for name in EXPERT_SETTINGS:
        if (number := getattr(config, name, None)) and number > 1:
            return f"{name} = {number}"
    return None
