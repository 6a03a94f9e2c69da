"""Write sampling settings as fields of a chat request: only those that were set. Pure."""

from typing import Any

from telescope_core.base.types import Sampling


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request; settings that are not set are left to the endpoint.

    Settings without a value for "not set" are left out while they change nothing.
    """
    fields: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    if sampling.temperature is not None:
        fields["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop and sampling.include_stop_str_in_output:
        fields["include_stop_str_in_output"] = True
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.top_k > 0:
        fields["top_k"] = sampling.top_k
    if sampling.min_p > 0.0:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        fields["repetition_penalty"] = sampling.repetition_penalty
    return {**fields, **sampling.extra}
