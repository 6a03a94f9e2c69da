"""Loading an environment in a process of its own, to learn what it declares or that it works.

Whatever its interpreter, one program asks: `declare.py`. The environment's code sees no token, no
home and no variable of this process but the harmless ones.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from telescope_core.errors import EnvironmentLoadError, RegistryError
from telescope_envs.install.packages import missing_requirements
from telescope_envs.processes.running import last_line, passed_on, printed_table, run_program
from telescope_envs.records.links import write_link
from telescope_envs.records.projects import LinkedProject, read_project
from telescope_envs.records.release import Release

Question = Literal["built", "schema", "declarations", "declared"]
"""A function of `declare.py`."""
_PROGRAM = str(Path(__file__).with_name("declare.py"))
_TIME_LIMIT_S = 120.0
_DECLARED = ("config_schema", "config_schema_sha256", "splits", "reward", "network", "secrets")


def asked(
    question: Question,
    factory: str,
    *,
    interpreter: str | Sequence[str] = sys.executable,
    search_path: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    what: str,
    limit_s: float = _TIME_LIMIT_S,
) -> dict[str, Any]:
    """Return what the environment `factory`, which `interpreter` imports, answers to `question`.

    `interpreter` may bring options; by itself it imports what this process could, but nothing from
    the working directory or the user's own packages. Raises EnvironmentLoadError, which begins with
    `what`, if it cannot be loaded in `limit_s`.
    """
    given = json.dumps(dict(settings or {}))
    started = (interpreter, "-P", "-s") if isinstance(interpreter, str) else interpreter
    done = run_program(
        [*started, "-B", _PROGRAM, question, factory, given, *search_path],
        environ=passed_on(),
        limit_s=limit_s,
        late=f"{what}: it did not load within {limit_s:g} s; its import must be quick",
    )
    if done.returncode:
        raise EnvironmentLoadError(f"{what} cannot be loaded: {last_line(done)}")
    return printed_table(done, what=what, keys=_DECLARED if question.startswith("decl") else ())


def describe_wheel(wheel: Path, factory: str, *, counts_examples: bool = True) -> dict[str, Any]:
    """Return what `factory` in `wheel` declares; raises EnvironmentLoadError if it does not load.

    Counting the examples of its splits may load datasets; without it each number is None.

    This runs the wheel's code in a subprocess, so inspect the wheel first.
    """
    question: Question = "declared" if counts_examples else "declarations"
    path = (str(wheel.absolute()),)
    about = asked(question, factory, search_path=path, what=wheel.name)
    return about if counts_examples else {**about, "splits": dict.fromkeys(about["splits"])}


def probe(python: Path, release: Release) -> None:
    """Load `release` with `python`, and compare what it declares with its record.

    Raises EnvironmentLoadError if it cannot be loaded, RegistryError if the declarations differ.
    """
    what = f"{release.id} in its own virtual environment"
    # With nothing but its own packages, as nobody has them anywhere else.
    isolated = (str(python), "-I")
    declared = asked("declarations", release.factory, interpreter=isolated, what=what)
    # Not the schema of settings, whose text differs between versions of pydantic.
    recorded: dict[str, object] = {
        "splits": sorted(release.splits),
        "reward": release.reward.as_table(),
        "network": release.network,
        "secrets": sorted(release.secrets),
    }
    for field, expected in recorded.items():
        if declared[field] != expected:
            raise RegistryError(
                f"{release.id} {release.version}: its code declares {field} "
                f"{declared[field]!r}, but the registry says {expected!r}; do not use it, and tell "
                "the registry's owner"
            )


def link(folder: Path) -> LinkedProject:
    """Link the project in `folder` after checking that it is valid and loads in this Python."""
    project = read_project(folder)
    missing = missing_requirements(project.requires_dist)
    if missing:
        wanted = " ".join(f"'{requirement}'" for requirement in missing)
        raise EnvironmentLoadError(
            f"{project.id} needs {', '.join(missing)}, which this Python does not have; a linked "
            f"environment runs in this Python. Run: {sys.executable} -m uv pip install {wanted}"
        )
    what = f"nothing was linked: {project.id} in {project.folder}"
    asked("built", project.factory, search_path=(str(project.source),), what=what)
    write_link(project)
    return project
