"""Plays a scenario with a model that writes what it is told, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.train.chat.templates.families import Call, Family

from telescope_core.base.chains import ChainRecorder, SampledTokens
from telescope_core.types import Completion, Message, Rollout, Turn
from telescope_train.chat.conversations import Conversations
from telescope_train.chat.renderer import Prompt

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model writes next."""

    content: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    lost: int = 0
    """Tokens at its end that it does not get to write."""


SYSTEM = Message(role="system", content="You add numbers.")
THOUGHT = "2 and 2, that is"
ADD_THEM: tuple[Call, ...] = (
    ("add", {"a": 2, "b": [2.5, None], "why": "caf\u00e9 \u2192 \U0001f600"}),
)
ASKED = ("2+2=", "3+3=\n", "caf\u00e9 \U0001f600?")
SCENARIOS: dict[str, tuple[Reply | str, ...]] = {
    "multi": (ASKED[0], Reply(content="4"), ASKED[1], Reply(content="Six,\n\nThe answer is 4."),
              ASKED[2], Reply(content="\u4f60\u597d \U0001f600")),
    "cut": (ASKED[0], Reply(content="Nobody knows", lost=4), ASKED[1], Reply(content="6")),
    "tools": (ASKED[0], Reply(calls=ADD_THEM), "tool:4.5", Reply(content="4.5"), ASKED[1],
              Reply(content="6")),
    "thinking": (ASKED[0], Reply(content="4", thinking=THOUGHT), ASKED[1],
                 Reply(content="6", thinking=THOUGHT), ASKED[2],
                 Reply(content="Yes.", thinking=THOUGHT)),
    "thinking tools": (ASKED[0], Reply(calls=ADD_THEM, thinking=THOUGHT), "tool:4.5",
                       Reply(content="4.5", thinking=THOUGHT), ASKED[1],
                       Reply(content="6", thinking=THOUGHT)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Played:
    """A rollout, and what each of its turns came from."""

    prompts: list[Prompt]
    turns: list[tuple[int, ...]]
    """Sampled ids."""
    messages: list[Message]
    rollout: Rollout
    conversations: Conversations


def play(
    family: Family,
    script: Sequence[Reply | str],
    *,
    tokenize: Callable[[str], list[int]] | None = None,
    spell: Callable[[str], str] = str,
    send_back: Callable[[Message], Message] = lambda message: message,
    renderer=None,
) -> Played:
    """Play `script`: texts are the environment's, replies the model's.

    `tokenize` turns what the model writes into the ids it samples, `spell` changes its text first;
    `send_back` is what a caller makes of the assistant's message.
    """
    renderer = renderer or family.renderer()
    tools = TOOLS if any(isinstance(one, Reply) and one.calls for one in script) else []
    messages = [SYSTEM] if family.takes_system else []
    prompts, turns, places = list[Prompt](), list[tuple[int, ...]](), list[SampledTokens]()
    conversations, recorder = Conversations(renderer), ChainRecorder()
    for one in script:
        if isinstance(one, str):
            messages.append(_of_environment(one, messages))
            continue
        prompt = conversations.prompt_for(messages, tools=tools)
        text = spell(family.write(one.thinking, one.content, one.calls))
        ids = tuple((tokenize or family.continue_with)(text))
        ends = [number for number, token in enumerate(ids) if token in renderer.stop_token_ids]
        ids = ids[: max(1, min(len(ids) - one.lost, ends[0] + 1 if ends else len(ids)))]
        said = renderer.parse(ids, tools=tools, prompt=prompt)
        logprobs = [-0.5 - 0.01 * number for number in range(len(ids))]
        places.append(recorder.record(prompt.token_ids, ids, logprobs))
        conversations.add(prompt, said, places[-1], tools=tools)
        prompts.append(prompt)
        turns.append(ids)
        messages.append(send_back(said))
    rollout = _rollout(places, renderer.stop_token_ids)
    return Played(
        prompts=prompts,
        turns=turns,
        messages=messages,
        rollout=rollout,
        conversations=conversations,
    )


def _of_environment(text: str, messages: Sequence[Message]) -> Message:
    if not text.startswith("tool:") or not messages[-1].tool_calls:
        return Message(role="user", content=text)
    call_id = messages[-1].tool_calls[0].id
    return Message(role="tool", content=text.removeprefix("tool:"), tool_call_id=call_id)


def _rollout(places: Sequence[SampledTokens], ends: Sequence[int]) -> Rollout:
    return Rollout(
        environment="toy",
        example_id="e",
        group_id="g",
        index=0,
        reward=1.0,
        turns=tuple(
            Turn(
                completion=Completion(
                    message=Message(role="assistant", content=""),
                    finish_reason="stop" if place.completion_ids[-1] in ends else "length",
                    tokens=place,
                ),
                started_s=0.0,
                ended_s=1.0,
            )
            for place in places
        ),
    )
