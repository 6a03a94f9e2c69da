"""The arithmetic between a model's last hidden states and its logits, from its config. No torch.

logits = capped(scale * (hidden @ weight.T + bias)), with capped(x) = cap * tanh(x / cap).
Weight and bias are in the module. Scale and cap are in the config, where one name has several
meanings (`logits_scaling` divides in Granite and multiplies in HyperCLOVA X), so it takes the type
of the model to read them. A field that may be of this kind in a model of another type is refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from telescope_core.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRule:
    """The arithmetic of an output head besides its matrix and bias."""

    scale: float = 1.0
    """Factor of the product of hidden states and matrix, bias included."""
    cap: float | None = None
    """Largest absolute value of a logit, applied after the scale. None = no cap."""


PLAIN = HeadRule()
"""A product, with or without a bias."""

_Reading: TypeAlias = Callable[[float, Mapping[str, object]], HeadRule]
"""Function of the value of a field and the config that contains it."""


def _divides_by_width(value: float, config: Mapping[str, object]) -> HeadRule:
    # Hidden states are divided by how much wider the model is than the one it was tuned as.
    return HeadRule(scale=value / cast(int, config.get("hidden_size") or value))


_CAPPED = {"final_logit_softcapping": lambda cap, _: HeadRule(cap=cap)}
_DIVIDED = {"logits_scaling": lambda divisor, _: HeadRule(scale=1.0 / divisor)}
_MULTIPLIED = {"logit_scale": lambda factor, _: HeadRule(scale=factor)}
_READINGS: Mapping[str, Mapping[str, _Reading]] = {
    "cohere": _MULTIPLIED,
    "cohere2": _MULTIPLIED,
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "gemma3n_text": _CAPPED,
    "gemma4_text": _CAPPED,
    "gemma4_unified_text": _CAPPED,
    "granite": _DIVIDED,
    "granite_swa": _DIVIDED,
    "granitemoehybrid": _DIVIDED,
    "hyperclovax": {"logits_scaling": lambda factor, _: HeadRule(scale=factor)},
    "minicpm3": {"dim_model_base": _divides_by_width},
    "nanochat": _CAPPED,
    "vaultgemma": _CAPPED,
}
"""`model_type` -> the field about its head."""
_TELLING = re.compile(
    r"(logit|lm_head|output|unembed)\w*(scal|cap|mult|divi|temper)|dim_model_base|mup_width"
)
_ELSEWHERE = re.compile(r"router|attn|attention|init_value")
"""Parts of field names that are about other logits than those of tokens."""


def head_rule(config: Mapping[str, object]) -> HeadRule:
    """Return the rule of a model from its `config.json` or `to_dict()`.

    Raises ConfigError for an impossible value, and for a field whose meaning in a model of this
    type is not known.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = cast(Mapping[str, object], nested)
    model_type = str(config.get("model_type"))
    readings, rule = _READINGS.get(model_type, {}), PLAIN
    for field, value in config.items():
        if field in readings:
            if value is not None:
                rule = readings[field](_positive(field, value), config)
        elif _may_be_of_the_head(field, value):
            raise ConfigError(
                f"model: {field} = {value!r} in its config may change the logits of tokens, and it "
                f"is not known how in a model of type {model_type!r}; train another model, or "
                "remove the field if the model does not read it (docs/reference/models.md has the "
                "fields that are known)"
            )
    return rule


def _positive(field: str, value: object) -> float:
    if isinstance(value, int | float) and 0.0 < value < math.inf:
        return float(value)
    raise ConfigError(f"model: {field} must be a positive number or null, got {value!r}")


def _may_be_of_the_head(field: str, value: object) -> bool:
    # 1 scales nothing, and 0 stands for no cap.
    does_something = isinstance(value, int | float | str) and value not in (0, 1, "")
    return (
        does_something and _TELLING.search(field) is not None and _ELSEWHERE.search(field) is None
    )
