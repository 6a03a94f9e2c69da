"""The `Harness` protocol: how to start a known agent program, and where it leaves its answer.

A harness runs nothing itself. `AgentEnvironment` runs what it describes in a sandbox.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

AGENT_FOLDER = "/tmp/agent"
"""Folder inside the sandbox for the program's own files: its settings, home and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The input of a harness for one rollout."""

    text: str
    """Instructions for the program."""
    base_url: str
    """Address of the rollout's endpoint, as the sandbox reaches it, up to and including `/v1`."""
    api_key: str
    model: str
    """Name of the model in requests."""
    python: str
    """The interpreter that has the harness's packages."""
    max_turns: int
    """Most requests to the model, for programs that can count them."""
    mcp_servers: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict[str, Mapping[str, object]]
    )
    """MCP servers that the program shall use, by name: `command` and `args` of one that it starts,
    or `type` (`http` or `sse`), `url` and `headers` of one that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """A program and its files, to be run for one rollout."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path in the sandbox -> text that is written there before the program starts."""
    answer_file: str = ""
    """File in which the program leaves its answer; empty = its standard output is the answer."""
    max_turns_exit_code: int | None = None
    """Exit code by which the program tells that `max_turns` ended it; None = it does not tell."""


class Harness(Protocol):
    """One agent program; an entry point of the group `telescope.harnesses` names its class.

    The class may also have `excluded`, a tuple of packages that its requirements ask for and the
    program never imports as it is run here: they are not installed. And it may have
    `takes_mcp_servers`, whether its program uses those of the task; without it, it does not.
    """

    @property
    def name(self) -> str:
        """Name under which it is looked up."""
        ...

    @property
    def requirements(self) -> tuple[str, ...]:
        """`name==version` of the packages of the program, the first its own; empty = none."""
        ...

    @property
    def offers_tools(self) -> bool:
        """Whether the program's requests offer tools."""
        ...

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the program to run; raises ConfigError for a task that it cannot take."""
        ...

    def answer(self, written: str) -> str:
        """Return the program's answer from the content of its answer file; empty without one."""
        ...
