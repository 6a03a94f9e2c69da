"""The handshake of a connection: token, protocol version, environment and its version."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from telescope_core import errors
from telescope_core.environments.base import Environment
from telescope_core.errors import EnvironmentLoadError, TelescopeError
from telescope_core.processes.frames import (
    Hello,
    ProtocolError,
    Welcome,
)
from telescope_core.protocol_versions import PROTOCOL_MAX, PROTOCOL_MIN
from telescope_core.secret_names import require_own_secrets

_BUILTIN_ERRORS = {kind.__name__: kind for kind in (IndexError, TimeoutError, MemoryError)}
_OWN_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TelescopeError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The environment that a worker serves or a host asks for."""

    name: str
    version: str


def core_version() -> str:
    """Return the installed version of telescope-core."""
    try:
        return version("telescope-core")
    except PackageNotFoundError:
        return "unknown"


def version_of(factory: str) -> str:
    """Return the version of the distribution that declares `factory`; "0" when none does."""
    for point in entry_points(group="telescope.environments"):
        if point.value == factory and point.dist is not None:
            return point.dist.version
    return "0"


def hello(identity: Identity, token: str) -> Hello:
    """Return a host's first frame."""
    return Hello(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        core_version=core_version(),
        token=token,
        environment=identity.name,
        environment_version=identity.version,
    )


def objection(called: Hello, served: Identity, token: str) -> str:
    """Return why a worker must refuse `called`; empty when it accepts."""
    if not hmac.compare_digest(called.token.encode(), token.encode()):
        return "the token is wrong; use the same token for host and worker"
    if not (
        called.protocol_min <= PROTOCOL_MAX
        and called.protocol_max >= PROTOCOL_MIN
        and called.protocol_min <= called.protocol_max
    ):
        return (
            f"the host supports protocols {called.protocol_min} to {called.protocol_max} "
            f"(telescope-core {called.core_version}), and this worker {PROTOCOL_MIN} to "
            f"{PROTOCOL_MAX} (telescope-core {core_version()}); use the same version of "
            "telescope-core on both sides"
        )
    return _other_environment(called, served)


def _other_environment(called: Hello, served: Identity) -> str:
    if called.environment and called.environment != served.name:
        return f"this worker serves {served.name!r}, but {called.environment!r} was requested"
    if called.environment_version and called.environment_version != served.version:
        return (
            f"this worker serves version {served.version} of {served.name}, but "
            f"{called.environment_version} was requested; install the same version on both sides"
        )
    return ""


def welcome(
    called: Hello, served: Identity, environment_class: type[Environment], pid: int
) -> Welcome:
    """Return the answer to a host that is accepted."""
    return Welcome(
        protocol=min(PROTOCOL_MAX, called.protocol_max),
        core_version=core_version(),
        environment=served.name,
        environment_version=served.version,
        pid=pid,
        secrets=environment_class.secrets,
        has_group_rewards=any(
            function.kind == "group_reward" for function in environment_class.score_functions
        ),
    )


def declared_secrets(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the declared secrets that are set.

    Raises EnvironmentLoadError for names that no environment may read: the worker that sends them
    runs the environment's code, so its own check of them is worth nothing here.
    """
    require_own_secrets(names, "the environment")
    return {name: environ[name] for name in names if name in environ}


def error_from(kind: str, message: str, *, otherwise: type[TelescopeError]) -> Exception:
    """Rebuild the exception of the other side; an unknown class becomes `otherwise`, named."""
    known = _OWN_ERRORS.get(kind) or _BUILTIN_ERRORS.get(kind)
    if kind == ProtocolError.__name__:
        known = ProtocolError
    return known(message) if known is not None else otherwise(f"{kind}: {message}")


def load_error(kind: str, message: str) -> Exception:
    """Rebuild the exception of a worker; an unknown class becomes an EnvironmentLoadError."""
    return error_from(kind, message, otherwise=EnvironmentLoadError)
