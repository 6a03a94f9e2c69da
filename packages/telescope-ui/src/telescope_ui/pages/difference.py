"""`/difference`: two rollouts, of one run or of two, for display side by side."""

from urllib.parse import unquote

from telescope_core.settings.differing import differing
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.parameters import DifferenceParameters
from telescope_ui.index import queries
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.runs import Runs
from telescope_ui.pages.rollout import key_of, messages_json, row_at, scalars


def difference_page(runs: Runs, asked: DifferenceParameters) -> JsonObject:
    """Return both rollouts, and the settings in which their runs differ."""
    left, right = (_side(runs, name, getattr(asked, name)) for name in ("left", "right"))
    of_sides = {"left": left[0], "right": right[0]}
    settings, _ = differing(
        {side: run.config() for side, run in of_sides.items()},
        {side: run.settings_origin().defaults for side, run in of_sides.items()},
    )
    return {
        "page": "difference",
        "left": left[1],
        "right": right[1],
        "settings": [one._asdict() for one in settings],
    }


def _side(runs: Runs, name: str, text: str) -> tuple[OneRun, JsonObject]:
    parts = [unquote(part) for part in text.split("/")]
    if len(parts) != 4:
        raise ParameterError(f"{name}: expected RUN/GROUP/INDEX/ATTEMPT, got {text!r}")
    run = runs.get(parts[0])
    key = key_of(*parts[1:])
    run.index.refresh()
    row = row_at(run, queries.place_of(run.index, *key), with_tokens=False)
    return run, {
        "run": run.brief(),
        "row": scalars(row),
        "messages": messages_json(row.messages),
        "address": run.address("rollouts", *key),
    }
