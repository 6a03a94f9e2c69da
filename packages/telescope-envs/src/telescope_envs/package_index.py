"""Which package index to use: this machine's settings for uv, else its settings for pip.

Extra indexes in pip's files are ignored, because pip merges them with the main one while uv would
search them first. To use one, name it in UV_INDEX or PIP_EXTRA_INDEX_URL.
"""

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_PIP_TO_UV = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "cert": "SSL_CERT_FILE",
}
_FROM_FILES = {"find-links", "index-url", "cert"}
_UV_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
_SEPARATOR = {"UV_FIND_LINKS": ","}


def index_settings(environ: Mapping[str, str], *, has_index: bool = True) -> dict[str, str]:
    """Return the variables to run uv with: all of `environ`, and pip's settings by uv's names.

    Without `has_index`, every variable that names an index is removed instead.
    """
    if not has_index:
        return {
            name: text
            for name, text in environ.items()
            if name not in (*_UV_INDEXES, "UV_FIND_LINKS") and not name.startswith("PIP_")
        }
    settings = dict(environ)
    names_index = any(environ.get(name) for name in _UV_INDEXES)
    for option, uv_name in _PIP_TO_UV.items():
        found = pip_setting(option, environ)
        is_index = uv_name in _UV_INDEXES
        if found and not environ.get(uv_name) and not (is_index and names_index):
            settings[uv_name] = _SEPARATOR.get(uv_name, " ").join(found)
    return settings


def pip_setting(option: str, environ: Mapping[str, str]) -> list[str]:
    """Return pip's setting of `option`, from its variable, else from the last file that has it.

    Folders that do not exist are left out, as pip does.
    """
    text = environ.get(f"PIP_{option.upper().replace('-', '_')}", "")
    for path in _pip_files(environ) if not text and option in _FROM_FILES else ():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself will complain
        for section in ("global", "install"):
            text = parser.get(section, option, fallback=text)
    return [part for part in text.split() if _exists(part)]


def _pip_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the files of pip's configuration; later files take precedence."""
    if environ.get("PIP_CONFIG_FILE") == os.devnull:
        return []
    home = Path(environ.get("HOME", "~")).expanduser()
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    files.append(Path(sys.prefix) / "pip.conf")
    chosen = environ.get("PIP_CONFIG_FILE", "")
    return [*files, Path(chosen)] if chosen else files


def _exists(place: str) -> bool:
    path = place.removeprefix("file://")
    return "://" in path or Path(path).exists()
