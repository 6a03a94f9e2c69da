"""Choose the attention of a run: the first kind that is shown to keep packed samples apart.

The test runs a small copy of the architecture with one layer of each kind, the real head sizes and
random weights. Two samples in one row must give the same hidden states and gradient as each alone
through the model's own attention formulas, including windows, soft caps and sinks. `rank_checks`
then tests that the whole model keeps samples apart. Attention over shared prefixes is chosen in the
same way, with samples that begin alike.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError
from telescope_train.models.attention.blocks import find_sequences, find_shared_sequences
from telescope_train.models.attention.kinds import (
    ATTENTION_KINDS,
    EAGER,
    SHARING_KINDS,
    AttentionKind,
    AttentionNeeds,
)
from telescope_train.models.attention.prefixes import SharedRow
from telescope_train.models.facts import CAP_SETTINGS, EXPERT_SETTINGS, WINDOW_SETTINGS
from telescope_train.models.location import first_line

LENGTHS = (19, 13)
"""Lengths of the two test samples; unequal, so that mixing them is detected."""
SHARED = SharedRow(lengths_S=np.array([19, 21, 12, 9, 13]), shared_S=np.array([0, 11, 11, 4, 0]))
"""Test samples with a common beginning: two branches of different depth, and one apart."""
PROBE_VOCAB = 64
"""Rows of the embedding in the small copy."""
_PROBE_WINDOW = 5
"""Such a limit in the small copy: well below the samples' lengths, so that it has an effect."""
_PROBE_CAP = 0.1
"""Such a cap in the small copy: random weights give scores of about 1, far below usual caps."""
_PROBE_EXPERTS = 2
"""Number of experts of a layer in the small copy of a mixture."""
_HALF_TOLERANCE, _TOLERANCE = 0.05, 1e-3
"""Largest relative difference due to rounding, in 16 bits and in more. A leak gives 0.5."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The attention of a run, and the reasons against faster kinds."""

    kind: AttentionKind
    difference: float
    """Relative difference between packed samples and single ones."""
    tolerance: float
    """Largest such difference due to rounding."""
    refused: dict[str, str]
    """Name of each faster kind -> the reason against it."""

    @property
    def reasons(self) -> str:
        """The reasons against faster kinds, for people; equal ones are told together."""
        names: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            names.setdefault(reason, []).append(name)
        return "; ".join(f"not {', '.join(kinds)}: {reason}" for reason, kinds in names.items())


def choose_attention(
    lm: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_row_shared: bool = False,
    kinds: Sequence[AttentionKind] = ATTENTION_KINDS,
) -> AttentionChoice:
    """Return the first of `kinds` that works for the architecture of `lm`; ConfigError if none.

    `is_row_shared` is for context parallelism, which works with some kinds only.
    """
    needs = AttentionNeeds(device=device, dtype=dtype, is_row_shared=is_row_shared)
    try:
        probe = _Probe(lm, needs)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the attention of {type(lm).__name__} cannot be tried on a small copy of it "
            f"({first_line(error)}); train another model"
        ) from error
    found, refused = _first_that_works(kinds, probe, needs)
    if found is not None:
        _log.info("attention: %s; %s", found.kind.name, found.reasons)
        return found
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    advice = "set fsdp_context_parallel_size = 1" if is_row_shared else "train another model"
    raise ConfigError(
        f"no attention keeps packed samples of {type(lm).__name__} apart ({reasons}); {advice}"
    )


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
    """Return how samples share prefixes in `lm`, once before it trains; `is_on` is the setting.

    Models that are known to need each sample separately are refused by their settings, and all
    other differences by a test of the attention. `has_dropout`: some activations are dropped at
    random in training.
    """
    if not is_on:
        return no_sharing("share_prefixes is off")
    if has_dropout:
        # One draw for all samples is another gradient than one for each.
        return no_sharing("dropout has to be drawn for each sample")
    if (experts := _experts(lm)) is not None:
        # Rounding may send a token to another expert, and then the gradient is another one.
        return no_sharing(f"the model is a mixture of experts ({experts})")
    needs = AttentionNeeds(device=device, dtype=dtype)
    choice, refused = _first_that_works(SHARING_KINDS, _Probe(lm, needs, SHARED), needs)
    if choice is None:
        return no_sharing("; ".join(f"{name}: {why}" for name, why in refused.items()))
    return PrefixSharing(attention=choice)


def _experts(lm: PreTrainedModel) -> str | None:
    config = lm.config.get_text_config()
    for name in EXPERT_SETTINGS:
        if (number := getattr(config, name, None)) and number > 1:
            return f"{name} = {number}"
    return None


def _first_that_works(
    kinds: Sequence[AttentionKind], probe: "_Probe", needs: AttentionNeeds
) -> tuple[AttentionChoice | None, dict[str, str]]:
    refused: dict[str, str] = {}
    for kind in kinds:
        reason = _reason_against(kind, needs)
        difference = float("nan")
        if reason is None:
            difference, reason = probe.test(kind)
        if reason is None:
            return AttentionChoice(
                kind=kind, difference=difference, tolerance=probe.tolerance, refused=refused
            ), refused
        refused[kind.name] = reason
    return None, refused


def _reason_against(kind: AttentionKind, needs: AttentionNeeds) -> str | None:
    if needs.is_row_shared and not kind.takes_sequences:
        return "cannot share a row between ranks"
    return kind.reason_against(needs)


class _Probe:
    """A small copy of the architecture for trying each kind of attention."""

    def __init__(
        self, lm: PreTrainedModel, needs: AttentionNeeds, shared: SharedRow | None = None
    ) -> None:
        self._needs, self._shared = needs, shared
        self.tolerance = _HALF_TOLERANCE if needs.dtype.itemsize == 2 else _TOLERANCE
        self._lm = _small_copy(lm, needs)
        generator = torch.Generator().manual_seed(0)
        lengths = LENGTHS if shared is None else shared.lengths_S.tolist()
        ids = [torch.randint(PROBE_VOCAB, (length,), generator=generator) for length in lengths]
        for number, common in enumerate(() if shared is None else shared.shared_S.tolist()):
            ids[number][:common] = ids[number - 1][:common]
        self._ids = [one.to(needs.device) for one in ids]
        # Alone in a row a sample has nothing to mix with, so this is the truth to compare with.
        one_by_one = [self._run(EAGER, [ids]) for ids in self._ids]
        self._hidden_TH = torch.cat([hidden_TH for hidden_TH, _ in one_by_one])
        self._gradient = sum(gradient for _, gradient in one_by_one)

    def test(self, kind: AttentionKind) -> tuple[float, str | None]:
        """Return (relative difference, reason against `kind` or None)."""
        # The next kind is tried where a kernel is missing, or refuses the shapes or the device.
        try:
            hidden_TH, gradient = self._run(kind, self._ids, self._shared)
        except Exception as error:  # noqa: BLE001 - compilers of kernels have their own exceptions
            text = str(error).strip().splitlines()
            return float("nan"), f"failed: {text[0] if text else type(error).__name__}"
        difference = max(_relative(hidden_TH, self._hidden_TH), _relative(gradient, self._gradient))
        # Written with "not" so that NaN is refused as well.
        if not difference <= self.tolerance:
            special = _special_settings(self._lm.config.get_text_config())
            ignored = f" or ignores {' or '.join(special)}" if special else ""
            return difference, (
                f"leaks between packed samples{ignored}: they differ from single ones by "
                f"{difference:.2g}, and rounding explains at most {self.tolerance:g}"
            )
        return difference, None

    def _run(
        self,
        kind: AttentionKind,
        ids: Sequence[torch.Tensor],
        shared: SharedRow | None = None,
    ) -> tuple[Any, Any]:
        """Return (hidden_TH, gradient [PROBE_VOCAB, H] of the embeddings) of `ids` in one row.

        There are hidden states for each token of each sample, so shared tokens are repeated.
        """
        kind.prepare()
        self._lm.set_attn_implementation(kind.implementation)
        device, row_ids = self._needs.device, torch.cat(list(ids))
        places = torch.arange(len(row_ids), device=device)
        if shared is None:
            positions_T = np.concatenate([np.arange(len(one)) for one in ids])
            sequences = find_sequences(positions_T, device)
        else:
            sequences = find_shared_sequences(shared, device)
            places = torch.from_numpy(shared.places()).to(device)
            own = zip(ids, shared.shared_S.tolist(), strict=True)
            row_ids = torch.cat([one[common:] for one, common in own])
        # The embeddings' gradient passes through every layer, so it shows a wrong backward in any.
        weight = self._lm.get_input_embeddings().weight
        weight.grad = None
        with torch.enable_grad():
            output = self._lm.base_model(
                input_ids=row_ids[None],
                position_ids=sequences.positions_T[None],
                use_cache=False,
                **kind.arguments(sequences),
            )
            hidden_TH = output.last_hidden_state[0].index_select(0, places).float()
            # A weight for each value: in a plain sum, errors of opposite sign could cancel.
            (hidden_TH * hidden_TH.detach().cos()).sum().backward()
        return hidden_TH.detach(), weight.grad.float()


def _small_copy(lm: PreTrainedModel, needs: AttentionNeeds) -> PreTrainedModel:
    """Return a model with one layer of each kind and random weights."""
    config = copy.deepcopy(lm.config)
    text = config.get_text_config()
    # A padding id beyond the small vocabulary would be refused by the embedding.
    text.vocab_size, text.pad_token_id, text.tie_word_embeddings = PROBE_VOCAB, None, False
    for name in _special_settings(text):
        setattr(text, name, _PROBE_WINDOW if name in WINDOW_SETTINGS else _PROBE_CAP)
    layer_types = getattr(text, "layer_types", None)
    kinds = list(dict.fromkeys(layer_types)) if layer_types else [None]
    text.num_hidden_layers = len(kinds)
    _choose_no_experts(text)
    if layer_types:
        text.layer_types = kinds
    # Forked, so that the test does not move the random numbers of the run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = type(lm)(config)
        # Weights of size 1 / sqrt(inputs) keep the size of activations. With the usual 0.02 the
        # attention would add little to the residual, and a leak might pass for rounding.
        for parameter in probe.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return probe.to(device=needs.device, dtype=needs.dtype).eval()


def _special_settings(text: Any) -> list[str]:
    """Return the names of settings that make attention more than causal."""
    return [name for name in (*WINDOW_SETTINGS, *CAP_SETTINGS) if getattr(text, name, None)]


def _choose_no_experts(text: Any) -> None:
    """Make a mixture use all of a few experts: a choice would turn rounding into jumps."""
    for name in ("num_experts", "num_local_experts"):
        if getattr(text, name, None):
            setattr(text, name, _PROBE_EXPERTS)
            text.num_experts_per_tok = _PROBE_EXPERTS


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
