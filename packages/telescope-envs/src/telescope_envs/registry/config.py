"""Addresses of registries, the user's configuration file, and the choice of a registry.

The file has the default in `registry`, and under `[registries]` lines such as
`corp = "https://hub.corp.example"` or `lab = { address = "http://10.0.0.5", insecure = true }`.
The first of these that exists is used: the registry that was named, `TELESCOPE_REGISTRY`, the
default in the file, the `registry/` folder of the enclosing checkout, the snapshot in this package.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import SplitResult, quote, unquote_to_bytes, urlsplit

import msgspec

from telescope_core.base.addresses import is_loopback, is_on_this_machine
from telescope_core.base.decoders import convert
from telescope_core.base.errors import ConfigError, nearest, unknown_name
from telescope_envs.records.model import read_toml_file

FORMS = "a folder, file://FOLDER, https://HOST/PATH or hf://OWNER/REPOSITORY[@REVISION]"
_HUB = re.compile(
    r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]*[\w-]))?/*", re.ASCII
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PLAIN_IN_PATHS = "!$&'()*+,;=:@"
"""Characters of a path that need no escapes, besides letters, digits and `_.-~`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The canonical form of a registry's address, for comparison and storage."""

    text: str
    """The address in the form that `--registry` accepts, without credentials."""
    scheme: str
    """The scheme in lower case; `file` for folders."""

    @property
    def without_revision(self) -> str:
        """The address without its revision; tokens belong to this form."""
        return self.text.partition("@")[0] if self.scheme == "hf" else self.text

    def is_place_of(self, other: "Address") -> bool:
        """Return whether both are spellings of one place, ignoring the revision.

        Folders are one if they are the same on disk, and every name of this machine is one host. A
        token needs more: it belongs to the host and port that it was given for.
        """
        if self.scheme != other.scheme:
            return False
        if self.scheme == "file":
            paths = (self.text, other.text)
            if len({*map(os.path.realpath, paths)}) == 1:
                return True
            # On disk, names that differ in case may be one, and a folder may be mounted twice.
            return all(map(os.path.exists, paths)) and os.path.samefile(*paths)
        if self.scheme == "hf":
            return self.without_revision.casefold() == other.without_revision.casefold()
        return _on_this_machine(self.text) == _on_this_machine(other.text)

    @property
    def is_plain_http(self) -> bool:
        """Whether requests to it travel over a network unencrypted."""
        return self.scheme == "http" and not is_on_this_machine(self.text)


def parse_address(text: str) -> Address:
    """Return the address that `text` denotes; raises ConfigError if it is malformed."""
    scheme, separator, _ = text.partition("://")
    scheme = scheme.lower() if separator else "file"
    if scheme == "file":
        return Address(text=str(_folder(text)), scheme=scheme)
    if scheme in _DEFAULT_PORTS:
        return Address(text=_canonical_url(text), scheme=scheme)
    if scheme == "hf":
        found = _HUB.fullmatch(text)
        if not found:
            raise ConfigError(
                f"registry {text!r}: a dataset repository of the Hugging Face Hub must be written "
                "hf://OWNER/REPOSITORY or hf://OWNER/REPOSITORY@REVISION"
            )
        revision = f"@{found['revision']}" if found["revision"] else ""
        return Address(text=f"hf://{found['repo']}{revision}", scheme=scheme)
    return Address(text=text, scheme=scheme)


def origin_of(url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port of `url`, to which credentials are bound."""
    parts = urlsplit(url)
    port = parts.port if parts.port is not None else _DEFAULT_PORTS.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def _on_this_machine(address: str) -> str:
    """Return an address with one name for every name of this machine."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme not in _DEFAULT_PORTS or not is_loopback(host):
        return address
    return parts._replace(netloc=f"localhost:{origin_of(address)[2]}").geturl()


def _folder(text: str) -> Path:
    path = text[len("file://") :] if text.lower().startswith("file://") else text
    if "\0" in path:
        raise ConfigError(f"registry {text!r} is not a folder; give {FORMS}")
    try:
        found = Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~somebody who is not a user here
        raise ConfigError(f"registry {text!r} is not a folder: {error}; give {FORMS}") from None
    plain = os.path.normpath(found)
    # After a link, .. leads to the parent of its target.
    return Path(plain) if os.path.realpath(plain) == os.path.realpath(found) else found


def _canonical_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        scheme, host, port = origin_of(text)
    except ValueError as error:
        raise ConfigError(f"registry {_hidden(text)!r} is not an address: {error}") from None
    if "@" in parts.netloc:
        raise ConfigError(
            f"registry {_hidden(text)!r} holds a password; leave it out, and give the token with "
            "telescope hub login or in TELESCOPE_HUB_TOKEN"
        )
    if not host or parts.query or parts.fragment:
        raise ConfigError(
            f"registry {text!r} must be written {scheme}://HOST/PATH, without ? and #"
        )
    name = _canonical_host(host, text)
    shown = "" if port == _DEFAULT_PORTS[scheme] else f":{port}"
    return SplitResult(scheme, f"{name}{shown}", _canonical_path(parts.path), "", "").geturl()


def _canonical_host(host: str, text: str) -> str:
    """Return the canonical spelling of a host; raises ConfigError for an ambiguous one."""
    try:
        address = ip_address(host)
    except ValueError:
        name = host.removesuffix(".")
        # Some programs read 127.1 and 0x7f.1 as 127.0.0.1.
        if _HOST.fullmatch(name) and not _NUMBER.fullmatch(name.rpartition(".")[2]):
            return name
        raise ConfigError(
            f"registry {text!r}: {host!r} is not the name or the address of a host; write a name "
            "in ASCII (xn--...), or all four numbers of an address"
        ) from None
    address = getattr(address, "ipv4_mapped", None) or address
    return f"[{address.compressed}]" if address.version == 6 else address.compressed


def _canonical_path(path: str) -> str:
    """Return the canonical spelling of a path: without dots, empty parts and needless escapes."""
    kept: list[str] = []
    for part in path.split("/"):
        plain = quote(unquote_to_bytes(part), safe=_PLAIN_IN_PATHS)
        if plain == "..":
            kept = kept[:-1]
        elif plain not in ("", "."):
            kept.append(plain)
    return "".join(f"/{part}" for part in kept)


def _hidden(text: str) -> str:
    """Return `text` with the part before an @ masked, because it may be a password."""
    return re.sub(r"//.*@", "//***@", text)


VARIABLE = "TELESCOPE_REGISTRY"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,38}")
_MEANS_SOMETHING_ELSE = {"file", "http", "https", "hf", "sha256"}


class AttestationMode(StrEnum):
    """Whether installing requires Sigstore attestations."""

    OFF = "off"
    """Attestations are not checked."""
    WHEN_PRESENT = "when-present"
    """A release that was published with an attestation must have it, and it must be valid."""
    REQUIRED = "required"
    """A release without a valid attestation is not installed."""


class NamedRegistry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `[registries]`."""

    address: str
    insecure: bool = False
    """Whether plain http is allowed although the registry is not on this machine."""
    attestations: AttestationMode | None = None
    """Mode for this registry; None for the file's setting for all registries."""
    trusted_root: str = ""
    """Path to the trusted_root.json of its Sigstore; empty for the file's setting for all."""

    @property
    def place(self) -> Address:
        """Its address, parsed."""
        return parse_address(self.address)


class TrustedSigner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `[signers]`: an identity that may sign an owner's releases, set by the user."""

    repository: str
    """`owner/name` on GitHub, or its https address."""
    workflow: str = ""
    """File name such as publish.yml; empty if any workflow of the repository may sign."""
    issuer: str = ""
    """OIDC issuer; empty for that of github.com or gitlab.com."""
    trusted_root: str = ""
    """Path to the trusted_root.json of its Sigstore; empty for the file's setting for all."""


class UserConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The file's settings about registries; its other tables are not read here."""

    registry: str = ""
    """Name or address of the default registry; empty if none was chosen."""
    registries: dict[str, NamedRegistry] = {}
    attestations: AttestationMode = AttestationMode.OFF
    """Mode for every registry without its own setting."""
    trusted_root: str = ""
    """Path to the trusted_root.json of another Sigstore; empty for the public one."""
    signers: dict[str, TrustedSigner] = {}
    """Owner -> who may sign. Asked where no registry can be: for bundles, and for what they left in
    the cache."""

    def named(self, name: str) -> NamedRegistry:
        """Return the registry that this file calls `name`; raises UnknownNameError if none is."""
        if name not in self.registries:
            hint = f"(add it to [registries] in {user_file()}, or give {FORMS})"
            raise unknown_name("registry", name, self.registries, hint)
        return self.registries[name]

    def place_of(self, text: str) -> Address:
        """Return the address that `text` means: that of a named registry, else `text` itself."""
        place = self._meaning_of(text)
        is_path = place.scheme == "file" and "://" not in text and text not in self.registries
        if is_path and not os.path.isdir(place.text):
            if _NAME.fullmatch(text):
                return self.named(text).place
            raise ConfigError(f"registry {text!r} is not a folder; give {FORMS}")
        return place

    def is_default(self, place: Address, environ: Mapping[str, str]) -> bool:
        """Return whether `place`, ignoring the revision, is the default registry of the user."""
        chosen = environ.get(VARIABLE) or self.registry
        return bool(chosen) and (
            self._meaning_of(chosen).without_revision == place.without_revision
        )

    def default(self, environ: Mapping[str, str]) -> Address | None:
        """Return the default registry that the user chose for bare names; None if none was."""
        chosen = environ.get(VARIABLE) or self.registry
        return self.place_of(chosen) if chosen else None

    def names_of(self, place: Address) -> list[str]:
        """Return the names that this file gives to `place`, ignoring its revision."""
        return [name for name, line in self.registries.items() if line.place.is_place_of(place)]

    def attestations_of(self, place: Address) -> tuple[AttestationMode, Path | None]:
        """Return the attestation mode for `place` and its root of trust, None for the public one.

        If several names have this address, the strictest of their modes applies.
        """
        lines = [self.registries[name] for name in self.names_of(place)]
        roots = [line.trusted_root for line in lines if line.trusted_root]
        return _strictest(lines) or self.attestations, self.root(*roots)

    @property
    def strictest(self) -> AttestationMode:
        """The strictest attestation mode in the file: what counts where no registry is asked.

        A registry that a bundle names must not choose a weaker setting.
        """
        return _strictest([self, *self.registries.values()]) or self.attestations

    def root(self, *chosen: str) -> Path | None:
        """Return the first root of trust in `chosen`, else the file's; None for the public one."""
        text = next(filter(None, chosen), self.trusted_root)
        return Path(text).expanduser() if text else None

    def allows_plain_http(self, place: Address) -> bool:
        """Return whether the user allowed plain http for `place`."""
        return any(self.registries[name].insecure for name in self.names_of(place))

    def _meaning_of(self, text: str) -> Address:
        """Return the same as `place_of`, without checking that a folder is there."""
        return self.registries[text].place if text in self.registries else parse_address(text)


def _strictest(lines: Sequence[NamedRegistry | UserConfig]) -> AttestationMode | None:
    modes = [line.attestations for line in lines if line.attestations is not None]
    return max(modes, key=list(AttestationMode).index, default=None)


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's configuration file, which may not exist."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")) / ".config")
    return Path(base).expanduser() / "telescope" / "config.toml"


def read_user_config(environ: Mapping[str, str] = os.environ) -> UserConfig:
    """Return the user's settings; raises ConfigError that names the file and the wrong setting."""
    path = user_file(environ)
    if not path.is_file():
        return UserConfig()
    table = read_toml_file(path)
    for key in table:
        known = UserConfig.__struct_fields__
        close = nearest(key, known)
        if close and key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}; did you mean {close[0]!r}?")
    try:
        return parse_user_config(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; a registry is {FORMS}") from None


def parse_user_config(table: Mapping[str, object]) -> UserConfig:
    """Return the settings in the tables of the file; raises ConfigError that names a wrong one."""
    named = _named_lines(table, "registries")
    registries = {name: _named_registry(name, line) for name, line in named.items()}
    signers = {
        owner: {"repository": line} if isinstance(line, str) else line
        for owner, line in _named_lines(table, "signers").items()
    }
    return _converted({**table, "registries": registries, "signers": signers}, UserConfig)


def _named_lines(table: Mapping[str, object], name: str) -> dict[str, object]:
    lines = table.get(name, {})
    if not isinstance(lines, dict):
        raise ConfigError(f"{name}: expected a table of names, got {lines!r}")
    return cast(dict[str, object], lines)


def _named_registry(name: str, line: object) -> NamedRegistry:
    if not _NAME.fullmatch(name) or name in _MEANS_SOMETHING_ELSE:
        raise ConfigError(
            f"registries: a registry cannot be named {name!r}; use lower-case letters, digits and "
            f"hyphens, and none of {', '.join(sorted(_MEANS_SOMETHING_ELSE))}"
        )
    found = {"address": line} if isinstance(line, str) else line
    try:
        registry = _converted(found, NamedRegistry)
        parse_address(registry.address)
    except ConfigError as error:
        raise ConfigError(f"registries.{name}: {error}") from None
    return registry


_Record = TypeVar("_Record")


def _converted(table: object, record: type[_Record]) -> _Record:
    try:
        return convert(table, record)
    except msgspec.ValidationError as error:
        message, _, place = str(error).replace("`", "").partition(" - at $.")
        raise ConfigError(f"{place}: {message}" if place else message) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Options for opening a registry."""

    offline: bool = False
    """Whether to read only files that were fetched before."""
    tell: Callable[[str], None] = lambda message: None
    """Called with messages for the user, such as the age of files that are read offline."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    working_directory: Path | None = None
    """None means the current working directory."""


def find_address(text: str | None, opening: Opening) -> Address:
    """Return the address of the registry that `text` names; None means the default registry."""
    config = read_user_config(opening.environ)
    if text:
        return config.place_of(text)
    chosen = config.default(opening.environ)
    if chosen is not None:
        return chosen
    for start in (opening.working_directory or Path.cwd(), Path(__file__).resolve()):
        for folder in (start, *start.parents):
            if (folder / "registry" / "index").is_dir():
                return parse_address(str(folder / "registry"))
    return parse_address(str(Path(__file__).resolve().parent.parent / "snapshot"))
