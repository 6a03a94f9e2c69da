"""Which registry is meant: flag, variable, user's file, enclosing checkout, shipped snapshot."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from telescope_core.errors import ConfigError
from telescope_envs.registry.registry import Registry

VARIABLE = "TELESCOPE_REGISTRY"


def open_registry(
    chosen: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    working_directory: Path | None = None,
) -> Registry:
    """Open the registry `chosen` on the command line, or the default one."""
    named = chosen or environ.get(VARIABLE) or _from_user_file(environ)
    if named:
        return Registry.at(_as_folder(named))
    for start in (working_directory or Path.cwd(), Path(__file__).resolve()):
        for folder in (start, *start.parents):
            if (folder / "registry" / "index").is_dir():
                return Registry.at(folder / "registry")
    return Registry.at(Path(__file__).resolve().parent.parent / "snapshot")


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's configuration file, which may not exist."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")) / ".config")
    return Path(base).expanduser() / "telescope" / "config.toml"


def _from_user_file(environ: Mapping[str, str]) -> str:
    path = user_file(environ)
    if not path.is_file():
        return ""
    try:
        registry = tomllib.loads(path.read_text()).get("registry", "")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if not isinstance(registry, str):
        raise ConfigError(f"{path}: registry must be the path of a registry, got {registry!r}")
    return registry


def _as_folder(named: str) -> Path:
    path = named.removeprefix("file://")
    if "://" in path:
        raise ConfigError(
            f"registry {named!r}: this version reads registries that are folders; "
            "fetch it and give its path"
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"registry {named!r} is not a folder; give the path of a registry")
    return folder
