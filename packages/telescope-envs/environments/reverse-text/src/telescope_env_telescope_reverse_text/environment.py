"""`ReverseText`: write a text backwards; the longest part in common with the right one counts."""

import random
import re
from difflib import SequenceMatcher
from typing import Annotated

from pydantic import Field

from telescope_core import (
    EnvironmentConfig,
    Example,
    ExampleSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    SplitSource,
    metric,
    reward,
)
from telescope_core.parsers import without_thinking
from telescope_env_telescope_reverse_text.sentences import sentence

DEFAULT_INSTRUCTION = (
    "Write this text backwards, letter by letter, so that its last letter comes first. Put it "
    "between <reversed> and </reversed>."
)
FREE_SHARE = 0.25
"""A common part up to this share of the text earns nothing: other texts have as much."""
_ANSWER = re.compile(r"<reversed>([^<]*)</reversed>")
_MAX_COMPLETION = 100_000


class ReverseText(SingleTurnEnvironment):
    """Write a short text backwards, letter by letter."""

    class Config(EnvironmentConfig):
        """Which texts are drawn and how they are asked."""

        num_sentences: Annotated[int, Field(ge=1, le=8)] = 1
        """How long the text is; a sentence has about 60 characters."""
        instruction: str = DEFAULT_INSTRUCTION
        """Stands before the text; empty asks with the text alone, and the whole completion is the
        answer."""
        seed: int = 0

    config: Config

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct texts; a hash of the text decides its split."""
        return SplitSource(self._draw, split=split, seed=f"reverse-text/{self.config.seed}")

    def _draw(self, rng: random.Random) -> Example:
        text = " ".join(sentence(rng) for _ in range(self.config.num_sentences))
        prompt = f"{self.config.instruction}\n\n{text}" if self.config.instruction else text
        return Example(id=text, prompt=prompt, answer=text[::-1])

    def gold_answer(self, example: Example) -> str:
        """Return the reversed text, in tags where the instruction asks for them."""
        has_tags = "<reversed>" in self.config.instruction
        return f"<reversed>{example.answer}</reversed>" if has_tags else example.answer

    @reward
    def common_part(self, rollout: Rollout, example: Example) -> float:
        """The longest part in common with the reversed text, beyond what any text has; 0 to 1."""
        share = common_share(self._said(rollout), example.answer)
        return max(0.0, (share - FREE_SHARE) / (1.0 - FREE_SHARE))

    @metric(low=0, high=1)
    def exact(self, rollout: Rollout, example: Example) -> float:
        """1 when nothing is missing or wrong."""
        return float(self._said(rollout) == example.answer)

    def _said(self, rollout: Rollout) -> str:
        tail = without_thinking(rollout.completion_text)[-_MAX_COMPLETION:]
        if "<reversed>" not in self.config.instruction:
            return tail.strip()
        tagged = _ANSWER.findall(tail)
        return tagged[-1].strip() if tagged else ""


def common_share(said: str, wanted: str) -> float:
    """Return the length of the longest common part, divided by the length of the longer text."""
    longest = max(len(said), len(wanted))
    # Beyond this length the share is below the free one, and need not be computed.
    if not said or len(said) * FREE_SHARE > len(wanted):
        return 0.0
    part = SequenceMatcher(None, said, wanted, autojunk=False).find_longest_match()
    return part.size / longest
