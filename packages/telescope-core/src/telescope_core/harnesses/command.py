"""The harness `command`: any program, started by a command line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from telescope_core.base.errors import ConfigError
from telescope_core.harnesses.protocol import AGENT_FOLDER, AgentProgram, AgentTask

_PLACES = ("{task}", "{base_url}", "{api_key}", "{model}", "{max_turns}", "{mcp_config}")
_MCP_CONFIG = f"{AGENT_FOLDER}/mcp.json"
_MAX_TURNS_EXIT_CODE = 20
"""No code of Python, a shell or a signal."""


class CommandHarness:
    """Runs the command with the endpoint in the environment variables that most clients read."""

    name = "command"
    requirements: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        argv: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        answer_file: str = "",
        offers_tools: bool = False,
    ) -> None:
        """`{task}`, `{base_url}`, `{api_key}`, `{model}` and `{max_turns}` in `argv` are filled in.

        `{mcp_config}` is a JSON file whose `mcpServers` are the MCP servers of the task.
        `files` are written before the start. The variables are OPENAI_BASE_URL, OPENAI_API_BASE,
        OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, ANTHROPIC_MODEL and
        TASK, and those of `environment`. Without an `answer_file` the answer is what the program
        prints.
        """
        if isinstance(argv, str) or not argv:
            raise ConfigError(
                "harness 'command' needs argv, the list of the program and its arguments, such as "
                f"['python3', 'agent.py', '{{task}}'], got {argv!r}"
            )
        self._argv = tuple(map(str, argv))
        self._environment = dict(environment or {})
        self._files = dict(files or {})
        self._answer_file = answer_file
        self.offers_tools = offers_tools
        self.takes_mcp_servers = any("{mcp_config}" in word for word in self._argv)

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the command with its placeholders filled in."""
        files = dict(self._files)
        if self.takes_mcp_servers:
            files[_MCP_CONFIG] = json.dumps({"mcpServers": task.mcp_servers})
        return AgentProgram(
            argv=tuple(_filled(word, task) for word in self._argv),
            environment={**endpoint_variables(task), "TASK": task.text, **self._environment},
            files=files,
            answer_file=self._answer_file,
        )

    def answer(self, written: str) -> str:
        """Return the whole output as the answer."""
        return written.strip()


def endpoint_variables(task: AgentTask) -> dict[str, str]:
    """Return the variables from which clients of OpenAI and Anthropic read their endpoint."""
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        # These clients add the /v1 themselves.
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "ANTHROPIC_MODEL": task.model,
    }


class OwnProgram:
    """A harness whose program is the file `source` in this folder; a file passes it the task.

    The program reads task and options as JSON, and writes its answer to a file.
    """

    source: str
    requirements: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = options

    def program(self, task: AgentTask) -> AgentProgram:
        """Return the program and its files."""
        program, asked = f"{AGENT_FOLDER}/{self.source}", f"{AGENT_FOLDER}/task.json"
        answer_file = f"{AGENT_FOLDER}/answer.txt"
        given = {
            **self._options,
            "task": task.text,
            "model": task.model,
            "max_turns": task.max_turns,
            "answer_file": answer_file,
            "max_turns_exit_code": _MAX_TURNS_EXIT_CODE,
        }
        return AgentProgram(
            argv=(task.python, "-I", program, asked),
            environment=endpoint_variables(task),
            files={
                program: Path(__file__).with_name(self.source).read_text(encoding="utf-8"),
                asked: json.dumps(given),
            },
            answer_file=answer_file,
            max_turns_exit_code=_MAX_TURNS_EXIT_CODE,
        )

    def answer(self, written: str) -> str:
        """Return the whole output as the answer."""
        return written.strip()


def _filled(word: str, task: AgentTask) -> str:
    values = (
        *(task.text, task.base_url, task.api_key, task.model, str(task.max_turns)),
        _MCP_CONFIG,
    )
    # One pass over the word, so that a task with a place in its text is not filled in again.
    parts: list[str] = []
    while word:
        found = [(at, place) for place in _PLACES if (at := word.find(place)) >= 0]
        if not found:
            break
        at, place = min(found)
        parts += [word[:at], values[_PLACES.index(place)]]
        word = word[at + len(place) :]
    return "".join([*parts, word])
