r"""Answers close to the right one but with another value, which a grader must tell apart.

Mathematics is changed in its value: a number, a formula, a list, a tuple or an interval. Of a word,
the letters change places. The changed answer replaces the right one in the gold answer.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from telescope_core.base.solved import is_solved
from telescope_core.environments import Environment
from telescope_core.graders.mathematics.notation import normalized
from telescope_core.graders.mathematics.numbers import Amount
from telescope_core.graders.mathematics.values import (
    Formula,
    Grouped,
    Named,
    Value,
    ValueKind,
    read_value,
)
from telescope_core.probes.answers import Answers
from telescope_core.probes.completions import GOLD, ShownExample, Try
from telescope_core.probes.judging import ENOUGH, LUCK, Played, require_enough
from telescope_core.probes.meter import Limits, Meter, slowness
from telescope_core.probes.playing import asked_of, play_in_turn

CHECK = "reward.near_gold"
NEAR_GOLD = {
    "other_sign": "the other sign",
    "other_factor": "twice as much",
    "other_unit": "another unit, or a thousand times as much",
    "other_symbol": "times a variable",
    "other_constant": "times pi",
    "other_order": "its parts, or digits, in another order",
    "off_by_one": "one more",
    "digits_alone": "its digits without the first",
    "other_letters": "its letters in another order",
}
"""Kinds of answers close to the right one, and what was changed in each."""
_SHORT = 200
_LONGEST_ERROR = 600
_LIMITS = Limits(own_s=120.0, wall_s=300.0)
_VALIDATED = Limits(own_s=60.0, wall_s=200.0)
_NUM_VALIDATED = 4
"""Examples of each split whose close answers are played by `env validate`."""
_UNITS = {"km": "mi", "cm": "in", "m": "ft", "kg": "lb", "hours": "minutes", "dollars": "cents"}
_ORDERED = {ValueKind.OPEN, ValueKind.CLOSED, ValueKind.LEFT_OPEN, ValueKind.RIGHT_OPEN}


def near_answers(answer: str) -> dict[str, str]:
    """Return other answers than `answer`, by kind; none if it is neither mathematics nor a word."""
    word = answer.casefold()
    if len(word) > 2 and word.isalpha() and word != word[::-1]:
        is_choices = answer.isupper() and sorted(set(word)) == list(word)  # ACD: DCA is the same
        return {} if is_choices else {"other_letters": word[::-1]}
    value = read_value(answer)
    value = value.value if isinstance(value, Named) else value
    if not _is_mathematics(value):
        return {}
    plain = normalized(answer)
    found: dict[str, str] = {"other_symbol": f"{plain}q", "other_constant": f"{plain}\\pi"}
    if isinstance(value, Grouped):
        if value.kind in _ORDERED and len(value.members) > 1:
            parts = [member.text for member in value.members]
            opens, closes = value.kind
            if parts != parts[::-1]:
                found["other_order"] = f"{opens}{', '.join(parts[::-1])}{closes}"
        found["other_factor"] = f"2{plain}"
        found["off_by_one"] = f"{plain}+1"
    elif isinstance(value, Amount):
        found |= _near_number(value)
        if value.value == 0:  # in any unit, and times anything, it is the same
            return {"off_by_one": found["off_by_one"]}
    else:
        found["other_sign"] = f"-({plain})"
        found["other_factor"] = f"2({plain})"
        found["off_by_one"] = f"{plain}+1"
    unit = next((one for one in _UNITS if plain.endswith((f"\\text{{{one}}}", f" {one}"))), None)
    if unit is not None:
        cut = len(f"\\text{{{unit}}}") if plain.endswith("}") else len(unit)
        found["other_unit"] = f"{plain[:-cut]}\\text{{{_UNITS[unit]}}}"
    return found


def _is_mathematics(value: Value) -> bool:
    if isinstance(value, Grouped):
        return bool(value.members) and all(_is_mathematics(one) for one in value.members)
    if isinstance(value, Formula):
        return any(sign.isdigit() for sign in value.body) and "=" not in value.body
    return isinstance(value, Amount)


def _near_number(amount: Amount) -> dict[str, str]:
    value = amount.value
    found: dict[str, str] = {"off_by_one": _number(value + 1)}
    if value != 0:
        found["other_sign"] = _number(-value)
        found["other_factor"] = _number(2 * value)
        found["other_unit"] = f"{_number(value)} thousand"
    digits = str(abs(value.numerator))
    if value.denominator == 1 and len(digits) > 1:
        found["digits_alone"] = digits[1:]  # a part of the right text
    if value.denominator == 1 and (other := digits[::-1]) != digits and digits[-1] != "0":
        found["other_order"] = f"{'-' if value < 0 else ''}{other}"
    if value.denominator > 1 and value.numerator not in (0, value.denominator):
        found["other_order"] = _number(1 / value)
    return found


def _number(value: Fraction) -> str:
    is_whole = value.denominator == 1
    return str(value.numerator) if is_whole else f"{value.numerator}/{value.denominator}"


def near_tries(asked: ShownExample) -> list[Try]:
    """Return the tries for one example: its gold answer with other values in it."""
    answer = asked.example.answer
    if not asked.gold or not answer:
        return []
    *before, last = asked.gold
    place = last.rfind(answer)
    is_inside_a_number = re.search(r"[0-9.]$", last[:place]) and answer[:1].isdigit()
    if place < 0 or is_inside_a_number:
        return []
    after = last[place + len(answer) :]
    return [
        Try(asked=asked, kind=kind, replies=(*before, f"{last[:place]}{text}{after}"))
        for kind, text in near_answers(answer).items()
    ]


async def judge_near_gold(
    environment: Environment, asked: Sequence[ShownExample], meter: Meter, answers: Answers
) -> list[Played]:
    """Play answers close to the gold ones of the first examples; report kinds that count as solved.

    Returns the played rollouts. One answer in ten, or a single one of fewer, may be right by luck,
    where two values solve a problem.
    """
    near = [attempt for one in asked if one.index < _NUM_VALIDATED for attempt in near_tries(one)]
    if not near:
        answers.not_applicable(CHECK, "no gold answer holds a number or a formula as its answer")
        return []
    played = await play_in_turn(environment, near, meter, _VALIDATED)
    by_kind: defaultdict[str, list[Played]] = defaultdict(list)
    for one in played:
        by_kind[one.attempt.kind].append(one)
    for kind, tried in by_kind.items():
        scored = [one for one in tried if one.reward is not None]
        if len(scored) < ENOUGH * len(tried):
            error = next(one.rollout.error for one in tried if one.reward is None)
            answers.inconclusive(
                CHECK,
                f"only {len(scored)} of {len(tried)} answers with {NEAR_GOLD[kind]} have a reward; "
                f"the first without one: {error}",
            )
        solved = [one for one in scored if _counts_as_solved(one, environment)]
        if len(solved) <= max(1, math.floor(LUCK * len(scored))):
            continue
        for one in solved[:3]:
            answers.found(
                CHECK,
                f"the right answer is {one.attempt.asked.example.answer[:_SHORT]!r}; with "
                f"{NEAR_GOLD[kind]} it earns {one.reward:g}, and so do {len(solved)} of "
                f"{len(scored)} such answers",
                example_id=one.attempt.asked.example.id,
                completion=one.attempt.replies[-1],
            )
    answers.passed(CHECK)
    require_enough(near, played, [CHECK], answers)
    return played


def _counts_as_solved(one: Played, environment: Environment) -> bool:
    return one.reward is not None and is_solved(one.reward, environment.success_threshold)


async def run_near_gold(environment: Environment, num_examples: int, answers: Answers) -> None:
    """Play the gold answers and those close to them; report each reward, and close."""
    answers.stage(CHECK)
    asked = await asked_of(environment, num_examples)
    golds = [Try(asked=one, kind=GOLD, replies=one.gold) for one in asked if one.gold]
    near = [attempt for one in asked for attempt in near_tries(one)]
    meter = Meter(slowness=slowness())
    played = await play_in_turn(environment, [*golds, *near], meter, _LIMITS)
    answers.data(
        "near_gold",
        {
            "num_examples": len(asked),
            "num_without_gold": sum(not one.gold for one in asked),
            "num_without_near": sum(bool(one.gold) and not near_tries(one) for one in asked),
            "num_planned": len(golds) + len(near),
            "played": [
                {
                    "kind": one.attempt.kind,
                    "example_id": one.attempt.asked.example.id,
                    "right": one.attempt.asked.example.answer[:_SHORT],
                    "said": one.attempt.replies[-1][-_SHORT:],
                    "reward": one.reward,
                    "error": (one.rollout.error or "")[:_LONGEST_ERROR],
                    "is_solved": _counts_as_solved(one, environment),
                }
                for one in played
            ],
        },
    )
    await environment.close()
