"""`FirstPrompts`: renders and tokenizes what rollouts begin with, before they are played.

Which tools an environment offers is known when a rollout of it has asked for the first time: no
environment declares them before, and some get them from servers that are connected in play.
"""

from collections import OrderedDict
from collections.abc import Sequence

from telescope_core.base.types import JsonValue, Message
from telescope_train.chat.renderer import Renderer

MOST_REMEMBERED = 4096
"""Prompts that were made ready and have not been asked yet."""
Tools = Sequence[dict[str, JsonValue]]


class FirstPrompts:
    """Makes prompts ready with the tools that their environment offered last."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tools: dict[str, Tools] = {}
        self._environments: OrderedDict[tuple[Message, ...], str] = OrderedDict()

    def prepare(self, environment: str, messages: Sequence[Message]) -> None:
        """Make ready what a rollout of `environment` most likely begins with."""
        key = tuple(messages)
        self._environments[key] = environment
        if len(self._environments) > MOST_REMEMBERED:
            self._environments.popitem(last=False)
        self._renderer.prompt(key, tools=self._tools.get(environment, ()))

    def is_asked(self, messages: tuple[Message, ...], tools: Tools) -> None:
        """Hear with which tools a rollout begins; further ones are made ready with the same."""
        environment = self._environments.pop(messages, None)
        if environment is not None:
            self._tools[environment] = tools
