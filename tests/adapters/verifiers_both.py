"""A program in the virtual environment of verifiers, whichever version it has: ours beside theirs.

It plays the same replies through our adapter and through their own `generate`, for each kind of
environment of `verifiers_sums`, and prints the rewards, with the messages of ours.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import httpx
import openai
import openai.types.chat
import verifiers as vf
import verifiers.types

from telescope_adapters.verifiers import VerifiersEnvironment
from telescope_core import Completion, Message, ToolCall
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import ContextLengthError, TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split

CALL = "call add(0, 1)"
FULL = "the context is full"
CASES = {
    "single": [(0, ["1"]), (1, ["7"]), (2, ["three"])],
    "strings": [(0, ["1"]), (2, ["7"])],
    "tools": [(0, ["1"]), (0, [CALL, "1"]), (1, [CALL, "x"])],
    "turns": [(0, ["1"]), (0, ["no", "1"]), (0, ["no", "no", "no"]), (1, ["no", FULL])],
    "mixed": [(0, ["1"]), (40, [CALL, "1"]), (80, ["no", "1"]), (81, ["no", "no", "9"])],
    "nested": [(0, ["no", "1"]), (40, ["1"]), (80, [CALL, "9"])],
    "described": [(0, ["1"]), (1, ["2"])],
    "mixed-breaks": [(0, ["1"])],
    "worded": [(0, ["1"])],
    "stops": [(0, ["1</a> or 2"]), (1, ["7</turn>"])],
    "turn-stops": [(0, ["no</a>, 1</turn>, 2", "1</a> or 2"]), (1, ["2</a>1", "no", "2</turn>"])],
    "spends": [(0, ["1"]), (1, ["7"]), (1, ["uncounted"])],
    "budget": [(0, ["no", "no", "no", "1"]), (0, ["no", "1"])],
}
"""Kind -> rows, by number, and what the model says in turn."""
REFUSED = ("roles", "unscored", "group", "mixed-group", "chooses", "best", "mixed-best", "unrated")


def answer(said: str) -> Completion:
    if said == CALL:
        calls = (ToolCall(id="c1", name="add", arguments='{"a": 0, "b": 1}'),)
        message = Message(role="assistant", content="", tool_calls=calls)
        return Completion(message=message, finish_reason="tool_calls")
    return Completion(
        message=Message(role="assistant", content=said),
        finish_reason="stop",
        num_prompt_tokens=3,
        num_completion_tokens=5,
        is_counted=said != "uncounted",
    )


def cut(text: str, stop: Sequence[str] | str | None) -> str:
    """Return `text` up to the first of the stop texts, as a model's server does."""
    texts = [stop] if isinstance(stop, str) else stop or ()
    return min((text.partition(one)[0] for one in texts), key=len, default=text)


class Cutting:
    """A policy that says replies in turn, up to a stop text."""

    endpoint = None

    def __init__(self, replies) -> None:
        self._scripted = ScriptedClient(replies).policy("r")

    async def complete(self, messages, sampling, *, tools=()):
        said = await self._scripted.complete(messages, sampling, tools=tools)
        content = cut(said.message.content, sampling.stop)
        return replace(said, message=replace(said.message, content=content))


async def ours(client, index: int, said: list[str]) -> list:
    replies = [ContextLengthError("too long") if one == FULL else answer(one) for one in said]
    request = PlayRequest(
        split=Split.TRAIN,
        example_index=index,
        group_id="g",
        index=0,
        sampling=Sampling(max_tokens=8),
        deadline_s=300.0,
    )
    rollout = await client.play(request, Cutting(replies))
    shown = [[one.role, one.content] for one in rollout.messages]
    return [rollout.reward, rollout.stop_reason.value, shown, rollout.error or ""]


def script(said: list[str]):
    """Return a client of theirs that answers in turn."""
    left = [answer(one).message for one in said if one != FULL]
    if not hasattr(vf, "Client"):

        async def create(stop=None, **_):
            if not left:
                text = "this model's maximum context length is 8"
                asked = httpx.Request("POST", "http://127.0.0.1")
                refusal = httpx.Response(400, text=text, request=asked)
                raise openai.BadRequestError(text, response=refusal, body=None)
            calls = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in left[0].tool_calls
            ]
            said = {"role": "assistant", "content": cut(left.pop(0).content, stop)}
            choice = {
                "index": 0,
                "finish_reason": "tool_calls" if calls else "stop",
                "message": {**said, "tool_calls": calls} if calls else said,
            }
            body = {"id": "r", "object": "chat.completion", "created": 0, "model": "m"}
            if said["content"] != "uncounted":
                body["usage"] = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            return openai.types.chat.ChatCompletion.model_validate({**body, "choices": [choice]})

        completions = SimpleNamespace(create=create)
        return SimpleNamespace(chat=SimpleNamespace(completions=completions), base_url="")

    class Script(vf.Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **_):
            if not left:
                raise vf.OverlongPromptError
            message = left.pop(0)
            calls = [
                vf.types.ToolCall(id=c.id, name=c.name, arguments=c.arguments)
                for c in message.tool_calls
            ]
            reply = vf.types.ResponseMessage(
                content=cut(message.content, (sampling_args or {}).get("stop")),
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            counts = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            usage = vf.types.Usage(reasoning_tokens=0, **counts)
            known = {} if message.content == "uncounted" else {"usage": usage}
            return vf.types.Response(id="r", created=0, model=model, message=reply, **known)

        async def unused(self, *_, **__): ...

        setup_client = to_native_tool = to_native_prompt = get_native_response = unused
        raise_from_native_response = from_native_response = close = unused

    return Script(object())


async def theirs(env, index: int, said: list[str]) -> float | None:
    row = dict(env.get_dataset()[index])
    if isinstance(row["prompt"], str) and not hasattr(vf, "Client"):
        return None  # their loop takes no text for a chat
    done = await env.generate([row], script(said), "m", sampling_args={"max_tokens": 8})
    return done["outputs"][0]["reward"] if "outputs" in done else done["reward"][0]


async def main() -> dict:
    both, refused, said = {}, {}, []
    for kind in (*CASES, *REFUSED):
        try:
            with showing_troubles(said.append):
                made = VerifiersEnvironment.from_settings({"id": "sums", "options": {"kind": kind}})
            client = InProcessEnvironment(made, name="sums")
            await client.describe()
        except TelescopeError as error:
            refused[kind] = str(error)
            continue
        cases = CASES[kind]
        with showing_troubles(said.append):
            found = [await ours(client, index, replies) for index, replies in cases]
        env = vf.load_environment("sums", kind=kind)
        both[kind] = [
            [*one, await theirs(env, index, replies)]
            for one, (index, replies) in zip(found, cases, strict=True)
        ]
    return {"version": vf.__version__, "both": both, "refused": refused, "said": said}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(asyncio.run(main()))}\n")
