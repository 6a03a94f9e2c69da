"""The handshake of a connection: token, protocol version, environment and its version."""

import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from telescope_core.base import errors
from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import CodeRaisedError, ContradictionError, TelescopeError
from telescope_core.base.protocols import PROTOCOL_MAX, PROTOCOL_MIN
from telescope_core.base.secret_names import require_own_secrets, shown_name
from telescope_core.base.terminal import foreign
from telescope_core.base.types import EnvironmentDescription
from telescope_core.environments.base import Environment
from telescope_core.processes.frames import (
    Hello,
    ProtocolError,
    Welcome,
)

_MOST_VERSION_CHARACTERS = 100
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
    """Return why a worker must refuse the host `called`; empty if it accepts."""
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
    """Return the answer to an accepted host."""
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


class Agreement:
    """Facts about an environment that the host knows before workers greet, and secrets for them.

    A worker runs the code that would profit from a secret, so its declarations can remove names
    from those that the user was shown, but not add any. All workers must match the first one's
    greeting.
    """

    def __init__(self, identity: Identity, secrets: Sequence[str] | None) -> None:
        """`secrets`: the names in the environment's record; None = there is none.

        Raises EnvironmentLoadError for names that no environment may read.
        """
        self.identity = identity
        self._is_recorded = secrets is not None
        self._first: Welcome | None = None
        self.secrets = None if secrets is None else tuple(sorted(set(secrets)))
        """Names of all variables that its workers may read; None until the first greeting."""
        self.tell: Callable[[tuple[str, ...]], object] = lambda names: None
        """Called with the names, if there are any, before a worker gets their values."""
        self._was_told = False
        require_own_secrets(self.secrets or (), identity.name)

    def settle(self, secrets: Sequence[str]) -> None:
        """Hold all workers to the names that the user was shown before this pool was opened."""
        self.secrets = tuple(sorted(set(secrets)))
        self._was_told = True

    def begin(self) -> None:
        """Show the names that are known, before any code of the environment runs."""
        if self.secrets and not self._was_told:
            self._was_told = True
            self.tell(self.secrets)

    def accept(self, greeting: Welcome, *, gets_secrets: bool) -> tuple[str, ...]:
        """Return the names of the variables that a worker gets from here.

        Raises ContradictionError if its greeting says more than was agreed on, or other things.
        """
        self._require_same(greeting.environment_version, greeting.has_group_rewards)
        if gets_secrets and self.secrets is None:
            require_own_secrets(greeting.secrets, self.identity.name)
            self.secrets = tuple(sorted(set(greeting.secrets)))
            self.begin()
        self._require_agreed(greeting.secrets)
        if self._first is None:
            self._first = greeting
        return tuple(sorted(set(greeting.secrets))) if gets_secrets else ()

    def require_described(self, described: EnvironmentDescription) -> None:
        """Raise ContradictionError if a description contradicts the greeting."""
        self._require_agreed(described.secrets)
        self._require_same(described.version, described.has_group_rewards)

    def _require_agreed(self, named: Iterable[str]) -> None:
        if self.secrets is None:  # workers elsewhere read what they were started with
            return
        agreed = set(self.secrets)
        if self._first is not None:
            agreed &= set(self._first.secrets)
        more = sorted(set(named) - agreed)
        if not more:
            return
        what = f"{self.identity.name} {self.identity.version}".rstrip()
        why = "its first process did not; read its code before you run it again"
        if self._is_recorded:
            why = (
                "it was published without them; do not run it, and tell the maintainers of its "
                "registry"
            )
        names = ", ".join(map(shown_name, more))
        raise ContradictionError(f"a process of {what} asks for the secrets {names}, but {why}")

    def _require_same(self, said: str, has_group_rewards: bool) -> None:
        name, first, version = self.identity.name, self._first, self.identity.version
        if not version and first is not None:
            version = first.environment_version
        if version and said != version:
            raise ContradictionError(
                f"a process of {name} says that it is version "
                f"{foreign(said, _MOST_VERSION_CHARACTERS)}, expected {version}; install it anew"
            )
        if first is not None and has_group_rewards != first.has_group_rewards:
            raise ContradictionError(
                f"the processes of {name} differ in whether it has group rewards; declare those in "
                "its class, the same for each process"
            )


def error_from(kind: str, message: str, *, otherwise: type[TelescopeError]) -> Exception:
    """Rebuild an exception of the other side; an unknown class becomes `otherwise`, named."""
    known = _OWN_ERRORS.get(kind) or _BUILTIN_ERRORS.get(kind)
    if kind == ProtocolError.__name__:
        known = ProtocolError
    return known(message) if known is not None else otherwise(f"{kind}: {message}")


def load_error(kind: str, message: str) -> Exception:
    """Rebuild an exception of the worker; an unknown class becomes a CodeRaisedError."""
    return error_from(kind, message, otherwise=CodeRaisedError)
