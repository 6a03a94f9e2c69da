"""Read a chat request that is passed on to another endpoint, which checks it: for evals.

Only parameters that cannot be recorded, or that the settings of the eval decide, are checked here.
Parameters that the request leaves out are filled in from the rollout's sampling, as in training.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from telescope_core.base.types import Sampling
from telescope_core.chat.sampling_fields import sampling_fields
from telescope_core.gateway.messages import read_loosely
from telescope_core.gateway.refusal import is_empty, unsupported
from telescope_core.gateway.request import (
    NEUTRAL,
    ChatRequest,
    flag,
    given_fields,
    include_usage,
    max_tokens_of,
)

UNRECORDED = ("n", "best_of", "functions", "function_call", "modalities", "audio")
"""Parameters that ask for something other than one message of text and calls."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_OUR_OWN = ("model", "stream", "stream_options")


def read_forwarded(body: object, own: Sampling, *, model: str) -> ChatRequest:
    """Read a request to a rollout whose sampling settings are `own`; raises Refusal."""
    given = given_fields(body, model=model)
    for name in UNRECORDED:
        changes_nothing, why = NEUTRAL[name]
        if name in given and not is_empty(given[name]) and not changes_nothing(given[name]):
            raise unsupported(name, why)
    stream = flag(given, "stream")
    options = include_usage(given.get("stream_options"), stream=stream)
    fields = _filled_in(given, own)
    temperature = fields.get("temperature")
    return ChatRequest(
        messages=read_loosely(given.get("messages")),
        sampling=replace(own, temperature=temperature, max_tokens=_limit(given, own)),
        stream=stream,
        include_usage=options,
        fields=fields,
    )


def _filled_in(given: Mapping[str, Any], own: Sampling) -> dict[str, Any]:
    passed = {name: value for name, value in given.items() if name not in (*_OUR_OWN, *_LIMITS)}
    fields = {**sampling_fields(own), **passed}
    # The name that the program used, which the endpoint may want; else that of the eval.
    limit = next((name for name in reversed(_LIMITS) if name in given), "max_tokens")
    fields.pop("max_tokens")
    return {**fields, limit: _limit(given, own)}


def _limit(given: Mapping[str, Any], own: Sampling) -> int:
    return min(own.max_tokens, max_tokens_of(given) or own.max_tokens)
