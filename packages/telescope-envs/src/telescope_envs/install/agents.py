"""`telescope agent`: the packages of harnesses, each in its own virtual environment.

The interpreter is the one that sandboxes of this machine have. `telescope_core.harnesses.installed`
says where the environments are.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

from telescope_core.harnesses.installed import (
    COMPLETE,
    agent_folder,
    agents_folder,
    harness_excluded,
    harness_names,
    harness_requirements,
    require_readable,
)
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_envs.install.venv import clear_scratch
from telescope_envs.processes.uv import Uv
from telescope_envs.records.files import locked, remove_tree

_READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_REACHABLE = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """State of a harness on this machine."""

    name: str
    requirements: tuple[str, ...]
    """Empty = it needs no packages of its own."""
    excluded: tuple[str, ...]
    """Packages that the requirements include but that are left out."""
    folder: Path
    is_installed: bool


def agent_states() -> list[AgentState]:
    """Return every harness, and whether its packages are installed."""
    interpreter = find_interpreter().path
    return [_state(name, interpreter) for name in harness_names()]


def install_agent(name: str) -> AgentState:
    """Install the packages of a harness, unless they are there; raises uv's message on failure."""
    interpreter = find_interpreter().path
    state = _state(name, interpreter)
    if not state.requirements or state.is_installed:
        return state
    state.folder.parent.mkdir(parents=True, exist_ok=True)
    require_readable(state.folder)
    with locked(state.folder.with_suffix(".lock"), what=f"installing the agent {name}"):
        if not (state.folder / COMPLETE).exists():
            _make(state, interpreter)
    return _state(name, interpreter)


def uninstall_agent(name: str) -> bool:
    """Remove every installation of a harness; returns whether there was one."""
    harness_requirements(name)
    found = [one for one in agents_folder().glob(f"{name}-*") if one.is_dir()]
    for folder in found:
        with locked(folder.with_suffix(".lock"), what=f"removing the agent {name}"):
            (folder / COMPLETE).unlink(missing_ok=True)
            remove_tree(folder)
    return bool(found)


def _state(name: str, interpreter: str) -> AgentState:
    requirements, excluded = harness_requirements(name), harness_excluded(name)
    folder = agent_folder(name, requirements, interpreter, excluded)
    is_installed = not requirements or (folder / COMPLETE).exists()
    return AgentState(
        name=name,
        requirements=requirements,
        excluded=excluded,
        folder=folder,
        is_installed=is_installed,
    )


def _make(state: AgentState, interpreter: str) -> None:
    uv, folder = Uv(), state.folder
    clear_scratch(folder)
    try:
        uv.make_venv(folder, python=interpreter)
        python = str(folder / "bin" / "python")
        never = folder / "never.txt"
        never.write_text("".join(f"{one}; python_version < '0'\n" for one in state.excluded))
        # The sandbox cannot write byte code there, and would compile it at every start.
        words = ["--python", python, "--compile-bytecode", "--overrides", str(never)]
        uv.run_cache_first(
            ["pip", "install", *words, *state.requirements],
            failure=f"{', '.join(state.requirements)} cannot be installed",
        )
        pins = uv.run(["pip", "freeze", "--python", python], failure=f"{folder} is unreadable")
        _open_to_all(folder)
        (folder / COMPLETE).write_text(pins)
    except BaseException:
        remove_tree(folder)
        raise


def _open_to_all(folder: Path) -> None:
    """Make everything in `folder` readable for all users, whatever the umask is."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        is_program = path.is_dir() or bool(mode & stat.S_IXUSR)
        wanted = mode | _READABLE | (_REACHABLE if is_program else 0)
        if wanted != mode:
            path.chmod(wanted)
