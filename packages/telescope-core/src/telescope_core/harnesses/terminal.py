"""The harness `terminal`: the model types into one shell and sees its screen.

It works with models without tool calls: the keys to type are JSON in the text of the answer.
"""

from telescope_core.base.errors import ConfigError
from telescope_core.harnesses.command import OwnProgram

_INSTRUCTIONS = r"""You work on a computer by typing into one terminal, in which bash runs.
You are shown what it prints. Answer with one JSON object, and nothing behind it:
{"thoughts": "what you see and want", "commands": [{"keys": "ls -la\n", "wait_s": 5}]}
The keys are typed as they are, one command after the other. End a command line with \n; \u0003 is
Ctrl-C and \u0004 is Ctrl-D. The next keys are typed when the shell waits for a command again, or
after wait_s seconds. A program that still runs then goes on: type into it, or an empty "keys" to
wait longer. When the task is done, answer with {"done": true, "answer": "..."}."""


class TerminalAgent(OwnProgram):
    """An agent that types into one shell, which keeps its state from turn to turn."""

    source = "terminal_program.py"
    name = "terminal"
    offers_tools = False

    def __init__(
        self,
        *,
        instructions: str = _INSTRUCTIONS,
        wait_s: float = 10.0,
        max_wait_s: float = 120.0,
    ) -> None:
        """`wait_s`: wait after keys that name no time of their own; `max_wait_s`: longest wait."""
        if not 0 < wait_s <= max_wait_s:
            raise ConfigError(
                "harness 'terminal' needs wait_s above 0 and at most max_wait_s, got "
                f"wait_s = {wait_s!r} and max_wait_s = {max_wait_s!r}"
            )
        super().__init__(
            {
                "instructions": instructions,
                "wait_s": wait_s,
                "max_wait_s": max_wait_s,
            }
        )
