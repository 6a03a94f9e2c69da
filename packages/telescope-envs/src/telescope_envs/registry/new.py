"""Creates an empty registry in a folder, with its config and namespaces."""

import json
from collections.abc import Sequence
from pathlib import Path

from telescope_core.errors import ConfigError
from telescope_envs.registry.names import check_owner
from telescope_envs.registry.records import RegistryConfig


def create_registry(folder: Path, *, owners: Sequence[str], name: str) -> list[str]:
    """Write a registry into `folder`, which must be new or empty; returns its paths, sorted."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not empty; give a new folder")
    config = RegistryConfig(name=name).model_dump(mode="json", by_alias=True)
    files = {
        "config.json": f"{json.dumps(config, indent=2)}\n",
        "aliases.toml": "# Bare name -> owner/name. A name is never given to another environment.\n"
        "[aliases]\n",
        "reserved.txt": "# Names that nobody may publish under, one per line.\n",
    }
    for owner in owners:
        check_owner(owner)
        files[f"namespaces/{owner}.toml"] = f'owner = "{owner}"\nstatus = "active"\n'
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "index").mkdir()
    return sorted(files)
