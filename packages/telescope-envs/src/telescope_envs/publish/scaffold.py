"""Create a project from a template: text files whose `{{placeholders}}` are filled in.

A template is a folder in `templates/`; the files of `templates/common` are part of each template.
"""

import builtins
import json
import keyword
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

import telescope_core
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_envs.records.files import filled, write_file
from telescope_envs.records.names import check_name, check_owner, distribution_name, module_name

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SUFFIX = ".in"
_COMMON = "common"
_TEMPLATES = Path(__file__).with_name("templates")
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "single-turn": ("Sort words alphabetically", ("single-turn", "words")),
    "multi-turn": ("Break a letter code in a few guesses", ("game", "multi-turn")),
    "tools": ("Look up prices with a tool and add them", ("arithmetic", "tools")),
}
"""Template name -> the summary and the tags of its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProject:
    """A project that has just been written."""

    id: str
    """`owner/name`."""
    folder: Path
    files: tuple[str, ...]
    """Relative to the folder, sorted."""
    factory: str


def create_project(folder: Path, *, owner: str, name: str, template: str) -> NewProject:
    """Write the project of `owner/name` into `folder`, which must be new or empty."""
    if template not in TEMPLATES:
        raise unknown_name("template", template, TEMPLATES)
    _check(check_owner, owner)
    _check(check_name, name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} already exists and is not empty; give another folder: --dir FOLDER"
        )
    values = _values(owner, name, template)
    texts = {
        render(path, {"module": values["module"]}): render(text, values)
        for path, text in _template_files(template)
    }
    with filled(folder):
        for path, text in texts.items():
            write_file(folder / path, text.encode())
    return NewProject(
        id=f"{owner}/{name}",
        folder=folder,
        files=tuple(sorted(texts)),
        factory=f"{values['module']}:{values['class']}",
    )


def render(text: str, values: Mapping[str, str]) -> str:
    """Fill in each placeholder; inserted text is not searched for placeholders."""

    def value(found: re.Match[str]) -> str:
        assert found[1] in values, f"a template has the unknown placeholder {found[0]}"
        return values[found[1]]

    return _PLACEHOLDER.sub(value, text)


def class_name(name: str) -> str:
    """Return a class name for the environment `name` that no other name in its file uses."""
    joined = "".join(word.capitalize() for word in name.split("-"))
    if joined[0].isdigit():
        joined = f"Task{joined}"
    taken = keyword.iskeyword(joined) or hasattr(builtins, joined)
    is_imported = hasattr(telescope_core, joined) or joined in {"Annotated", "Counter", "Field"}
    return f"{joined}Task" if taken or is_imported or joined == "Config" else joined


def _check(check: Callable[[str], str], text: str) -> None:
    """Raise ConfigError for an invalid name, and suggest a similar valid one."""
    try:
        check(text)
    except ConfigError as error:
        try:
            advice = f"; try {check(plain_name(text))!r}"
        except ConfigError:
            advice = ""
        raise ConfigError(f"{error}{advice}") from None


def plain_name(text: str) -> str:
    """Return `text` in small letters, digits and hyphens; letters lose their accents."""
    apart = unicodedata.normalize("NFKD", text)
    letters = "".join(one for one in apart if not unicodedata.combining(one))
    return re.sub(r"[^a-z0-9]+", "-", letters.lower()).strip("-")


def _values(owner: str, name: str, template: str) -> dict[str, str]:
    summary, tags = TEMPLATES[template]
    core = Version(version("telescope-core"))
    return {
        "owner": owner,
        "name": name,
        "title": name.replace("-", " ").capitalize(),
        "class": class_name(name),
        "distribution": distribution_name(owner, name),
        "module": module_name(owner, name),
        "summary": summary,
        "tags": json.dumps(sorted(tags)),
        "core": f"telescope-core>={core.major}.{core.minor},<{core.major}.{core.minor + 1}",
        "year": str(datetime.now(UTC).year),
    }


def _template_files(template: str) -> Iterator[tuple[str, str]]:
    """Yield the path in the project and the text of each file of a template."""
    for root in (_TEMPLATES / _COMMON, _TEMPLATES / template):
        for file in root.rglob(f"*{_SUFFIX}"):
            path = file.relative_to(root).as_posix().removesuffix(_SUFFIX)
            inner = "/".join("{{module}}" if one == "module" else one for one in path.split("/"))
            yield (".gitignore" if inner == "gitignore" else inner), file.read_text("utf-8")
