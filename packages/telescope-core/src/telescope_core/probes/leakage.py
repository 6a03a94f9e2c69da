"""The probe of the leakage level: what the policy can see, its tools, and leftovers.

A `7` appears in many prompts by chance, and texts for reading comprehension contain their answers;
neither is a leak. An answer leaks if a fixed rule finds it. A *reader* is a rule that takes the
text beside the same two words, or at the same end, of every prompt. It is a leak if it is right for
three quarters of the examples, and for a third more of them than the most frequent answer. An
*announcement*, such as `Answer: 46`, is a leak in a single example, unless other examples' prompts
have the same words. Only whole words count: `7` is not in `17`.
"""

import asyncio
import gc
import json
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import (
    Completion,
    JsonValue,
    Message,
    Rollout,
    RolloutStatus,
    StopReason,
    ToolCall,
)
from telescope_core.environments import Environment, Episode, ToolEnvironment
from telescope_core.environments.hooks import of_kind
from telescope_core.environments.tool_calls import ToolFailure
from telescope_core.playing.rollout import play_rollout
from telescope_core.probes.answers import Answers, described
from telescope_core.probes.completions import Form, ShownExample, Try, form_of
from telescope_core.probes.judging import require_enough
from telescope_core.probes.meter import Limits, Meter
from telescope_core.probes.playing import (
    asked_of,
    capture_episodes,
    play,
    play_at_once,
    request_for,
)
from telescope_core.probes.schema_check import NoExampleError, example_of, schema_problems

_WORD = re.compile(r"[-+]?\d+(?:[.,/]\d+)*|\w+|[^\w\s]")
_ANNOUNCED = re.compile(
    r"(?:answer|solution|result|gold|label|ground[ _-]?truth|target_?answer|key)\s*"
    r"(?:is|are|:|=|->|was)[\s\"'`(\[{<$*]*(?:\\boxed\{)?",
    re.IGNORECASE,
)
_READER_SHARE, _OVER_CHANCE = 0.75, 1 / 3
_FEWEST = 4
"""Least number of examples with an answer; fewer show nothing."""
_START, _END = "<start>", "<end>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One example: the text that the policy sees before its first answer, and the answer."""

    example_id: str
    text: str
    answers: tuple[str, ...]
    """Ways to write the answer; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A rule that reads off answers, and an example for which it works."""

    text: str
    example_id: str


def find_leaks(shown: Sequence[Shown]) -> list[Leak]:
    """Return the rules by which answers can be read off, simplest first."""
    known = [one for one in shown if any(_words(answer) for answer in one.answers)]
    return [*_announcements(known), *_readers(known)]


def _announcements(shown: Sequence[Shown]) -> list[Leak]:
    found: list[tuple[Shown, str]] = []
    for one in shown:
        for match in _ANNOUNCED.finditer(one.text):
            after = _words(one.text[match.end() : match.end() + 400])
            for answer in one.answers:
                words = _words(answer)
                if words and after[: len(words)] == words:
                    found.append((one, " ".join(f"{match[0]}{answer}".split())))
    # An instruction that shows an example of the form is the same in all prompts.
    everywhere = Counter(
        said
        for said in {said.casefold() for _, said in found}
        for one in shown
        if said in " ".join(one.text.split()).casefold()
    )
    limit = max(1, len(shown) // 4)
    leaks = [
        Leak(text=f"the answer is announced: {said[:120]!r}", example_id=one.example_id)
        for one, said in found
        if everywhere[said.casefold()] <= limit
    ]
    return leaks[:3]


def _readers(shown: Sequence[Shown]) -> list[Leak]:
    if len(shown) < _FEWEST:
        return []
    hits: Counter[tuple[str, ...]] = Counter()
    witness: dict[tuple[str, ...], Shown] = {}
    for one in shown:
        for reader in set(_contexts(one)):
            hits[reader] += 1
            witness.setdefault(reader, one)
    frequent = Counter(one.answers[0].casefold() for one in shown).most_common(1)[0][1]
    needed = max(_READER_SHARE * len(shown), frequent + _OVER_CHANCE * len(shown))
    best = [(count, reader) for reader, count in hits.items() if count >= needed]
    # The first and the last place of the same words are described alike, and often the same place.
    found: dict[str, Leak] = {}
    for count, reader in sorted(best, reverse=True):
        rule = _described(reader)
        text = f"the answer is {rule}, in {count} of {len(shown)} examples"
        found.setdefault(rule, Leak(text=text, example_id=witness[reader].example_id))
    return [*found.values()][:2]


def _contexts(one: Shown) -> Iterator[tuple[str, ...]]:
    """Yield rules that find the answer of `one`: its side, and the two words beside it.

    A rule looks at the first or the last place where its words appear, and at no other.
    """
    words = [_START, _START, *_words(one.text), _END, _END]
    pairs_before = list(pairwise(words))
    for answer in one.answers:
        wanted = _words(answer)
        size = len(wanted)
        if not wanted:
            continue
        for at in range(2, len(words) - size - 1):
            if words[at : at + size] != wanted:
                continue
            before, after = pairs_before[at - 2], (words[at + size], words[at + size + 1])
            if pairs_before.index(before) == at - 2:
                yield ("first after", *before)
            if len(pairs_before) - 1 - pairs_before[::-1].index(before) == at - 2:
                yield ("last after", *before)
            if after == (_END, _END) or pairs_before.index(after) == at + size:
                yield ("first before", *after)


def _described(reader: tuple[str, ...]) -> str:
    side, *words = reader
    if words[-1] == _START:
        return "at the very beginning"
    if words[0] == _END:
        return "at the very end"
    plain = [word for word in words if word not in (_START, _END)]
    return f"{side.partition(' ')[2]} {' '.join(plain)!r}"


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


_NEVER_S = 3600.0
_CALL_S = 120.0
_MEMORY = Limits(own_s=60.0, wall_s=120.0)
_LATE = "a rollout had not ended in time: it waited for something, or the machine was busy"
_NUM_KEPT = 64
_FAULTS = (ToolFailure.BAD_ARGUMENTS, ToolFailure.RAISED, ToolFailure.TIMED_OUT)
"""Failures that a call with valid arguments must not have; a tool may refuse."""
_EXAMPLES = "give the parameter an example of what it takes: Annotated[str, Field(examples=[...])]"


async def look_for_leaks(environment: Environment, num_examples: int, answers: Answers) -> None:
    """Run the level with an environment that is built already, and close it."""
    last: list[Episode] = []

    def keep(episode: Episode) -> None:
        last[:] = [episode]

    capture_episodes(environment, keep)
    asked = await asked_of(environment, num_examples)
    form = form_of(asked)
    with answers.doing("leakage.prompt"):
        for leak in find_leaks(
            [await _shown(environment, one, form, last, answers) for one in asked]
        ):
            answers.found("leakage.prompt", leak.text, example_id=leak.example_id)
    if isinstance(environment, ToolEnvironment):
        await _check_tools(environment, asked[0], last, answers)
    else:
        answers.not_applicable("leakage.tools", "it has no tools")
    await _check_cleanup(environment, asked[0], last, answers)
    await _check_isolation(environment, asked, answers)
    await _check_memory(environment, asked, last, answers)
    with answers.doing("leakage.cleanup"):
        await environment.close()
        await environment.close()


async def _shown(
    environment: Environment, one: ShownExample, form: Form, last: list[Episode], answers: Answers
) -> Shown:
    """Return what the policy sees before its second answer if its first answer is empty."""
    played = await play(environment, Try(asked=one, kind="empty", replies=("",)))
    rollout = played.rollout
    if played.cut is not None:
        answers.inconclusive("leakage.prompt", _LATE)
    messages = rollout.messages or one.opening
    # Only the first observation counts: later ones may rightly reveal what was missed.
    written = [at for at, message in enumerate(messages) if message.role == "assistant"]
    seen = [message.content for message in messages[: written[1] if written[1:] else None]]
    seen += [json.dumps(tool, default=str) for tool in (last[0].tools if last else ())]
    right = [one.example.answer] if one.example.answer else []
    for gold in one.gold[-1:]:
        right.append(gold.removeprefix(form.before).removesuffix(form.after).strip())
    return Shown(
        example_id=one.example.id, text="\n".join(seen), answers=tuple(dict.fromkeys(right))
    )


async def _check_tools(
    environment: ToolEnvironment, one: ShownExample, last: list[Episode], answers: Answers
) -> None:
    with answers.doing("leakage.tools"):
        await play(environment, Try(asked=one, kind="tools", replies=("",)))
        schemas = [tool.schema for tool in environment.function_tools()]
        known = json.dumps(schemas, default=str)
        schemas += [dict(tool) for tool in last[0].tools if json.dumps(tool) not in known]
    if answers.has_found("leakage.tools"):
        return
    num_own = len(environment.function_tools())
    for index, schema in enumerate(schemas):
        name, parameters = _about(schema)
        problems = schema_problems(parameters)
        for problem in problems:
            answers.found("leakage.tools", f"tool {name}: {problem}")
        if problems:
            continue
        try:
            arguments = json.dumps(example_of(parameters))
        except NoExampleError as error:
            # An author cannot change the schemas of a server.
            if index < num_own:
                answers.inconclusive(
                    "leakage.tools", f"tool {name} was not called: it takes {error}; {_EXAMPLES}"
                )
            continue
        await _call(environment, one, name, arguments, answers)
    with answers.doing("leakage.tools"):
        first = _about(schemas[0])[0] if schemas else ""
        for name, arguments in (
            ("no_such_tool_here", "{}"),
            (first, '{"no_such_argument": [[[]]]}'),
            (first, "not json"),
            ("", "{}"),
        ):
            rollout = await _played_call(environment, one, name, arguments)
            if rollout.stop_reason is StopReason.TIMEOUT:
                answers.inconclusive("leakage.tools", _LATE)
            elif rollout.status is RolloutStatus.FAILED:
                answers.found(
                    "leakage.tools",
                    f"calling {name!r} with {arguments}: {rollout.error}",
                    example_id=one.example.id,
                )


def _about(schema: dict[str, JsonValue]) -> tuple[str, object]:
    """Return name and argument schema of a tool."""
    about = schema.get("function")
    if not isinstance(about, Mapping):
        return "", None
    plain = cast(Mapping[str, object], about)
    return str(plain.get("name", "")), plain.get("parameters")


async def _call(
    environment: ToolEnvironment, one: ShownExample, name: str, arguments: str, answers: Answers
) -> None:
    answers.stage("leakage.tools")
    rollout = await _played_call(environment, one, name, arguments)
    calls = [at for at, message in enumerate(rollout.messages) if message.tool_calls]
    # Further messages may follow the answer, after the turn without a call.
    after = rollout.messages[calls[-1] + 1 :] if calls else ()
    said = after[0].content if after else ""
    failures = [kind for kind in _FAULTS if rollout.metrics.get(f"tool_errors/{kind}")]
    where = {"example_id": one.example.id, "completion": f"{name}({arguments})"}
    if rollout.stop_reason is StopReason.TIMEOUT:
        answers.inconclusive("leakage.tools", f"tool {name}: {_LATE}")
    elif rollout.status is RolloutStatus.FAILED:
        answers.found("leakage.tools", f"tool {name}: {rollout.error}", **where)
    elif failures:
        told = rollout.tags.get("tool_exception") or said
        if failures[0] is ToolFailure.BAD_ARGUMENTS:
            told += f"; if the schema cannot say what it takes, {_EXAMPLES}"
        answers.found("leakage.tools", f"tool {name}: {failures[0]}: {told}", **where)
    elif not rollout.metrics.get("tool_calls"):
        answers.found("leakage.tools", f"tool {name}: the call was not answered", **where)


async def _played_call(
    environment: ToolEnvironment, one: ShownExample, name: str, arguments: str
) -> Rollout:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    message = Message(role="assistant", content="", tool_calls=(call,))
    replies = [Completion(message=message, finish_reason="tool_calls"), ""]
    client = ScriptedClient(replies)
    request = request_for(one, "call", deadline_s=_CALL_S)
    return await play_rollout(environment, "validated", request, client.policy("call"))


async def _check_cleanup(
    environment: Environment, one: ShownExample, last: list[Episode], answers: Answers
) -> None:
    hooks = of_kind(environment.hooks, "cleanup")
    if not hooks:
        answers.not_applicable("leakage.cleanup", "it has no @cleanup method")
        return
    answers.stage("leakage.cleanup")
    played = (await play(environment, Try(asked=one, kind="cleanup", replies=("",)))).rollout
    if played.tags.get("cleanup"):
        answers.found("leakage.cleanup", played.tags["cleanup"], example_id=one.example.id)
    await _clean_again(environment, one, last, "a second time", answers)
    last.clear()
    never = ScriptedClient([""], delay_s=_NEVER_S).policy("never")
    request = replace(request_for(one, "cancelled"), deadline_s=_NEVER_S)
    task = asyncio.create_task(play_rollout(environment, "validated", request, never))
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    await asyncio.wait([task], timeout=sum(hook.deadline_s for hook in hooks) + 2)
    await _clean_again(environment, one, last, "after a cancelled rollout", answers)
    answers.passed("leakage.cleanup")


async def _clean_again(
    environment: Environment, one: ShownExample, last: list[Episode], when: str, answers: Answers
) -> None:
    for hook in reversed(of_kind(environment.hooks, "cleanup")):
        for episode in last:
            try:
                method = getattr(environment, hook.name)
                async with asyncio.timeout(hook.deadline_s):
                    await environment.caller.one("cleanup", method, episode)
            except Exception as error:  # noqa: BLE001 - a boundary: the author's code
                answers.found(
                    "leakage.cleanup",
                    f"{hook.name} {when}: {described(error)}",
                    example_id=one.example.id,
                )


async def _check_isolation(
    environment: Environment, asked: Sequence[ShownExample], answers: Answers
) -> None:
    with answers.doing("leakage.isolation"):
        for one in asked[:8]:
            tries = [Try(asked=one, kind="isolation", replies=one.gold or ("",))] * 2
            first = await play(environment, tries[0])
            opening = tuple(await environment.first_messages(one.example))
            second = await play(environment, tries[1])
            if first.cut is not None or second.cut is not None:
                answers.inconclusive("leakage.isolation", _LATE)
                break
            if opening != one.opening:
                answers.found("leakage.isolation", "its prompt changed", example_id=one.example.id)
            elif first.digest != second.digest:
                answers.found(
                    "leakage.isolation",
                    "the same answers led to a different conversation",
                    example_id=one.example.id,
                )


async def _check_memory(
    environment: Environment, asked: Sequence[ShownExample], last: list[Episode], answers: Answers
) -> None:
    alive: list[weakref.ref[Episode]] = []
    capture_episodes(environment, lambda episode: alive.append(weakref.ref(episode)))
    with answers.doing("leakage.memory"):
        tries = [
            Try(asked=asked[index % len(asked)], kind="memory", replies=("",))
            for index in range(_NUM_KEPT)
        ]
        played = await play_at_once(environment, tries, Meter(), _MEMORY, num_at_once=8)
        require_enough(tries, played, ["leakage.memory"], answers)
        last.clear()
        gc.collect()
        num_kept = sum(reference() is not None for reference in alive)
        if num_kept > len(alive) // 2:
            answers.found(
                "leakage.memory", f"{num_kept} of {len(alive)} rollouts are still in memory"
            )
