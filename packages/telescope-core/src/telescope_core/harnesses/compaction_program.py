"""The program of the harness `shell-agent`, run inside the sandbox: a shell, and a bounded context.

It needs only the standard library. Its messages are those of the chat API, as dictionaries.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

ChatMessage: TypeAlias = dict[str, Any]

LEFT_OUT = "[This result was left out to save space. Call the tool again if you need it.]"
"""Replaces a result that was dropped."""
SUMMARIZE = (
    "Your context is nearly full. Write a summary for yourself: it replaces everything after the "
    "task. Say what was found, what was changed, and what is to be done next. Call no tool."
)
"""Message that asks the model for a summary."""
SUMMARY = "Your own summary of the work so far:"
"""Heading of a summary, which follows the task."""
SUB_AGENT = (
    "You are a sub-agent: another agent gave you a part of its task. You work on the same "
    "computer through the tool `shell`. When the part is done, answer without a call of a tool. "
    "Only your last answer is passed on."
)
"""The system message of sub-agents."""
_MAX_RESULT = 10_000
"""Most characters of a command's output that are shown to the model; its end is kept."""


def turns_of(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the index of the model's message that begins each turn."""
    return [place for place, one in enumerate(messages) if one["role"] == "assistant"]


def with_results_dropped(messages: Sequence[ChatMessage], keep_turns: int) -> list[ChatMessage]:
    """Return `messages` without the results of tools, except those of the last `keep_turns`."""
    starts = turns_of(messages)
    first_kept = starts[-min(keep_turns, len(starts))]
    return [
        {**one, "content": LEFT_OUT} if one["role"] == "tool" and place < first_kept else one
        for place, one in enumerate(messages)
    ]


def last_turns(messages: Sequence[ChatMessage], keep_turns: int) -> list[ChatMessage]:
    """Return the messages before the first turn, and the last `keep_turns` with their results."""
    starts = turns_of(messages)
    return [*messages[: starts[0]], *messages[starts[-min(keep_turns, len(starts))] :]]


def with_summary(messages: Sequence[ChatMessage], summary: str) -> list[ChatMessage]:
    """Return the messages before the first turn, with `summary` after the task.

    It is part of the task's message, because some chat templates refuse two in a row of one role. A
    summary that is there already is replaced.
    """
    *before, task = messages[: turns_of(messages)[0]]
    text = task["content"].partition(f"\n\n{SUMMARY}\n")[0]
    return [*before, {**task, "content": f"{text}\n\n{SUMMARY}\n{summary}"}]


def compacted(
    messages: Sequence[ChatMessage],
    strategy: str,
    *,
    keep_turns: int,
    summarize: Callable[[list[ChatMessage]], str],
) -> list[ChatMessage]:
    """Return a shorter history by `strategy`, a name of the option `context_strategy`.

    `messages` have at least one turn. The last `keep_turns`, at least 1, are kept unchanged, except
    with `summarize`, which calls the model with `messages` and the request for a summary. If the
    model returns nothing, the last turns are kept instead.
    """
    if strategy == "drop_tool_results":
        return with_results_dropped(messages, keep_turns)
    if strategy == "summarize":
        summary = summarize([*messages, {"role": "user", "content": SUMMARIZE}])
        if summary:
            return with_summary(messages, summary)
    return last_turns(messages, keep_turns) if strategy != "none" else list(messages)


def function(name: str, about: str, parameter: str, means: str) -> dict[str, Any]:
    """Return a tool with one text parameter, in the form of the chat API."""
    properties = {parameter: {"type": "string", "description": means}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    inner = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": inner}


SHELL = function("shell", "Run a command with bash and return what it prints.", "command", "Code.")
DELEGATE = function(
    "delegate",
    "Give a part of the task to a sub-agent with a context of its own; returns its answer.",
    "task",
    "All that it has to know: it does not see this conversation.",
)


class Agents:
    """The agent of one task and its sub-agents, which share the number of requests."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """`asked`: the settings that `ShellAgent.program` writes."""
        self._asked = asked
        self._num_left: int = asked["max_turns"]

    def answer(self, system: str, task: str, tools: Sequence[dict[str, Any]]) -> str | None:
        """Work on `task` until a turn has no call; returns None when no requests are left."""
        messages: list[ChatMessage] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task},
        ]
        while self._num_left:
            said, num_tokens = self._request(messages, tools)
            messages.append(said)
            if not said.get("tool_calls"):
                return said.get("content") or ""
            messages += [self._result(call, tools) for call in said["tool_calls"]]
            if num_tokens > self._asked["max_context_tokens"] and self._num_left:
                messages = compacted(
                    messages,
                    self._asked["context_strategy"],
                    keep_turns=self._asked["keep_turns"],
                    # With the same tools, so that the request continues the conversation.
                    summarize=lambda all_of_it: (
                        self._request(all_of_it, tools)[0].get("content") or ""
                    ).strip(),
                )
        return None

    def _request(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[ChatMessage, int]:
        """Return the model's message, and the number of tokens of request and answer together."""
        self._num_left -= 1
        asked = {"model": self._asked["model"], "messages": messages, "tools": tools}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(asked).encode(),
            {
                "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            sys.exit(f"the endpoint refused a request: {error} {error.read().decode()}")
        # As it came, thinking included: what the model reads next is what it wrote.
        return found["choices"][0]["message"], found["usage"]["total_tokens"]

    def _result(self, call: dict[str, Any], tools: Sequence[dict[str, Any]]) -> ChatMessage:
        """Run one tool call; a call that cannot be read gets an explanation of the right form."""
        name, arguments, text = call["function"]["name"], call["function"]["arguments"], ""
        known = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
        try:
            [parameter] = known[name]["required"]
            text = json.loads(arguments)[parameter]
            if not isinstance(text, str):
                raise TypeError(text)
        except (KeyError, TypeError, ValueError):
            forms = [
                f'{tool} with the arguments {{"{known[tool]["required"][0]}": "..."}}'
                for tool in known
            ]
            written = f"expected {' or '.join(forms)}, got {name} with the arguments {arguments}"
        else:
            written = self._run(text) if name == "shell" else self._delegated(text)
        return {"role": "tool", "tool_call_id": call["id"], "content": written}

    def _run(self, command: str) -> str:
        limit_s = self._asked["tool_timeout_s"]
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"[stopped after {limit_s:g} s]"
        ended = f"\n[exit code {done.returncode}]" if done.returncode else ""
        return f"{done.stdout[-_MAX_RESULT:]}{ended}".strip() or "[no output]"

    def _delegated(self, task: str) -> str:
        answer = self.answer(SUB_AGENT, task, [SHELL])
        return "[no requests are left]" if answer is None else answer


def main(path: str) -> None:
    """Carry out the task in the file at `path`, and write the answer to the file named there."""
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    tools = [SHELL, DELEGATE] if asked["sub_agents"] else [SHELL]
    answer = Agents(asked).answer(asked["instructions"], asked["task"], tools)
    if answer is None:
        sys.exit(asked["max_turns_exit_code"])
    Path(asked["answer_file"]).write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
