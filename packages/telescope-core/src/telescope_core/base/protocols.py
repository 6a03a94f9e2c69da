"""The Protocols of core: each part that has several implementations is used through one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    EnvironmentDescription,
    Example,
    Group,
    Message,
    Rollout,
    Sampling,
    Split,
    Tools,
)

PROTOCOL_MIN = 1
"""Oldest version of the environment protocol that this telescope-core supports."""
PROTOCOL_MAX = 1
"""Newest one."""
LATE_SCORE_S = 30.0
"""Seconds for scoring a rollout that was still being played at its deadline."""

LEFT_OUT = "left_out:"
"""Prefix of the tag that says why a reward or metric is not known after a rollout was graded again;
the name of the reward or metric follows."""
RAISED = "raised:"
"""Prefix of the tag that holds the error of a reward or metric, likewise."""
METRIC = "metric "
"""Prefix of a metric's name in these tags."""


class Policy(Protocol):
    """The model that an environment talks to, in chat messages.

    One policy object serves one rollout, so that it can keep the tokens of earlier turns.
    Cancelling the task that awaits `complete` cancels the request and frees the server's slot.
    """

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        """Return the model's answer to `messages`; raises EndpointError when the endpoint fails.

        `tools` are the tools the model may call, in OpenAI form.
        """
        ...

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """An OpenAI-compatible endpoint of the same model; None when there is none.

        In training the endpoint belongs to this rollout alone, and the completions requested
        there are trained on.
        """
        ...


class PolicySource(Protocol):
    """Creates a policy for each rollout."""

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return a new policy for one rollout.

        `sampling` fills in the sampling settings that requests to the policy's `endpoint` leave
        out.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class ExampleSource(Protocol):
    """The examples of one split: read lazily, finite or endless, and the same in every process."""

    @property
    def num_examples(self) -> int | None:
        """Number of examples in the split; None = endless."""
        ...

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end of a finite split."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """A request for one rollout from an environment."""

    split: Split
    example_index: int
    """Index of the example in its split."""
    group_id: str
    index: int
    """Position of the rollout in its group, 0 .. G-1."""
    sampling: Sampling
    deadline_s: float
    """Seconds that the rollout may take, including its rewards."""
    scores_at_deadline: bool = False
    """Whether a rollout that is still being played at its deadline is scored as it stands, within
    `LATE_SCORE_S` more seconds; otherwise it fails."""
    saved: Rollout | None = None
    """A rollout that was played before: it is graded again, and no policy is asked. See
    `telescope_core.playing.rescoring`."""

    @property
    def rollout_id(self) -> str:
        """Id of the rollout, unique within a run."""
        return f"{self.group_id}/{self.index}"

    def rollout(self, environment: str) -> Rollout:
        """Return an empty rollout of the environment with that name, before anything is played."""
        return Rollout(
            environment=environment, example_id="", group_id=self.group_id, index=self.index
        )


class EnvironmentClient(Protocol):
    """An opened environment, which may run in this process, another one, or on another machine.

    Requests: describe, fetch an example, play a rollout, score a group, cancel, health, close.
    The policy stays with the caller. An environment in another process asks the caller for each
    completion.
    """

    @property
    def name(self) -> str:
        """The id that the environment was opened with."""
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
        """Play and score one rollout; a failure is returned as a rollout with status failed."""
        ...

    async def score_group(self, split: Split, example_index: int, group: Group) -> Group:
        """Return `group` with its group rewards applied, or unchanged when there are none."""
        ...

    async def cancel(self, rollout_id: str) -> None:
        """Stop a rollout; its `play` returns a cancelled rollout. Unknown ids are ignored."""
        ...

    async def health(self) -> None:
        """Return once the environment can play; raises ProcessDiedError when it cannot."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return statistics of its processes, by name; empty if it has none of its own."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class EnvironmentPlace(StrEnum):
    """The source of an environment's code."""

    IMPORTABLE = "importable"
    """Given as `module:Class` and imported from the current Python path."""
    LINKED = "linked"
    """Imported from the folder of its project, for development."""
    SHARED = "shared"
    """Installed in this interpreter."""
    ISOLATED = "isolated"
    """Installed in its own virtual environment."""
    ELSEWHERE = "elsewhere"
    """Played by workers that were started separately, such as on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLocation:
    """Location and version of the code of an environment."""

    id: str
    """`owner/name`."""
    version: str
    factory: str
    """`module:Class`, importable by `interpreter`."""
    interpreter: str
    """Path of the Python that can import the environment; empty = the running interpreter, where
    the environment need not be installed."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    place: EnvironmentPlace = EnvironmentPlace.IMPORTABLE
    search_path: tuple[str, ...] = ()
    """Folders to import it from, searched before all others."""
    registry: str = ""
    """The registry that it was installed from."""
    wheel_sha256: str = ""
    lock_digest: str = ""
    """Digest of everything it runs on, as recorded in telescope.lock; for a linked environment, the
    digest of its files; empty = not known."""
    dependencies: tuple[str, ...] = ()
    """`name==version` of each package that is installed with it."""
    datasets: dict[str, str] = field(default_factory=dict[str, str])
    """`repo@commit` -> folder on this machine with exactly the files of that dataset."""
    secrets: tuple[str, ...] | None = None
    """Names of the variables that it may read: those it was published with, or, of an environment
    of another framework, those that `env link --secret` named; None = nothing records them."""


class EnvironmentLocator(Protocol):
    """Finds an installed environment by name; entry point `telescope.environment_locators`."""

    def locate(self, name: str) -> EnvironmentLocation | None:
        """Return where `name` is installed; None when this locator does not know it.

        Raises ConfigError or EnvironmentLoadError if it knows the name but the environment must not
        be used, because several owners have that name or the code differs from the locked code.
        """
        ...

    def known_names(self) -> list[str]:
        """Return every name that this locator can locate, for error messages."""
        ...

    def hint(self, name: str) -> str:
        """Return advice about a missing `name`, such as an install command; may be empty."""
        ...


class Tracker(Protocol):
    """Copies the metrics of a run to another service. A failing tracker never stops a run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush the recorded metrics. Idempotent."""
        ...
