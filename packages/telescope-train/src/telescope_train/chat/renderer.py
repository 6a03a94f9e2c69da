"""Convert messages to tokens and back with the model's own tokenizer and chat template.

Sampled ids are only decoded and never encoded again. `extended` appends to them the text that the
template writes after them, or finds that the template shows the turn differently.
"""

import hashlib
from array import array
from base64 import b32encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import Any

import orjson

from telescope_core.base.errors import ConfigError, TemplateLossError
from telescope_core.base.types import Message, ToolCall, Tools
from telescope_core.parsers.tool_calls import CallText
from telescope_train.chat.encoder import Encoder
from telescope_train.chat.formats import same_words
from telescope_train.chat.formats.choose import AUTO
from telescope_train.chat.formats.thinking import NO_REASONING
from telescope_train.chat.proof import Use, refusal, thinking_mark, uses_of
from telescope_train.chat.rendering import Rendering
from telescope_train.chat.special_tokens import decoded, no_end, turn_end
from telescope_train.chat.template import require_thinking_choice, template_text
from telescope_train.chat.tokenizer import load_stop_ids, load_tokenizer
from telescope_train.config.schema import ModelSection

LONG_CHARACTERS = 2**15
"""From here on a first prompt is encoded in a thread: it takes more than some 20 ms."""
MAX_REMEMBERED = 1024
"""Most cached conversations: a group's rollouts share their first prompt."""
_ANYBODY = (Message(role="user", content="hello"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation to be completed, with its text and its token ids."""

    messages: tuple[Message, ...]
    text: str
    """The text as the template writes it now. The ids of sampled turns may spell it differently."""
    ids: "array[int]"
    """[P] int32 ids of the prompt; never changed."""
    num_ends_added: int = 0
    """End-of-turn tokens, over the whole chain, that the template wrote where the model was cut."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[P] the ids as a tuple; takes an object per token."""
        return tuple(self.ids)


class Renderer:
    """Renders conversations exactly as the model's template writes them."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        arguments: Mapping[str, object] | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """`arguments`: variables of the template, such as `enable_thinking`."""
        if not tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template; set chat_template to a Jinja "
                "template, or use an instruction-tuned model"
            )
        if not stop_token_ids:
            raise ConfigError(
                "the model names no end-of-turn token; set eos_token_id in its "
                "generation_config.json, so that a completion can end"
            )
        self.rendering = Rendering(
            tokenizer,
            stop_token_ids=stop_token_ids,
            arguments=arguments,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        self.stop_token_ids = tuple(stop_token_ids)
        self.template = self.rendering.template
        self.format = self.rendering.format
        self._tokenizer = tokenizer
        self._special = self.rendering.special
        self._refusals: dict[Use, str | None] = {}
        # Thinking that the settings leave in the text on purpose is not refused.
        self._may_leave_thinking = reasoning_parser == NO_REASONING.name
        self._encoder = Encoder(tokenizer, stop_token_ids=stop_token_ids)
        # A plain dictionary that drops its oldest entry. Rendering never awaits, so rollouts that
        # run at the same time do not see it half changed.
        self._prompts: dict[tuple[tuple[Message, ...], bytes], Prompt] = {}

    def text(
        self, messages: Sequence[Message], *, tools: Tools = (), add_generation_prompt: bool
    ) -> str:
        """Return the template's text for `messages`; raises ConfigError if it refuses them."""
        return self.rendering.text(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def plain(self, message: Message) -> dict[str, Any]:
        """Return `message` as a dictionary in the form that the template reads."""
        return self.rendering.form.plain(message)

    def encode(self, text: str) -> list[int]:
        """Tokenize rendered text; no special tokens are added, as the template wrote them."""
        return self._encoder.encode(text).tolist()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        # A clean-up would remove spaces before punctuation that the model did write.
        return decoded(self._tokenizer, token_ids, skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message], *, tools: Tools = ()) -> Prompt:
        """Render a conversation from scratch, without reusing sampled ids."""
        key = (tuple(messages), orjson.dumps(tools) if tools else b"")
        prompt = self._prompts.get(key)
        if prompt is None:
            self._require(uses_of(key[0], tools))
            text = self.text(messages, tools=tools, add_generation_prompt=True)
            prompt = Prompt(messages=key[0], text=text, ids=self._encoder.encode(text))
            # Bounded, because a long run renders new conversations without end.
            if len(self._prompts) >= MAX_REMEMBERED:
                self._prompts.pop(next(iter(self._prompts)))
            self._prompts[key] = prompt
        return prompt

    async def prepare(self, messages: Sequence[Message], *, tools: Tools = ()) -> None:
        """Make the work of `prompt` short: a long text is encoded while the event loop goes on."""
        key = (tuple(messages), orjson.dumps(tools) if tools else b"")
        num_characters = sum(len(one.content) for one in messages)
        if num_characters >= LONG_CHARACTERS and key not in self._prompts:
            self._require(uses_of(key[0], tools))
            text = self.text(messages, tools=tools, add_generation_prompt=True)
            await self._encoder.encode_ahead(text)

    def parse(
        self, token_ids: Sequence[int], *, tools: Tools = (), prompt: Prompt | None = None
    ) -> Message:
        """Return a completion as a message, with thinking, text and tool calls separated.

        `token_ids`: [T] ids of the completion. `prompt`: the prompt of the completion. It may have
        opened the thinking, and it makes the ids of calls differ from turn to turn.
        """
        before = self.prompt(_ANYBODY) if prompt is None else prompt
        self._require_readable_thinking(token_ids)
        text = self._special.decode_reply(token_ids)
        return self._message(text, tools, before, sampled=token_ids)

    def extended(
        self,
        prompt: Prompt,
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Tools = (),
    ) -> Prompt | None:
        """Return the prompt for `messages`, which begin with `prompt.messages` and its completion.

        The ids of `prompt` and of the completion are kept. Returns None if the template now shows
        part of them differently, so that the ids cannot be kept.
        """
        self._require(uses_of(messages, tools))
        text = self.text(messages, tools=tools, add_generation_prompt=True)
        # Texts are compared and not ids: encoding the history again could split it into other
        # tokens than the sampled ones although nothing has changed.
        if not text.startswith(prompt.text):
            return None
        turn = text[len(prompt.text) :]
        said = self._special.decode_exactly(completion_ids)
        # A turn that was cut by `max_tokens` has no end token. The template writes one, which then
        # is part of the bridge.
        is_ended = completion_ids[-1] in self.stop_token_ids
        if turn.startswith(said):
            bridge = turn[len(said) :]
        elif is_ended and (end := self._special.first_end(turn)) is not None:
            # The template spells the turn differently, for example the JSON of a call. That is
            # accepted if it still says the same and ends with the same token; the model then sees
            # its own spelling. Other marks of thinking would make it another turn.
            sampled = messages[len(prompt.messages)]
            if end.token_id != completion_ids[-1] or not self._says_the_same(
                prompt, completion_ids, shown=turn[: end.start], sampled=sampled, tools=tools
            ):
                return None
            bridge = turn[end.stop :]
        else:
            return None
        # Only the bridge is encoded, behind the token that it follows: a tokenizer may treat the
        # beginning of a text differently from its middle.
        after = self._special.encode_after(completion_ids[-1] if is_ended else None, bridge)
        return Prompt(
            messages=tuple(messages),
            text=text,
            ids=prompt.ids + array("i", completion_ids) + array("i", after),
            num_ends_added=prompt.num_ends_added + (not is_ended),
        )

    def _says_the_same(
        self,
        prompt: Prompt,
        completion_ids: Sequence[int],
        *,
        shown: str,
        sampled: Message,
        tools: Tools,
    ) -> bool:
        """Return whether `shown`, the turn as the template spells it, equals the sampled one."""
        # A token that the template gives a meaning, and no parser knows, is not in the message, so
        # the template cannot have shown it.
        if any(mark in self.template for mark in self._special.unknown_in(completion_ids)):
            return False
        if not self.format.marks_alike(self._special.decode_exactly(completion_ids), shown):
            return False
        text = self._special.decode_reply(completion_ids)
        written, again = (
            self.rendering.read(one, prompt.text, tools=tools).calls for one in (text, shown)
        )
        return same_words(sampled, self._message(shown, tools, prompt)) and not _ids_differ(
            written, again
        )

    def shown_turn(self, prompt: Prompt, text: str, *, tools: Tools = ()) -> Message | None:
        """Return the answer to `prompt` in `text`, the template's text of further turns.

        Returns None if `text` does not continue the prompt, or if no end of a turn follows.
        """
        end = self._special.first_end(text[len(prompt.text) :])
        if not text.startswith(prompt.text) or end is None:
            return None
        return self._message(text[len(prompt.text) :][: end.start], tools, prompt)

    def no_end(self, *, tools: Tools = ()) -> str | None:
        """Return a remark if the template ends answers with no token; None if it does."""

        def text(told: Sequence[Message], opens: bool) -> str:
            return self.text(told, tools=tools, add_generation_prompt=opens)

        return no_end(turn_end(text, self._special), self._special)

    def _message(
        self, text: str, tools: Tools, prompt: Prompt, *, sampled: Sequence[int] = ()
    ) -> Message:
        reply = self.rendering.read(text, prompt.text, tools=tools)
        return Message(
            role="assistant",
            content=reply.content,
            reasoning=reply.reasoning,
            tool_calls=_with_ids(reply.calls, prompt.messages, sampled),
        )

    def refusal(self, use: Use) -> str | None:
        """Return the reason why the template cannot be used for `use`; None = it can. Cached."""
        if use not in self._refusals:
            self._refusals[use] = refusal(self.rendering, use)
        return self._refusals[use]

    def require(self, use: Use) -> None:
        """Raise TemplateLossError if the template cannot be used for `use`."""
        reason = self.refusal(use)
        if reason is not None:
            raise TemplateLossError(reason)

    def _require(self, uses: Iterable[Use]) -> None:
        for use in uses:
            self.require(use)

    def _require_readable_thinking(self, token_ids: Sequence[int]) -> None:
        """Raise TemplateLossError if the completion has thinking that cannot be read."""
        if self._may_leave_thinking or self.refusal(Use.THINKING) is None:
            return
        mark = self._thinking_mark
        if mark and mark in self._special.decode_exactly(token_ids):
            self.require(Use.THINKING)

    @cached_property
    def _thinking_mark(self) -> str:
        return thinking_mark(self.rendering)


def _with_ids(
    calls: Sequence[CallText], messages: Sequence[Message], sampled: Sequence[int]
) -> tuple[ToolCall, ...]:
    """Return the calls of an answer to `messages` with their sampled or newly made ids.

    New ids are computed from the sampled text and its place in the conversation. Reading the same
    completion again gives the same ids; different samples of one turn differ. An id that is already
    in the conversation is not used again, because results refer to calls by id.
    """
    used = {call.id for message in messages for call in message.tool_calls}
    found: list[ToolCall] = []
    salt = repr(list(sampled)) if calls else ""
    for number, call in enumerate(calls):
        places = (f"{place} {number} {salt}" for place in count(len(messages)))
        ids = chain([call.id] if call.id else [], map(_call_id, places))
        call_id = next(one for one in ids if one not in used)
        used.add(call_id)
        found.append(ToolCall(id=call_id, name=call.name, arguments=call.arguments))
    return tuple(found)


def _ids_differ(written: Sequence[CallText], shown: Sequence[CallText]) -> bool:
    """Return whether the template shows a call id that differs from the sampled one."""
    pairs = zip(written, shown, strict=False)
    return any(one.id and other.id and one.id != other.id for one, other in pairs)


def load_renderer(model: ModelSection, *, uses: Iterable[Use] = ()) -> Renderer:
    """Return the renderer of the config's model, for `uses` and for answers.

    Raises TemplateLossError if its template would lose something.
    """
    tokenizer = load_tokenizer(model)
    require_thinking_choice(model, template_text(tokenizer))
    thinking = {"enable_thinking": model.enable_thinking}
    renderer = Renderer(
        tokenizer,
        stop_token_ids=load_stop_ids(model),
        arguments=thinking if model.enable_thinking is not None else None,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
    )
    for use in (Use.ANSWERS, *uses):
        renderer.require(use)
    return renderer


def _call_id(of: str) -> str:
    """Return 9 letters and digits: the form that the strictest templates require."""
    return b32encode(hashlib.blake2b(of.encode(), digest_size=6).digest()).decode()[:9]
