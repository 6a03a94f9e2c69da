"""The scripted answers of the policy: the gold answer, empty ones and every kind of junk. Pure.

The form of an answer, such as `<answer>` tags, is inferred from gold answers and the prompt.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from telescope_core.base.types import Example, Message, Split

GOLD = "gold"
NOTHING = ("empty", "whitespace")
"""Kinds of answers without content; they measure the lowest reward."""
CHECK_OF_KIND = {
    "empty": "reward.empty",
    "whitespace": "reward.empty",
    "echo": "reward.echo",
    "other_gold": "reward.other_gold",
    "random_words": "reward.random_words",
    "refusal": "reward.random_words",
    "refusal_in_form": "reward.random_words",
    "huge": "reward.huge",
    "huge_number": "reward.huge",
    "unicode": "reward.unicode",
    "unicode_in_form": "reward.unicode",
    "special_value": "reward.special_values",
    "form_alone": "reward.format_only",
    "form_of_dots": "reward.format_only",
}
GUESSES = {"other_gold", "random_words", "refusal", "refusal_in_form"}
"""Kinds of answers that may be right by luck, or for a few examples."""
HUGE = ("huge", "huge_number")
HUGE_CHARACTERS = 1_000_000
_NUM_HUGE = 2
"""Examples of each split that get a huge answer."""
_SPECIAL = ("nan", "inf", "-inf", "1e999", "NaN%", "null", "undefined", "0x")
_UNICODE = (
    "\0\a\x1b[2J\x7f \u202egnp\u202c \u200b\u200d\ufeff a\u0301\u0327\u0489 \u0661\u0662\u0663 "
    "\uff11\uff12 \U0001f600\U0001f468\u200d\U0001f469 \U000e0041 \ufffd\uffff"
)
_REFUSALS = ("I don't know.", "I'm sorry, but I can't answer that.", "N/A", "None of the above.")
_REFUSED = re.compile(
    r"\b(un(answerable|known|clear|certain)|none|n/a|insufficient|not? (enough|sure|answer)"
    r"|((ca|do)n't|(can|do) ?not) (know|answer|tell|be))\b",
    re.IGNORECASE,
)
_WORDS = tuple(
    "amber basket copper dwelling ember fjord granite hollow island jungle kettle lantern marble "  # noqa: SIM905
    "nectar orchard pebble quiver ribbon saddle timber umbrella velvet willow yonder zephyr".split()
)
_TAG = re.compile(r"<([a-zA-Z_][\w-]*)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownExample:
    """One example as the policy sees it."""

    split: Split
    index: int
    example: Example
    opening: tuple[Message, ...]
    gold: tuple[str, ...]
    """The gold answer, one reply for each turn; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One rollout to play: an example and the policy's replies."""

    asked: ShownExample
    kind: str
    replies: tuple[str, ...]

    @property
    def key(self) -> str:
        """A name of the try that is the same in every process."""
        return f"{self.asked.split}/{self.asked.index}/{self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The text around an answer."""

    before: str
    after: str

    def holding(self, content: str) -> str:
        """Return an answer of this form."""
        return f"{self.before}{content}{self.after}"


def form_of(asked: Sequence[ShownExample]) -> Form:
    """Return the form that gold answers share, else the tags or box that the prompt asks for."""
    golds = sorted({one.gold[-1] for one in asked if one.gold})
    if len(golds) >= 3:
        before = _common_start(golds)
        after = _common_start([gold[len(before) :][::-1] for gold in golds])[::-1]
        # Digits and letters that all answers happen to share are content, not form.
        before, after = re.sub(r"\w+$", "", before), re.sub(r"^\w+", "", after)
        if before.strip() or after.strip():
            return Form(before=before, after=after)
    shown = "\n".join(message.content for one in asked[:1] for message in one.opening)
    tags = [tag for tag in _TAG.findall(shown) if f"</{tag}>" in shown and tag != "tool_call"]
    if tags:
        return Form(before=f"<{tags[-1]}>", after=f"</{tags[-1]}>")
    return Form(before="\\boxed{", after="}") if "\\boxed" in shown else Form(before="", after="")


def _common_start(texts: Sequence[str]) -> str:
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def tries_of(asked: Sequence[ShownExample]) -> Iterator[Try]:
    """Yield every rollout to play, example by example."""
    form = form_of(asked)
    # Where some questions have no answer, saying so is right.
    may_refuse = any(_REFUSED.search(gold) for one in asked for gold in one.gold[-1:])
    for position, one in enumerate(asked):
        said: dict[str, tuple[str, ...]] = {
            kind: (text,) for kind, text in _texts(one, form, position).items()
        }
        if one.gold:
            said[GOLD] = one.gold
        if not may_refuse:
            refusal = _REFUSALS[position % len(_REFUSALS)]
            said |= {"refusal": (refusal,), "refusal_in_form": (form.holding(refusal),)}
        other = _other_gold(asked, position)
        if other:
            said["other_gold"] = other
        for kind, replies in said.items():
            yield Try(asked=one, kind=kind, replies=replies)


def _texts(one: ShownExample, form: Form, position: int) -> dict[str, str]:
    rng = random.Random(f"{one.example.id}/words")
    words = " ".join(rng.choices(_WORDS, k=12))
    texts = {
        "empty": "",
        "whitespace": " \n\t \r\n",
        "echo": next((m.content for m in reversed(one.opening) if m.role == "user"), ""),
        "random_words": words,
        "unicode": _UNICODE,
        "unicode_in_form": form.holding(_UNICODE),
        "special_value": form.holding(_SPECIAL[position % len(_SPECIAL)]),
        "form_alone": form.holding(""),
        "form_of_dots": form.holding("..."),
    }
    if one.index < _NUM_HUGE:
        noise = f"the answer is {words} 1234567890 ({{[<\\\"'>]}})\n"
        repeats = HUGE_CHARACTERS // len(noise) + 1
        texts["huge"] = (noise * repeats)[:HUGE_CHARACTERS]
        texts["huge_number"] = form.holding("9" * HUGE_CHARACTERS)
    return texts


def _other_gold(asked: Sequence[ShownExample], position: int) -> tuple[str, ...]:
    """Return the gold answer of the next example whose gold answer is different."""
    one = asked[position]
    own = one.gold[-1:] or (one.example.answer,)
    for step in range(1, len(asked)):
        other = asked[(position + step) % len(asked)]
        gold = other.gold or ((other.example.answer,) if other.example.answer else ())
        if gold and gold[-1:] != own and other.example.answer != (one.example.answer or None):
            return gold
    return ()
