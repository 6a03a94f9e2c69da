"""Loading an installed environment in a clean process, and comparing it with its record."""

from pathlib import Path

from telescope_core.errors import EnvironmentLoadError, RegistryError
from telescope_envs.registry.records import Release
from telescope_envs.subprocesses import last_line, passed_on, printed_table, run_program

_TIME_LIMIT_S = 120.0
_PROGRAM = Path(__file__).with_name("declare.py")


def probe(python: Path, release: Release) -> None:
    """Load `release` with `python`, and compare what it declares with its record.

    Raises EnvironmentLoadError if it cannot be loaded, RegistryError if the declarations differ.
    """
    command = [str(python), "-I", "-B", str(_PROGRAM), release.factory]
    late = f"{release.id} did not load within {_TIME_LIMIT_S:g} s; its import must be quick"
    done = run_program(command, environ=passed_on(), limit_s=_TIME_LIMIT_S, late=late)
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
