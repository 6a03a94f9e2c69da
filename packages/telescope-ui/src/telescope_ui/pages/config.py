"""`/runs/{run}/config`: all settings, and the versions of packages."""

from collections.abc import Collection
from dataclasses import asdict

from telescope_core.settings.differing import flat_settings
from telescope_ui.base.answers import JsonObject
from telescope_ui.index.one_run import OneRun


def config_page(run: OneRun) -> JsonObject:
    """Return the settings of a run, and its packages and machine."""
    info = run.info()
    return {
        "page": "config",
        "run": run.brief(),
        "settings": _settings(run),
        "versions": info.versions,
        "environments": {name: asdict(one) for name, one in info.environments.items()},
        "inputs": dict(info.inputs),
        "chat_template": info.chat_template,
        "python": info.python,
        "platform": info.platform,
        "host": info.host,
        "resumes": [one.model_dump() for one in info.resumes],
    }


def _settings(run: OneRun) -> list[JsonObject]:
    origin = run.settings_origin()
    return [
        {
            "name": name,
            "value": value,
            **({"default": origin.defaults[name]} if name in origin.defaults else {}),
            "is_set": _is_among(name, origin.given),
            "is_default": None if origin.chosen is None else not _is_among(name, origin.chosen),
        }
        for name, value in flat_settings(run.config()).items()
    ]


def _is_among(name: str, names: Collection[str] | None) -> bool | None:
    if names is None:
        return None
    parts = name.split(".")
    # A table without a fixed form, such as options of an environment, is listed by its own name.
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))
