"""What a run found wrong with itself while it went on, as it said in the log of its driver.

Rules look at the metrics of each step, and say once what is wrong and what to do about it.
"""

from collections.abc import Collection

import msgspec

from telescope_ui.answers import JsonObject
from telescope_ui.line_tail import LineTail
from telescope_ui.one_run import OneRun
from telescope_ui.run_files import listed

_LOG = "driver"
_MAX = 50
_MAX_LINE_BYTES = 2**16
_MAX_FILE_BYTES = 8 * 2**20
_MAX_FILES = 4


class _Said(msgspec.Struct, frozen=True):
    """A line of the log, as far as it is looked at."""

    time_s: float
    level: str = ""
    message: str = ""


def diagnoses(run: OneRun, metrics: Collection[str]) -> list[JsonObject]:
    """Return the warnings of the driver that begin with one of `metrics`, the newest first."""
    decoder = msgspec.json.Decoder(_Said)
    files = [
        one
        for one in listed(run.path, "logs", suffixes=(".jsonl",))
        if one.name.partition(".")[0] == _LOG
    ]
    found: dict[tuple[float, str], JsonObject] = {}
    for one in files[:_MAX_FILES]:
        tail = LineTail(one.path, max_line_bytes=_MAX_LINE_BYTES, max_file_bytes=_MAX_FILE_BYTES)
        for line in tail.lines():
            # Few lines are warnings, and reading the others as JSON would take most of the time.
            if b'"warning"' not in line[:100]:
                continue
            try:
                said = decoder.decode(line)
            except (ValueError, RecursionError):
                continue
            metric, is_there, text = said.message.partition(": ")
            if is_there and said.level == "warning" and metric in metrics:
                about = {"time_s": said.time_s, "metric": metric, "text": text}
                found[said.time_s, said.message] = about
    return sorted(found.values(), key=lambda about: -about["time_s"])[:_MAX]
