"""`link`: start using an environment from its project's folder, after checking that it works."""

import sys
from pathlib import Path

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.linked import LinkedProject, read_project, write_link
from telescope_envs.packages import missing_requirements
from telescope_envs.subprocesses import last_line, passed_on, run_program

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
