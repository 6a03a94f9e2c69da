"""Run uv with this machine's settings for it and for pip, never with a project's.

Extra indexes in pip's files are ignored, because pip merges them with the main one while uv would
search them first. To use one, name it in UV_INDEX or PIP_EXTRA_INDEX_URL.
"""

import configparser
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uv
from packaging.utils import canonicalize_name

from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    NoRoomError,
    TelescopeError,
)
from telescope_core.records.room import lack_of_room
from telescope_envs.processes.running import run_program
from telescope_envs.records.files import data_folder

# Before CPython 3.12, threads that ask `sysconfig` first at the same time find it half filled
# (python/cpython#92452), and uv's package asks it where uv is. An import has one thread.
sysconfig.get_config_vars()

_PIP_TO_UV = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "cert": "SSL_CERT_FILE",
}
_FROM_FILES = {"find-links", "index-url", "cert"}
_UV_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
_HANDED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "SYSTEMROOT", "NETRC"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "LD_LIBRARY_PATH", "CC", "CXX", "CFLAGS"),
    }
)
"""Variables for uv, or a compiler that it starts; those for proxies are always included."""
_SEPARATOR = {"UV_FIND_LINKS": ","}


def index_settings(environ: Mapping[str, str], *, has_index: bool = True) -> dict[str, str]:
    """Return the variables for uv: those it reads in `environ`, and pip's under uv's names.

    Tokens and keys of other programs are left out, because uv may run the build of a package.
    Without `has_index`, every variable that names an index is left out as well.
    """
    settings = {name: text for name, text in environ.items() if _is_handed_on(name)}
    if not has_index:
        return {
            name: text
            for name, text in settings.items()
            if name not in (*_UV_INDEXES, "UV_FIND_LINKS") and not name.startswith("UV_INDEX_")
        }
    if settings.get("UV_FIND_LINKS"):
        places = settings["UV_FIND_LINKS"].split(",")
        settings["UV_FIND_LINKS"] = ",".join(_absolute(place) for place in places)
    names_index = any(environ.get(name) for name in _UV_INDEXES)
    for option, uv_name in _PIP_TO_UV.items():
        found = pip_setting(option, environ)
        is_index = uv_name in _UV_INDEXES
        if found and not environ.get(uv_name) and not (is_index and names_index):
            settings[uv_name] = _SEPARATOR.get(uv_name, " ").join(map(_absolute, found))
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


def config_options(environ: Mapping[str, str]) -> list[str]:
    """Return the options of uv that name its configuration: this user's, never a project's.

    By default uv also reads `uv.toml` and `[tool.uv]` of the folder it is started in and of its
    parents, which may belong to a project that somebody else wrote.
    """
    home = Path(environ.get("HOME", "~")).expanduser()
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    chosen = environ.get("UV_CONFIG_FILE")
    places = [Path(chosen)] if chosen else [config / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]
    found = next((place for place in places if place.is_file()), None)
    return ["--no-config"] if found is None else ["--config-file", str(found.absolute())]


def _is_handed_on(name: str) -> bool:
    is_own = name.startswith(("UV_", "SSL_", "LC_", "XDG_")) and not name.startswith("UV_PUBLISH_")
    is_config = name in ("UV_CONFIG_FILE", "UV_NO_CONFIG")
    return (is_own and not is_config) or name.upper() in _HANDED_ON


def _absolute(place: str) -> str:
    """Return `place` as an absolute path, valid in any folder."""
    return place if "://" in place or not Path(place).exists() else str(Path(place).absolute())


def _exists(place: str) -> bool:
    path = place.removeprefix("file://")
    return "://" in path or Path(path).exists()


LINK_MODE = "copy"
"""With links, whoever edits a file of one virtual environment edits it in uv's cache and in every
other. uv's mode "clone" links as well where the file system cannot clone."""
_TIME_LIMIT_S = 900.0
_INFO = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._]*)-(?P<version>[^-]+)\.dist-info")
_PLACE = re.compile(r"`(/[^`]+)`")
_NO_ROOM = re.compile(rf"os error ({'|'.join(map(str, NoRoomError.CODES))})\b")
_NO_CACHE = re.compile("[Ff]ailed to initialize cache")
_NO_WHEEL = re.compile(r"Wheels are required for `([^`]+)`|(\S+?)(?:==\S+)? has no usable wheels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Uv:
    """Runs uv, with the sources that packages may come from."""

    offline: bool = False
    """Use no network, only uv's cache."""
    wheels: Path | None = None
    """A folder of wheels to take packages from, instead of every index."""
    heirs: tuple[int, ...] = ()
    """Descriptors of locks that stay held while uv runs, even if this process is killed."""
    distrusts_cache: bool = False
    """Fetch every package. uv checks the hash of a wheel when it unpacks it into its cache, and
    never again, not even with its own options for refreshing and reinstalling."""

    def run(self, arguments: Sequence[str], *, failure: str) -> str:
        """Run uv and return its output; raises an error that begins with `failure`.

        It is NoRoomError on a full disk, and ConfigError for a cache that cannot be used.
        """
        late = f"{failure}: uv did not finish in {_TIME_LIMIT_S:g} s; check the network"
        finished = run_program(
            [uv.find_uv_bin(), *arguments, *self._options()],
            environ={
                **index_settings(os.environ, has_index=self.wheels is None),
                "UV_LINK_MODE": LINK_MODE,
            },
            limit_s=_TIME_LIMIT_S,
            late=late,
            heirs=self.heirs,
        )
        if finished.returncode:
            raise _failed(failure, finished.stderr.strip())
        return finished.stdout

    def make_venv(self, folder: Path, *, python: str = sys.executable, moves: bool = False) -> None:
        """Make a virtual environment of `python`, without packages; one that `moves` is renamed."""
        options = ["--no-project", *(["--relocatable"] if moves else []), "--python", python]
        failure = f"a virtual environment cannot be created in {folder}"
        self.run(["venv", *options, str(folder)], failure=failure)

    def run_cache_first(self, arguments: Sequence[str], *, failure: str) -> str:
        """Run uv as `run` does, but use the network only if uv's cache lacks something."""
        if self.wheels is None and not self.offline and not self.distrusts_cache:
            try:
                return self.run([*arguments, "--offline"], failure=failure)
            except EnvironmentLoadError:
                pass
        return self.run(arguments, failure=failure)

    def run_building(
        self,
        run: Callable[[Sequence[str]], object],
        allow_sdist: Sequence[str],
        *,
        python: str = "",
    ) -> None:
        """Call `run` with those of `allow_sdist` that have to be built, for `wheels_only`.

        uv has no option for "wheels, and source where there is none": what may be built may have no
        wheel, so a package with wheels alone would be an old version or none. With `python`, for
        which versions are chosen, packages whose newest version has no wheel are built at once.
        Others follow when uv says that it needs them.
        """
        built: list[str] = []
        for name in allow_sdist if python else ():
            newest = self._chosen(name, python, wheels_only(()))
            if newest is None or self._chosen(f"{name}>{newest}", python, wheels_only((name,))):
                built.append(name)
        while True:
            try:
                run(built)
            except EnvironmentLoadError as error:
                found = {canonicalize_name(a or b) for a, b in _NO_WHEEL.findall(str(error))}
                more = [name for name in allow_sdist if canonicalize_name(name) in found]
                if not set(more) - set(built):
                    raise
                built += [name for name in more if name not in built]
            else:
                return

    def _chosen(self, requirement: str, python: str, options: Sequence[str]) -> str | None:
        """Return the version that uv chooses for a requirement; None if there is none."""
        with tempfile.TemporaryDirectory() as scratch:
            wanted = Path(scratch) / "wanted.in"
            wanted.write_text(f"{requirement}\n")
            arguments = ["pip", "compile", str(wanted), "--python", python, "--no-deps", "--quiet"]
            try:
                said = self.run(
                    [*arguments, "--no-header", "--no-annotate", *options], failure=requirement
                )
            except EnvironmentLoadError:
                return None
        return said.strip().partition("==")[2] or None

    def _options(self) -> list[str]:
        cache = ["--no-cache"] if self.distrusts_cache else []
        if self.wheels is not None:
            found = str(self.wheels.absolute())
            return [*cache, "--offline", "--no-config", "--no-index", "--find-links", found]
        return [*cache, *config_options(os.environ), *(("--offline",) if self.offline else ())]


def _failed(failure: str, said: str) -> TelescopeError:
    """Return the error for what uv `said`: of the disk, of its cache, or of the packages."""
    error = EnvironmentLoadError(f"{failure}. uv said:\n{said}")
    if _NO_ROOM.search(said):
        place = Path([str(data_folder()), *_PLACE.findall(said)][-1])
        return NoRoomError(f"{failure}: {lack_of_room(place, error)}")
    if _NO_CACHE.search(said):
        return ConfigError(
            f"{failure}: uv cannot use its cache ({' '.join(said.split())}); set HOME or "
            "UV_CACHE_DIR to a folder that can be written"
        )
    return error


def installed_pins() -> list[str]:
    """Return `name==version` of every package this interpreter has.

    They come from the names of folders, because reading every METADATA takes half a second.
    """
    folders = [Path(entry) for entry in sys.path if entry]
    found = [_INFO.fullmatch(path.name) for at in folders for path in at.glob("*.dist-info")]
    return sorted({f"{info['name']}=={info['version']}" for info in found if info is not None})


def lacks_wheel(said: str, needed_by: str) -> EnvironmentLoadError | None:
    """Return the error to raise if uv `said` that a package has no wheel, else None."""
    found = _NO_WHEEL.search(said)
    if found is None:
        return None
    name = found[1] or found[2]
    return EnvironmentLoadError(
        f"{needed_by} needs {name}, which has no wheel, only source: building it runs its code "
        f"while installing. If you trust it, add --allow-sdist {name}"
    )


def wheels_only(allow_sdist: Sequence[str]) -> list[str]:
    """Return the options of uv and pip that refuse to build anything but `allow_sdist`.

    No wheel of those is used; `Uv.run_building` names only those that need it.
    """
    exceptions = [part for name in allow_sdist for part in ("--no-binary", name)]
    return ["--only-binary", ":all:", *exceptions]
