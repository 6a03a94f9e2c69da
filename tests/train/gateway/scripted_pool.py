"""A server pool that answers with scripted text, in the tokens of the character tokenizer."""

import asyncio
from collections.abc import Callable

from telescope_core.types import Sampling
from telescope_train.chat.renderer import Renderer
from telescope_train.inference.generation import Generation, Request, Span
from telescope_train.models.tiny import character_tokenizer

TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}
{%- if m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content and (keep_thinking or loop.last) -%}
<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A family with tools and thinking, which forgets the thinking of earlier turns unless told."""


def make_renderer(*, keep_thinking: bool = True) -> Renderer:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Renderer(
        tokenizer,
        stop_token_ids=[tokenizer.eos_token_id],
        arguments={"keep_thinking": keep_thinking},
    )


class ScriptedPool:
    """Answers with `reply(prompt text)`; an exception is raised. `hold` delays every answer."""

    is_down = False

    def __init__(self, renderer: Renderer, reply: Callable[[str], str | Exception]) -> None:
        self._renderer = renderer
        self._reply = reply
        self.prompts: list[tuple[int, ...]] = []
        self.sampling: list[Sampling] = []
        self.priorities: list[int] = []
        self.hold: asyncio.Event | None = None
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def generate(self, request: Request) -> Generation:
        stop_token_ids = request.stop_token_ids
        self.prompts.append(tuple(request.prompt_ids))
        self.sampling.append(request.sampling)
        self.priorities.append(request.priority)
        self.arrived.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        reply = self._reply(self._renderer._tokenizer.decode(list(request.prompt_ids)))
        if isinstance(reply, Exception):
            raise reply
        ids = [*self._renderer.encode(reply), *stop_token_ids][: request.sampling.max_tokens]
        return Generation(
            token_ids=tuple(ids),
            logprobs=tuple(-0.001 * (place + 1) for place in range(len(ids))),
            finish_reason="stop" if ids[-1] in stop_token_ids else "length",
            spans=(Span(3, 1), Span(4, len(ids) - 1)) if len(ids) > 1 else (Span(3, 1),),
        )
