"""What a benchmark's numbers depend on: the machine, its load, the versions; and writing them."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Return the name of the processor and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def facts_of_run(command: str, *packages: str) -> dict[str, Any]:
    """Return command, date, machine, load average now and versions."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": processor(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" if line[0] != "-" else f"|{line}|" for line in lines)


def write_results(
    name: str, page: str, facts: dict[str, Any], rows: Sequence[Any], folder: Path = RESULTS
) -> None:
    """Write `{name}.json` with every number and `{name}.md` to read."""
    folder.mkdir(exist_ok=True)
    numbers = json.dumps({**facts, "rows": list(rows)}, indent=1)
    (folder / f"{name}.json").write_text(numbers + "\n")
    about = "\n".join(f"- {fact}: {value}" for fact, value in facts.items())
    (folder / f"{name}.md").write_text(page.replace("{facts}", about) + "\n")
