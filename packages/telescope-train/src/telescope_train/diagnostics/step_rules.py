"""What the metrics of a step say is wrong with a run, in words and with what to do. Pure."""

from collections.abc import Mapping

MAX_BRANCHED = 0.01
"""Share of later turns that may begin a sample of their own before it is worth a word."""


def diagnoses(row: Mapping[str, float]) -> dict[str, str]:
    """Return what the metrics `row` of one step show, by the metric that shows it."""
    found: dict[str, str] = {}
    branched = row.get("turns/branched", 0.0)
    if branched > MAX_BRANCHED:
        found["turns/branched"] = (
            f"{branched:.0%} of later turns do not continue the tokens before them, and are "
            "samples of their own: exact, but their history is computed once more for each. "
            "Either the chat template rewrites earlier turns (the start of the run says so; a "
            "template that only appends is set with chat_template), interleaved_rollouts is "
            "off, or turns end with a text of `stop`, which callers do not get, or the agent edits "
            "its history or asks from several conversations"
        )
    return found
