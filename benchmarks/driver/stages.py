"""What the driver does for rollouts of 40 turns, stage by stage; prints processor times as JSON.

Runs in a process of its own, with the packages of the checkout that PYTHONPATH names, so that two
states of the code are measured in turns. The server is in memory, and its time is not counted.
Run by `bench_driver.py`.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from rollouts.problems import NUM_TOKENS, reply
from transformers import AutoTokenizer

from telescope_core.chat.replies import read_token_completion
from telescope_core.records import row_of
from telescope_core.types import Message, Rollout, Sampling, Span
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.renderer import Renderer
from telescope_train.inference.client import parse_reply
from telescope_train.inference.generation import Generation, Request
from telescope_train.inference.policy import TokenPolicy
from telescope_train.inference.wire import ServerFrame, TokenReply, VersionSpan

NUM_TURNS, NUM_SAID, REPEATS = 40, 409, 7
SAMPLING = Sampling(max_tokens=512)
REPLIES = [reply(number) for number in range(16)]


class Server:
    """Answers from memory, and measures how long that takes."""

    is_down = False

    def __init__(self, answers: list["array[int]"]) -> None:
        self._answers = iter(answers)

    async def generate(self, request: Request) -> Generation:
        """Return the next answer; a real client sends the ids as bytes."""
        array("i", request.prompt_ids).tobytes()
        ids = next(self._answers)
        return Generation(
            token_ids=ids,
            logprobs=array("f", bytes(4 * len(ids))),
            finish_reason="stop",
            spans=(Span(1, len(ids)),),
        )


def play(
    renderer: Renderer, questions: list[str], answers: list["array[int]"], *, is_cut: bool
) -> Rollout:
    """Play one conversation; with `is_cut`, the caller sends half of each answer back."""

    async def turns() -> Rollout:
        policy = TokenPolicy(Server(answers), renderer, "group", None)  # pyright: ignore
        messages: list[Message] = []
        for question in questions:
            messages.append(Message(role="user", content=question))
            said = (await policy.complete(messages, SAMPLING)).message
            words = said.content.split()
            cut = Message(role="assistant", content=" ".join(words[len(words) // 2 :]))
            messages.append(cut if is_cut else said)
        return Rollout(
            environment="toy", example_id="e", group_id="g", index=0, turns=tuple(policy.turns)
        )

    return asyncio.run(turns())


def cpu_ms(call: Callable[[Any], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Return the median processor milliseconds of `call`, after one that is not counted.

    It is given what `prepare` returns, which is not counted either.
    """
    times: list[float] = []
    for _ in range(REPEATS + 1):
        prepared = prepare()
        started_s = time.process_time()
        call(prepared)
        times.append(1e3 * (time.process_time() - started_s))
    return statistics.median(times[1:])


def per_token_us(read: Callable[[bytes], object], contents: list[bytes]) -> float:
    """Return microseconds per sampled token, for replies of 256 tokens."""
    ms = cpu_ms(lambda _: [read(content) for content in contents * 8])
    return 1e3 * ms / (8 * NUM_TOKENS * len(contents))


def frame(number: int) -> bytes:
    """Return a frame of the token plane with one reply of 256 tokens."""
    columns = bytes(4 * NUM_TOKENS)
    one = TokenReply(
        number,
        token_ids=columns,
        logprobs=columns,
        finish_reason="stop",
        versions=(VersionSpan("1", 0),),
    )
    return msgspec.msgpack.Encoder().encode([one])


def stages(folder: str) -> dict[str, float]:
    """Return microseconds per token of reading, and milliseconds per rollout of all else."""
    found = {
        "read chat replies, us per token": per_token_us(
            lambda content: read_token_completion(content, where="memory"), REPLIES
        )
    }
    decoder = msgspec.msgpack.Decoder(ServerFrame)
    found["read frames of the token plane, us per token"] = per_token_us(
        lambda content: [parse_reply(one, "memory") for one in decoder.decode(content)],
        [frame(number) for number in range(16)],
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    drawn = random.Random(0)
    usual = [one for one in range(1000, 9000) if tokenizer.decode([one]).strip().isalpha()]

    def text(size: int) -> str:
        return " ".join(tokenizer.decode([one]).strip() for one in drawn.choices(usual, k=size))

    for kind, asked in (("short questions", 8), ("questions as long as answers", 400)):
        questions = [text(asked) for _ in range(NUM_TURNS)]
        size = 2 * NUM_SAID if asked < NUM_SAID // 2 else NUM_SAID
        said = [tokenizer.encode(text(size))[:size] for _ in range(NUM_TURNS)]
        answers = [array("i", [*ids, end]) for ids in said]
        found |= played(kind, (questions, answers), tokenizer)
    return found


def played(
    kind: str, spoken: tuple[list[str], list["array[int]"]], tokenizer: Any
) -> dict[str, float]:
    """Return milliseconds of a rollout, and those that the tokenizer alone takes for its text."""
    questions, answers = spoken

    def renderer() -> Renderer:
        """Return one that remembers nothing of the conversation."""
        fresh = Renderer(tokenizer, stop_token_ids=(tokenizer.eos_token_id,))
        play(fresh, ["Hello"], answers, is_cut=False)
        return fresh

    found: dict[str, float] = {}
    for way, is_cut in (("grows", False), ("rewritten", True)):
        rollout = play(renderer(), questions, answers, is_cut=is_cut)
        found |= {
            f"{kind}, {way}: play, ms": cpu_ms(
                lambda fresh, is_cut=is_cut: play(fresh, questions, answers, is_cut=is_cut),
                renderer,
            ),
            f"{kind}, {way}: make samples, ms": cpu_ms(
                lambda _, rollout=rollout: samples_from_rollout(rollout, 1.0, 1.0)
            ),
            f"{kind}, {way}: make the row, ms": cpu_ms(
                lambda _, rollout=rollout: row_of(rollout, with_tokens=True)
            ),
        }
    ids = [one.tolist() for one in answers]
    found[f"{kind}: the tokenizer alone, ms"] = cpu_ms(
        lambda _: (
            [tokenizer.backend_tokenizer.encode_batch([one]) for one in questions],
            [tokenizer.backend_tokenizer.decode(one) for one in ids],
        )
    )
    return found


if __name__ == "__main__":
    print(json.dumps(stages(sys.argv[1])))
