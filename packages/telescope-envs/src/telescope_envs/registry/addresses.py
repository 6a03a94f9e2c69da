"""Addresses of registries as text: folders, `file://`, `https://`, `http://` and `hf://`.

Parsing is pure and opens nothing. Two texts that mean the same place become the same `Address`.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from telescope_core.errors import ConfigError

FORMS = "a folder, file://FOLDER, https://HOST/PATH or hf://OWNER/REPOSITORY[@REVISION]"
_HUB = re.compile(
    r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]*[\w-]))?/*", re.ASCII
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a registry in canonical form, which is what is compared and stored."""

    text: str
    """The address in the form that `--registry` accepts, without credentials."""
    scheme: str
    """The scheme in lower case; `file` for folders."""

    @property
    def without_revision(self) -> str:
        """The address without its revision; tokens belong to this form."""
        return self.text.partition("@")[0] if self.scheme == "hf" else self.text

    @property
    def is_plain_http(self) -> bool:
        """Whether requests to it travel over a network unencrypted."""
        return self.scheme == "http" and not is_loopback(urlsplit(self.text).hostname or "")


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


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, so that nothing travels over a network."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _folder(text: str) -> Path:
    path = text[len("file://") :] if text.lower().startswith("file://") else text
    if "\0" in path:
        raise ConfigError(f"registry {text!r} is not a folder; give {FORMS}")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~somebody who is not a user here
        raise ConfigError(f"registry {text!r} is not a folder: {error}; give {FORMS}") from None


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
    name = f"[{host}]" if ":" in host else host
    shown = "" if port == _DEFAULT_PORTS[scheme] else f":{port}"
    return SplitResult(scheme, f"{name}{shown}", parts.path.rstrip("/"), "", "").geturl()


def _hidden(text: str) -> str:
    """Return `text` with the part before an @ masked, because it may be a password."""
    return re.sub(r"//.*@", "//***@", text)
