"""Finds problems of a run in the metrics of a step, and describes them with what to do. Pure."""

from collections.abc import Mapping

MAX_BRANCHED = 0.01
"""Share of later turns that may begin a sample of their own before it is reported."""


def diagnoses(row: Mapping[str, float]) -> dict[str, str]:
    """Return the problems that the metrics `row` of one step show: metric -> description."""
    found: dict[str, str] = {}
    branched = row.get("turns/branched", 0.0)
    if branched > MAX_BRANCHED:
        found["turns/branched"] = (
            f"{branched:.0%} of later turns do not continue the tokens before them and become "
            "samples of their own. This is exact, but the history of each is computed once more. "
            "Either the chat template rewrites earlier turns (the start of the run reports this; a "
            "template that only appends is set with chat_template), or interleaved_rollouts is "
            "off, or turns end with a text of `stop`, which callers do not get, or the agent edits "
            "its history or asks from several conversations"
        )
    return found
