"""The seams of core, one small Protocol each: everything that varies is met through one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from telescope_core.types import (
    ChatEndpoint,
    Completion,
    EnvironmentDescription,
    Example,
    Group,
    JsonValue,
    Message,
    Rollout,
    Sampling,
    Split,
)


class Policy(Protocol):
    """What an environment talks to: a model behind chat messages.

    One policy object serves one rollout, so that it can keep the tokens of earlier turns.
    Cancelling the awaiting task cancels the request and frees the server's slot.
    """

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Answer `messages`. Raises EndpointError when the endpoint fails."""
        ...

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """The same model behind an OpenAI-compatible endpoint; None when there is none.

        In training it belongs to this rollout alone, and what is asked there is trained on.
        """
        ...


class PolicySource(Protocol):
    """Gives a fresh policy to each rollout."""

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of one rollout.

        `sampling` is how the rollout is sampled: what requests at its `endpoint` leave out.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class ExampleSource(Protocol):
    """The examples of one split; lazy, finite or endless, the same in every process."""

    @property
    def num_examples(self) -> int | None:
        """Size of the split; None = endless."""
        ...

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end of a finite split."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """Ask an environment for one rollout."""

    split: Split
    example_index: int
    group_id: str
    index: int
    sampling: Sampling
    deadline_s: float
    """Seconds the rollout may take, rewards included."""

    @property
    def rollout_id(self) -> str:
        """Unique within a run."""
        return f"{self.group_id}/{self.index}"

    def rollout(self, environment: str) -> Rollout:
        """Return the answer of the environment of that name before anything has happened."""
        return Rollout(
            environment=environment, example_id="", group_id=self.group_id, index=self.index
        )


class EnvironmentClient(Protocol):
    """The seam to an environment process: in this process, another one, a container or a host.

    Requests: describe, fetch an example, play a rollout, score a group, cancel, health, close.
    The policy stays with the caller: an environment that runs elsewhere asks for completions.
    """

    @property
    def name(self) -> str:
        """The id it was opened with."""
        ...

    async def describe(self) -> EnvironmentDescription:
        """Return what the environment declares."""
        ...

    async def example(self, split: Split, index: int) -> Example:
        """Return one example."""
        ...

    async def gold(self, split: Split, index: int) -> Rollout | None:
        """Return the scored rollout of the gold answer; None when the environment has none."""
        ...

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play and score one rollout. Failures are data: a rollout with status failed."""
        ...

    async def score_group(self, split: Split, example_index: int, group: Group) -> Group:
        """Apply the group rewards; returns the group unchanged when there are none."""
        ...

    async def cancel(self, rollout_id: str) -> None:
        """Stop a rollout; unknown ids are ignored. Its `play` returns a cancelled rollout."""
        ...

    async def health(self) -> None:
        """Return when the environment can play; raises ProcessDiedError when it cannot."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return how its processes are, by name; empty when it has none of its own."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class EnvironmentPlace(StrEnum):
    """Where an environment's code comes from."""

    IMPORTABLE = "importable"
    """`module:Class`, found as it is."""
    LINKED = "linked"
    """The folder of its project, for development."""
    SHARED = "shared"
    """Installed in this interpreter."""
    ISOLATED = "isolated"
    """Installed in a virtual environment of its own."""
    ELSEWHERE = "elsewhere"
    """Played by workers that somebody else started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLocation:
    """Where an environment's code is, and which code it is."""

    id: str
    """owner/name"""
    version: str
    factory: str
    """`module:Class`, importable by `interpreter`."""
    interpreter: str
    """Path of the Python that can import it; empty = this one, without having to be installed."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    place: EnvironmentPlace = EnvironmentPlace.IMPORTABLE
    search_path: tuple[str, ...] = ()
    """Folders to import it from, before all others."""
    registry: str = ""
    """Where it was installed from."""
    wheel_sha256: str = ""
    lock_digest: str = ""
    """Of all that it runs on, as telescope.lock has it; of its files for a linked one; empty = not
    known."""
    dependencies: tuple[str, ...] = ()
    """`name==version` of what is installed with it."""


class EnvironmentLocator(Protocol):
    """Turns a name into an installed environment; entry point `telescope.environment_locators`."""

    def locate(self, name: str) -> EnvironmentLocation | None:
        """Return where `name` is installed; None when this locator does not know it.

        Raises ConfigError or EnvironmentLoadError when it knows that name and must not use what is
        there: names of several owners, other code than what is locked.
        """
        ...

    def known_names(self) -> list[str]:
        """Return every name it could locate, for messages."""
        ...

    def hint(self, name: str) -> str:
        """Return what to do about a missing `name`, such as an install command; may be empty."""
        ...


class Tracker(Protocol):
    """Mirrors metrics somewhere. A failing tracker never stops a run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Flush. Idempotent."""
        ...
