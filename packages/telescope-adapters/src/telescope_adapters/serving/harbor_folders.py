"""Write examples of ours as Harbor task folders, to be played with its own runner.

An environment says which files an example is (`task_files`); this adds what Harbor needs beside
them, and writes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from telescope_core.base.errors import ConfigError, EnvironmentLoadError

_DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . .\n"
_NEEDED = ("instruction.md", "tests/test.sh")
_TABLE = """schema_version = "1.3"

[task]
name = {name}

[metadata]
environment = {environment}
version = {version}
split = {split}
example = {example}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 2048
storage_mb = 1024
"""


def write_tasks(
    folder: Path,
    tasks: Mapping[str, Mapping[str, Mapping[str, str] | None]],
    *,
    environment: str,
    version: str,
) -> list[Path]:
    """Write the tasks, split -> example -> path -> text, and return their folders.

    Raises ConfigError where `folder` has something in it, and EnvironmentLoadError for an example
    that is no task.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another folder with --output")
    written: dict[Path, tuple[str, Mapping[str, str]]] = {}
    is_published = re.fullmatch(r"\w[\w-]*/\w[\w-]*", environment) is not None
    owner, short = environment.split("/") if is_published else ("local", environment)
    for split, examples in tasks.items():
        for example, files in examples.items():
            missing = [name for name in _NEEDED if name not in (files or {})]
            if files is None or missing:
                what = f"lacks {' and '.join(missing)}" if files else "gives no files"
                raise EnvironmentLoadError(f"example {example!r} of {environment} {what}")
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{short}-{example}").strip("-")
            table = _TABLE.format(
                name=_quoted(f"{owner}/{name}"),
                environment=_quoted(environment),
                version=_quoted(version),
                split=_quoted(split),
                example=_quoted(example),
            )
            if folder / name in written:
                raise EnvironmentLoadError(
                    f"two examples of {environment} would be the folder {name}, such as {example!r}"
                )
            written[folder / name] = (table, files)
    for task, (table, files) in written.items():
        whole = {"environment/Dockerfile": _DOCKERFILE, **files, "task.toml": table}
        for path, text in whole.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text, encoding="utf-8")
            if path.endswith(".sh"):
                (task / path).chmod(0o755)
    return list(written)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
