"""Loading an environment in a process of its own, to learn what it declares or that it works."""

import sys
from pathlib import Path
from typing import Any

from telescope_core.errors import EnvironmentLoadError, RegistryError
from telescope_envs.install.packages import missing_requirements
from telescope_envs.processes.running import (
    last_line,
    passed_on,
    printed_table,
    run_program,
)
from telescope_envs.records.linked import (
    LinkedProject,
    read_project,
    write_link,
)
from telescope_envs.records.release import Release

_DESCRIBE_LIMIT_S = 120.0
_DESCRIBE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from telescope_envs.installing import declare; "
    "print(json.dumps(getattr(declare, sys.argv[3])(sys.argv[2])))"
)


def describe_wheel(wheel: Path, factory: str, *, counts_examples: bool = True) -> dict[str, Any]:
    """Return what `factory` in `wheel` declares; raises EnvironmentLoadError if it does not load.

    Counting the examples of its splits may load datasets; without it each number is None.

    This runs the wheel's code in a subprocess, so inspect the wheel first.
    """
    command = [sys.executable, "-P", "-c", _DESCRIBE, str(wheel.absolute()), factory]
    command.append("declared" if counts_examples else "declarations")
    late = f"{wheel.name}: did not load within {_DESCRIBE_LIMIT_S:g} s; its import must be quick"
    finished = run_program(command, environ=passed_on(), limit_s=_DESCRIBE_LIMIT_S, late=late)
    if finished.returncode:
        raise EnvironmentLoadError(f"{wheel.name} cannot be loaded: {last_line(finished)}")
    keys = ("config_schema_sha256", "splits", "reward", "network", "secrets")
    about = printed_table(finished, what=wheel.name, keys=keys)
    return about if counts_examples else {**about, "splits": dict.fromkeys(about["splits"])}


_PROBE_LIMIT_S = 120.0
_DECLARE = Path(__file__).with_name("declare.py")


def probe(python: Path, release: Release) -> None:
    """Load `release` with `python`, and compare what it declares with its record.

    Raises EnvironmentLoadError if it cannot be loaded, RegistryError if the declarations differ.
    """
    command = [str(python), "-I", "-B", str(_DECLARE), release.factory]
    late = f"{release.id} did not load within {_PROBE_LIMIT_S:g} s; its import must be quick"
    done = run_program(command, environ=passed_on(), limit_s=_PROBE_LIMIT_S, late=late)
    if done.returncode:
        raise EnvironmentLoadError(
            f"{release.id} cannot be loaded in its own virtual environment: {last_line(done)}"
        )
    # Not the schema of settings, whose text differs between versions of pydantic.
    recorded: dict[str, object] = {
        "splits": sorted(release.splits),
        "reward": release.reward.model_dump(),
        "network": release.network,
        "secrets": sorted(release.secrets),
    }
    declared = printed_table(done, what=release.id, keys=list(recorded))
    for field, expected in recorded.items():
        if declared[field] != expected:
            raise RegistryError(
                f"{release.id} {release.version}: its code declares {field} "
                f"{declared[field]!r}, but the registry says {expected!r}; do not use it, and tell "
                "the registry's owner"
            )


_LOAD_LIMIT_S = 120.0
_LOAD = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from telescope_core.locate import load_environment_class as load; "
    "load(sys.argv[1]).from_settings({})"
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
    _require_loads(project)
    write_link(project)
    return project


def _require_loads(project: LinkedProject) -> None:
    done = run_program(
        [sys.executable, "-B", "-P", "-c", _LOAD, project.factory, str(project.source)],
        environ=passed_on(),
        limit_s=_LOAD_LIMIT_S,
        late=f"{project.id} did not load within {_LOAD_LIMIT_S:g} s; its import must be quick",
    )
    if done.returncode:
        raise EnvironmentLoadError(
            f"{project.id} in {project.folder} cannot be loaded: {last_line(done)}; nothing was "
            "linked"
        )
