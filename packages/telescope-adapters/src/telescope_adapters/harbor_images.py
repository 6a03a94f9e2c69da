"""The sandbox of a Harbor task: an image that is built, or steps of a Dockerfile.

The local sandbox has no images: there, the lines of a Dockerfile that need none are done when it
starts, and a line that needs one is refused by name. The base image is not looked at.
"""

import hashlib
import io
import json
import posixpath
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from telescope_adapters.harbor_tasks import TaskImage
from telescope_core.base.errors import ConfigError

_SAYS_NOTHING = {
    *("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "VOLUME", "HEALTHCHECK"),
}
"""Lines that say nothing of the files or variables of commands that are run in a container."""
_INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|pip3?|pipx|uv|conda|npm|pnpm|yarn|cargo|go|gem|curl|wget|git)\b\s+\S"
)
_GIVEN = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_SYSTEM = {
    *("", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"),
    *("etc", "proc", "sys", "dev", "run"),
}
_WILDCARDS = re.compile(r"\*\*/?|\*|\?|\[[^\]]*\]|\\.")
"""The parts of a pattern of .dockerignore that are no names."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROOT_USERS = ("", "root", "0", "root:root", "0:0")
_DIGITS = 16
AGENT_PYTHON = "/opt/telescope-agent/bin/python"
"""Python of a harness and its packages, in images that are built for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that is done in a local sandbox before the agent starts."""

    files: bytes = b""
    """A tar of paths below `/`."""
    command: str = ""
    """For `sh -c`."""
    folder: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """The settings and steps that replace an image in a local sandbox."""

    folder: str = "/app"
    """The working directory."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    steps: tuple[Step, ...] = ()
    roots: frozenset[str] = frozenset()
    """Folders below `/` that have to be writable."""


def packed(folder: Path) -> bytes:
    """Return a tar of all files in `folder`, each owned by root."""
    return _packed(folder, sorted(folder.rglob("*")), {})


def _packed(folder: Path, paths: Sequence[Path], more: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if name not in more:
                tar.add(path, arcname=name, recursive=False, filter=_plain)
        for name, content in more.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return held.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out of a tar who owns a file here and when it was written, which change a digest."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def build_of(image: TaskImage, requirements: Sequence[str]) -> tuple[bytes, str]:
    """Return the context of the build of an image of a task, and the tag that names its contents.

    `requirements` are the packages of the harness, which are installed over it.
    """
    text = image.dockerfile
    if not text:
        folder = image.context
        is_copied = folder.is_dir() and any(folder.iterdir())
        is_copied = is_copied and not image.has_tests and not (folder / "Dockerfile").exists()
        text = f"FROM {image.table.docker_image}\n{'COPY . ./' if is_copied else ''}\n"
    user = user_of(text)
    if user:
        folders = f"/logs /solution{'' if image.has_tests else ' /tests'}"
        text += f"\nUSER 0\nRUN mkdir -p {folders} && chown -R {user} {folders}\n"
    if requirements:
        home = posixpath.dirname(posixpath.dirname(AGENT_PYTHON))
        install = f"{AGENT_PYTHON} -m pip install --no-cache-dir {shlex.join(requirements)}"
        text += f"\nRUN python3 -m venv {home} && {install}\n"
    if user:
        text += f"USER {user}\n"
    files = _context_files(image.context)
    context = _packed(image.context, files, {"Dockerfile": text.encode()})
    digest = hashlib.sha256(context).hexdigest()[:_DIGITS]
    name = re.sub(r"[^a-z0-9]+", "-", image.name.lower()).strip("-")
    return context, f"telescope-harbor/{name}:{digest}"


def user_of(dockerfile: str) -> str:
    """Return the user as whom programs run; empty = root, or that of the base image."""
    users, stage, user = dict[str, str](), "", ""
    for word, rest in _lines(dockerfile):
        if word == "FROM":
            # A stage has the user of the one that it begins with.
            base, *named = [one.lower() for one in rest.split() if not one.startswith("--")]
            stage, user = named[-1] if named else "", users.get(base, "")
        elif word == "USER":
            user = rest
        users[stage] = user
    return "" if user in _ROOT_USERS else user


def _context_files(context: Path) -> list[Path]:
    """Return the files and folders of a build, without those that its .dockerignore excludes.

    Services leave this to who sends them the files.
    """
    own, every = context / "Dockerfile.dockerignore", context / ".dockerignore"
    path = own if own.is_file() else every
    lines = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rules = [
        (_ignoring(line.lstrip("!")), line.startswith("!"))
        for line in map(str.strip, lines.splitlines())
        if line and not line.startswith("#")
    ]

    def is_kept(name: PurePosixPath) -> bool:
        whole = [name.as_posix(), *(one.as_posix() for one in name.parents)]
        kept = [is_excepted for rule, is_excepted in rules if any(map(rule.fullmatch, whole))]
        return kept[-1] if kept else True

    found = sorted(context.rglob("*"))
    return [path for path in found if is_kept(PurePosixPath(path.relative_to(context).as_posix()))]


def _ignoring(text: str) -> re.Pattern[str]:
    """Return the pattern of whole paths that a line of .dockerignore stands for."""
    pattern, end = "", 0
    text = posixpath.normpath(text.strip()).lstrip("/")
    for found in _WILDCARDS.finditer(text):
        part = found[0]
        meant = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part)
        if meant is None:
            meant = re.escape(part[1]) if part[0] == "\\" else part
        pattern += re.escape(text[end : found.start()]) + meant
        end = found.end()
    return re.compile(pattern + re.escape(text[end:]))


def local_image(image: TaskImage, skipped: Sequence[str]) -> LocalImage:
    """Return what stands for an image of a task in a local sandbox.

    Lines of RUN that contain one of `skipped` are left out. Raises ConfigError that names the line
    that needs an image.
    """
    table, context = image.table, image.context
    if image.has_tests and not image.dockerfile:
        raise ConfigError(f"{image.name} needs an image: {table.docker_image} brings its tests")
    reader = _Reader(image.name, context, skipped)
    if not image.dockerfile:
        if (context / "Dockerfile").exists() or not context.is_dir():
            reader.folder = table.workdir or reader.folder
        else:
            reader.run("WORKDIR", table.workdir or reader.folder)
            reader.run("COPY", ". ./")
    for word, rest in _lines(image.dockerfile):
        reader.run(word, rest)
    folder = table.workdir or reader.folder
    roots = {*reader.roots}
    if folder != "/" or not image.has_tests:
        # A sandbox that only grades need not write to its working directory.
        roots.add(root_of(folder, image.name))
    return LocalImage(
        folder=folder,
        environment=reader.environment,
        steps=tuple(reader.steps),
        roots=frozenset(roots - {"/tmp"}),
    )


def _lines(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with what follows each."""
    whole = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(whole))
    lines = [line.strip() for line in joined.splitlines()]
    parts = [line.partition(" ") for line in lines if line]
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


class _Reader:
    """Does the lines of a Dockerfile one by one, as far as files and variables go."""

    def __init__(self, task: str, context: Path, skipped: Sequence[str]) -> None:
        self._task = task
        self._context = context
        self._files = _context_files(context)
        self._skipped = skipped
        self._given: dict[str, str] = {"PATH": _PATH}
        self._num_bases = 0
        self.folder = "/app"
        self.environment: dict[str, str] = {}
        self.steps: list[Step] = []
        self.roots: set[str] = set()

    def run(self, word: str, rest: str) -> None:
        """Do one line; raises ConfigError for one that needs an image."""
        line = f"{word} {rest}"
        if word == "FROM":
            self._num_bases += 1
            if self._num_bases > 1:
                raise self._refused(line, "has several stages")
            # Images of Docker begin in `/` unless they say otherwise.
            self.folder = "/"
        elif word == "WORKDIR":
            self.folder = posixpath.join(self.folder, self._filled(rest).strip("\"'"))
            self.roots.add(root_of(self.folder, self._task))
            self._add(command=f"mkdir -p {shlex.quote(self.folder)}", folder="/tmp")
        elif word in ("ENV", "ARG"):
            self._set(word, rest)
        elif word in ("COPY", "ADD"):
            self._copy(line, rest)
        elif word == "RUN":
            self._command(line, rest)
        elif word == "USER" and rest in _ROOT_USERS:
            return
        elif word not in _SAYS_NOTHING:
            raise self._refused(line, "cannot be done there")

    def _set(self, word: str, rest: str) -> None:
        pairs = shlex.split(self._filled(rest))
        if word == "ENV" and pairs and "=" not in pairs[0]:
            pairs = [f"{pairs[0]}={' '.join(pairs[1:])}"]
        for name, equals, value in (pair.partition("=") for pair in pairs):
            if word == "ENV":
                self.environment[name] = self._given[name] = value
            elif equals:
                self._given.setdefault(name, value)

    def _command(self, line: str, rest: str) -> None:
        if any(text in line for text in self._skipped):
            return
        while rest.startswith("--"):
            rest = rest.partition(" ")[2].lstrip()
        if rest.startswith("<<"):
            raise self._refused(line, "is written as several lines of a program")
        if _INSTALLS.search(rest):
            raise self._refused(
                line,
                "needs a network; if this machine has what it installs, add a part of the line to "
                "env.local_skips",
            )
        self._add(
            command=shlex.join(json.loads(rest)) if rest.startswith("[") else rest,
            folder=self.folder,
        )

    def _copy(self, line: str, rest: str) -> None:
        words: list[str] = (
            json.loads(rest) if rest.startswith("[") else shlex.split(self._filled(rest))
        )
        flags = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        mode = next((flag.partition("=")[2] for flag in flags if flag.startswith("--chmod=")), "")
        if any(flag.startswith("--from") for flag in flags) or "://" in rest or "<<" in rest:
            raise self._refused(line, "takes files from elsewhere")
        found = [path for source in sources for path in self._matching(line, source)]
        whole = posixpath.join(self.folder, target)
        is_folder = target.endswith(("/", ".")) or len(found) > 1
        self.roots.add(root_of(whole, self._task))
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as tar:
            for path in found:
                if path.is_dir():
                    inner = [one for one in self._files if path in one.parents]
                    names = [
                        posixpath.join(whole, one.relative_to(path).as_posix()) for one in inner
                    ]
                else:
                    inner, names = (
                        [path],
                        [posixpath.join(whole, path.name) if is_folder else whole],
                    )
                for one, name in zip(inner, names, strict=True):
                    info = _plain(tar.gettarinfo(one, posixpath.normpath(name).lstrip("/")))
                    info.mode = int(mode, 8) if mode and info.isfile() else info.mode
                    if info.isfile():
                        with one.open("rb") as file:
                            tar.addfile(info, file)
                    else:
                        tar.addfile(info)
        self._add(files=held.getvalue(), folder="/")

    def _matching(self, line: str, source: str) -> list[Path]:
        relative = posixpath.normpath(source).lstrip("/")
        found = [self._context] if relative == "." else sorted(self._context.glob(relative))
        found = [
            path
            for path in found
            if path == self._context or any(path in (one, *one.parents) for one in self._files)
        ]
        if not found or ".." in PurePosixPath(relative).parts:
            raise self._refused(line, f"copies {source}, which is not in environment/")
        return found

    def _add(self, *, folder: str, files: bytes = b"", command: str = "") -> None:
        environment = dict(self._given)
        self.steps.append(
            Step(files=files, command=command, folder=folder, environment=environment)
        )

    def _filled(self, text: str) -> str:
        return _GIVEN.sub(lambda found: self._given.get(found[1] or found[3], found[2] or ""), text)

    def _refused(self, line: str, why: str) -> ConfigError:
        return ConfigError(f"{self._task} needs an image: `{line:.80}` {why}")


def root_of(path: str, task: str) -> str:
    """Return the folder below `/` that has to be writable for `path`.

    Raises ConfigError for one of the system.
    """
    name = posixpath.normpath(path).split("/")[1]
    if name in _SYSTEM:
        raise ConfigError(
            f"{task} needs an image: it works in {path}, which is a folder of the system"
        )
    return f"/{name}"
