"""`FirstPrompts`: render and tokenize the first prompts of rollouts before they are played.

The tools of an environment become known with the first request of one of its rollouts: no
environment declares them before, and some get them from servers that are connected during play.
"""

from collections import OrderedDict
from collections.abc import Sequence

from telescope_core.base.types import JsonValue, Message
from telescope_train.chat.renderer import Renderer

MOST_REMEMBERED = 4096
"""Most prepared prompts that have not been used yet."""
Tools = Sequence[dict[str, JsonValue]]


class FirstPrompts:
    """Prepares prompts with the tools that their environment offered last."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tools: dict[str, Tools] = {}
        self._environments: OrderedDict[tuple[Message, ...], str] = OrderedDict()

    async def prepare(self, environment: str, messages: Sequence[Message]) -> None:
        """Prepare the most likely first prompt of a rollout of `environment`."""
        key = tuple(messages)
        self._environments[key] = environment
        if len(self._environments) > MOST_REMEMBERED:
            self._environments.popitem(last=False)
        tools = self._tools.get(environment, ())
        await self._renderer.prepare(key, tools=tools)
        self._renderer.prompt(key, tools=tools)

    def is_asked(self, messages: tuple[Message, ...], tools: Tools) -> None:
        """Record the tools with which a rollout begins; later prompts are prepared with them."""
        environment = self._environments.pop(messages, None)
        if environment is not None:
            self._tools[environment] = tools
