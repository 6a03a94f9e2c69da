"""Plays one chat template with a model that writes as the template itself does.

A play is exact (one chain), branched (several), or refused by name. Anything else is a fault: a
call that was written and not read, an answer that was changed, or a text that is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from telescope_core.base.chains import SampledTokens, sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.types import Message, ToolCall
from telescope_train.chat.conversations import Conversations
from telescope_train.chat.formats import same_words
from telescope_train.chat.proof import Use, keeps_text_with_calls
from telescope_train.chat.renderer import Prompt, Renderer
from telescope_train.chat.rendering import written_turn

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_train",
            "description": "Find a train.",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": "string"}, "seats": {"type": "integer"}},
                "required": ["to", "seats"],
            },
        },
    }
]


class Fault(Exception):
    """Raised when a play loses or changes something without a refusal."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one play ended."""

    kind: str
    """`exact`, `branched`, `refused` or `FAULT`."""
    why: str = ""


def said(content: str, thought: str = "", towns: Sequence[str] = ()) -> Message:
    """What the model writes; its calls have ids that every family accepts."""
    calls = tuple(
        ToolCall(
            id=f"{town.upper():X<8}"[:8] + str(number),
            name="find_train",
            arguments=f'{{"to": "{town}", "seats": {number + 2}}}',
        )
        for number, town in enumerate(towns)
    )
    return Message(role="assistant", content=content, reasoning=thought, tool_calls=calls)


SYSTEM = Message(role="system", content="You sell tickets in Ravenglass.")
PLAYS: Mapping[str, Sequence[Message | str]] = {
    "single": ("Is it raining in Ely?", said("Not now.")),
    "multi": (
        *("Is it raining in Ely?", said("Not now."), "And in Kirkwall?"),
        *(said("It is.\n\nIt always is."), "Thank you.", said("You are welcome.")),
    ),
    "system": ("system", "Is it raining in Ely?", said("Not now."), "And?", said("No more.")),
    "system tools": (
        *("system", "Get me to Wick.", said("", towns=["Wick"]), "result"),
        *(said("Two seats are booked."), "And to Thurso.", said("", towns=["Thurso"]), "result"),
        said("Booked as well."),
    ),
    "thinking": (
        *("Is it raining in Ely?", said("Not now.", "The radar is clear."), "And in Kirkwall?"),
        *(said("It is.", "A front is near."), "Thank you.", said("Gladly.", "A courtesy.")),
    ),
    "tools": (
        *("Get me to Wick.", said("", towns=["Wick"]), "result", said("Two seats are booked.")),
        *("And to Thurso.", said("", towns=["Thurso"]), "result", said("Booked as well.")),
    ),
    "parallel": (
        *("To Wick and to Thurso.", said("", towns=["Wick", "Thurso"]), "result", "result"),
        said("Both are booked."),
    ),
    "text and a call": (
        *("Get me to Wick.", said("I look for seats.", towns=["Wick"]), "result"),
        *(said("Two seats are booked."), "Thanks.", said("Gladly.")),
    ),
    "thinking tools": (
        *("Get me to Wick.", said("", "Wick it is.", ["Wick"]), "result"),
        *(said("Two seats are booked.", "That worked."), "Thanks.", said("Gladly.", "Manners.")),
    ),
}  # fmt: skip


def play(renderer: Renderer, script: Sequence[Message | str]) -> Outcome:
    """Play `script`, in which texts are the environment's and messages the model's."""
    try:
        answers = _played(renderer, script)
    except ConfigError as error:
        return Outcome(kind="refused", why=str(error))
    except Fault as fault:
        return Outcome(kind="FAULT", why=str(fault))
    wholes = [[*one.prompt_ids, *one.completion_ids] for one in answers]
    kept = all(
        list(one.prompt_ids)[: len(whole)] == whole
        for whole, one in zip(wholes, answers[1:], strict=False)
    )
    return Outcome(kind="exact" if kept else "branched")


def _played(renderer: Renderer, script: Sequence[Message | str]) -> list[SampledTokens]:
    has_calls = any(isinstance(one, Message) and one.tool_calls for one in script)
    tools = TOOLS if has_calls else []
    messages: list[Message] = []
    conversations, answers = Conversations(renderer), []
    for one in [*script, "And now?"]:
        if isinstance(one, str):
            messages.append(_of_environment(one, messages))
            continue
        prompt = _prompt(renderer, conversations, messages, tools)
        one = _sayable(renderer, messages, one, tools)
        ids = _sampled(renderer, messages, one, tools)
        found = renderer.parse(ids, tools=tools, prompt=prompt)
        _require_read(renderer, one, found, ids)
        answers.append(sampled_tokens(prompt.token_ids, ids, [-1.0] * len(ids)))
        conversations.add(prompt, found, answers[-1], tools=tools)
        messages.append(found)
    # The last answer, too, has to be in a prompt.
    _prompt(renderer, conversations, messages, tools)
    return answers


def _of_environment(text: str, messages: Sequence[Message]) -> Message:
    if text == "system":
        return SYSTEM
    if text != "result":
        return Message(role="user", content=text)
    turn = max(number for number, one in enumerate(messages) if one.tool_calls)
    answered = len(messages) - turn - 1
    call = messages[turn].tool_calls[answered]
    return Message(role="tool", content=f"platform {turn}{answered}", tool_call_id=call.id)


def _prompt(
    renderer: Renderer,
    conversations: Conversations,
    messages: Sequence[Message],
    tools: Sequence[dict],
) -> Prompt:
    prompt = conversations.prompt_for(messages, tools=tools)
    calls = [call for message in messages for call in message.tool_calls]
    words = [message.content for message in messages if message.content]
    words += [call.arguments.split('"')[3] for call in calls]
    missing = [word for word in words if word not in prompt.text]
    beside = {message.content for message in messages if message.tool_calls}
    # A text beside a call may be left out as thinking may, which is told at the start. What was
    # sampled has it, and is then a sample of its own.
    if beside & {*missing} and keeps_text_with_calls(renderer.rendering) is False:
        shown = renderer.rendering.special.decode_exactly(prompt.token_ids)
        if any(word in shown for word in missing):
            raise Fault(f"the ids have what their text has not: {missing}")
        missing = [word for word in missing if word not in beside]
    if missing:
        raise Fault(f"not in the prompt: {missing}")
    if prompt.text.count("find_train") < len(calls):
        raise Fault("the name of a call is not in the prompt")
    return prompt


def _sayable(
    renderer: Renderer, messages: Sequence[Message], one: Message, tools: Sequence[dict]
) -> Message:
    """Return `one`, without the text beside its call in a family whose calls stand alone.

    There, such a turn as a whole is an answer, of which nothing may be lost.
    """
    if not one.tool_calls or not one.content:
        return one
    turn = _with_text(renderer, _written(renderer, messages, one, tools), one)
    found = renderer.rendering.read(turn, "", tools=tools)
    if found.calls or one.tool_calls[0].name not in turn:
        return one
    if found.content != turn:
        raise Fault(f"{turn!r} is no call, and read as {found!r}")
    return replace(one, content="")


def _sampled(
    renderer: Renderer, messages: Sequence[Message], one: Message, tools: Sequence[dict]
) -> tuple[int, ...]:
    """What a model that writes as the template does samples, with the end that history shows."""
    turn = _with_text(renderer, _written(renderer, messages, one, tools), one)
    if renderer.no_end(tools=tools) is not None:  # what stands behind the answer ends it
        turn = turn.rstrip()
    if any(call.arguments.split('"')[3] not in turn for call in one.tool_calls):
        renderer.require(Use.TEXT_WITH_CALLS if one.content else Use.PARALLEL_CALLS)
        raise Fault(f"the template leaves out a call, which nothing refuses: {turn!r}")
    special = renderer.rendering.special
    results = [
        Message(role="tool", content="x", tool_call_id=call.id) for call in one.tool_calls
    ] or [Message(role="user", content="x")]
    last = one.tool_calls[-1].name if one.tool_calls else one.content
    for more in ([], results):
        text = renderer.text([*messages, one, *more], tools=tools, add_generation_prompt=bool(more))
        end = special.first_end(text[text.rfind(last) :])
        if end is not None:
            return (*special.encode_after(None, turn), end.token_id)
    return (*special.encode_after(None, turn), renderer.stop_token_ids[0])


def _with_text(renderer: Renderer, turn: str, one: Message) -> str:
    """Put the text beside a call into a turn whose template leaves it out: a model may write it."""
    if not one.tool_calls or one.content in turn:
        return turn
    thought, mark, rest = turn.rpartition(renderer.format.reasoning.closing or "\0")
    return f"{thought}{mark}{one.content}{rest}"


def _written(
    renderer: Renderer, messages: Sequence[Message], one: Message, tools: Sequence[dict]
) -> str:
    """Cut out what the model writes, without what keeps this template from showing it in place."""
    spoken = [message for message in messages if message.role != "system"]
    for asked, turn in (
        *((messages, one), (spoken, one)),
        (messages, replace(one, reasoning="")),  # the prompt has closed the thinking
        ([Message(role="user", content="?")], one),  # the answer changes what stands before it
    ):
        written = written_turn(renderer.rendering, asked, turn, tools=tools)
        if written is not None:
            return written
    raise Fault("the template does not show what follows its generation prompt")


def _require_read(renderer: Renderer, one: Message, found: Message, ids: Sequence[int]) -> None:
    text = renderer.rendering.special.decode_exactly(ids)
    wanted = one if one.reasoning and one.reasoning in text else replace(one, reasoning="")
    if one.tool_calls and found.reasoning == one.content:
        wanted = replace(one, content="", reasoning=one.content)  # the family's form of such a text
    if found.content != wanted.content or not same_words(wanted, found):
        raise Fault(f"written as {text!r}, read as {found!r}")
    for written, read in zip(one.tool_calls, found.tool_calls, strict=True):
        if written.id in text and read.id != written.id:
            raise Fault(f"the id {written.id} was written and read as {read.id}")
