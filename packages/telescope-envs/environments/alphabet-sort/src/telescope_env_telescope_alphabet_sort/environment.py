"""`AlphabetSort`: names arrive turn by turn; each turn asks for all of them so far, in order."""

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Message,
    MultiTurnEnvironment,
    Rollout,
    Split,
    SplitSource,
    metric,
    reward,
)
from telescope_core.parsers import without_thinking
from telescope_env_telescope_alphabet_sort.names import Key, draw_names, in_order
from telescope_env_telescope_alphabet_sort.sequences import longest_common

MAX_ROUNDS = 8
_ANSWER = re.compile(r"<sorted>([^<]*)</sorted>")
_MAX_COMPLETION = 20_000


class AlphabetSort(MultiTurnEnvironment):
    """Keep a list of names in order by the alphabet while more names arrive."""

    class Config(EnvironmentConfig):
        """How many names there are, and how strictly their order is judged."""

        min_rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] = 2
        max_rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] = 3
        """In how many turns the names arrive."""
        min_names: Annotated[int, Field(ge=2, le=10)] = 3
        max_names: Annotated[int, Field(ge=2, le=10)] = 5
        """How many names arrive in a turn."""
        sort_by: Literal["first", "last", "mixed"] = "mixed"
        """By first name, by last name, or by either, as the example says."""
        power: Annotated[float, Field(gt=0, le=16)] = 4.0
        """The share of a list that is in order is raised to it."""
        seed: int = 0

        @model_validator(mode="after")
        def _ranges_in_order(self) -> Self:
            for what, low, high in (
                ("rounds", self.min_rounds, self.max_rounds),
                ("names", self.min_names, self.max_names),
            ):
                if low > high:
                    raise ValueError(f"min_{what} must be at most max_{what}, got {low} and {high}")
            return self

    config: Config
    max_turns = MAX_ROUNDS

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct lists; a hash of the names decides their split."""
        return SplitSource(self._draw, split=split, seed=f"alphabet-sort/{self.config.seed}")

    def _draw(self, rng: random.Random) -> Example:
        config = self.config
        num_rounds = rng.randint(config.min_rounds, config.max_rounds)
        sizes = [rng.randint(config.min_names, config.max_names) for _ in range(num_rounds)]
        by: Key = config.sort_by if config.sort_by != "mixed" else rng.choice(("first", "last"))
        names = draw_names(rng, sum(sizes))
        rounds = [names[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(num_rounds)]
        if any(part == in_order(part, by) for part in (rounds[0], names)):
            return self._draw(rng)  # repeating the names as they come must not be right
        text = f"{by}: {'; '.join(', '.join(part) for part in rounds)}"
        prompt = (
            f"Sort these names by {by} name, in the order of the alphabet. Write one name per "
            f"line between <sorted> and </sorted>. More names may follow.\n\n{_listed(rounds[0])}"
        )
        return Example(
            id=hashlib.sha256(text.encode()).hexdigest()[:16],
            prompt=prompt,
            info={"by": by, "rounds": rounds},
        )

    def env_response(self, messages: Sequence[Message], episode: Episode) -> str | None:
        """Return the next names; None when all were given."""
        rounds = _rounds(episode.example)
        num_said = sum(message.role == "assistant" for message in messages)
        if num_said >= len(rounds):
            return None
        return (
            "Add these names to all the names so far, and write the whole list again, sorted in "
            f"the same way, between <sorted> and </sorted>.\n\n{_listed(rounds[num_said])}"
        )

    def gold_answer(self, example: Example) -> list[str]:
        """Return the sorted list of each turn."""
        return [f"<sorted>\n{_listed(wanted)}\n</sorted>" for wanted in _wanted(example)]

    @reward
    def in_order(self, rollout: Rollout, example: Example) -> float:
        """The share in order to the power `power`, on average over all turns; 0 to 1."""
        shares = self._shares(rollout, example)
        return sum(share**self.config.power for share in shares) / len(shares)

    @metric(low=0, high=1)
    def last_share(self, rollout: Rollout, example: Example) -> float:
        """The share of the last list that is in order; 0 if it was not reached."""
        return self._shares(rollout, example)[-1]

    def _shares(self, rollout: Rollout, example: Example) -> list[float]:
        """Return the share in order of each turn, 0 for one that was not taken."""
        wanted = _wanted(example)
        said = [one.content for one in rollout.messages if one.role == "assistant"]
        said += [""] * (len(wanted) - len(said))
        return [
            share_in_order(read_list(text), names)
            for text, names in zip(said, wanted, strict=False)
        ]


def read_list(text: str) -> list[str]:
    """Return the lines of the last <sorted> list; empty if there is none."""
    tagged: list[str] = _ANSWER.findall(without_thinking(text)[-_MAX_COMPLETION:])
    lines = tagged[-1].splitlines() if tagged else list[str]()
    return [" ".join(line.split()) for line in lines if line.strip()]


def share_in_order(said: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the share of the longer list that is in `said` in the wanted order, 0 to 1."""
    if len(said) > 10 * len(wanted):
        return 0.0
    return longest_common(said, wanted) / max(len(said), len(wanted))


def _listed(names: Sequence[str]) -> str:
    return "\n".join(names)


def _rounds(example: Example) -> list[list[str]]:
    rounds = example.info["rounds"]
    assert isinstance(rounds, list | tuple), f"rounds of example {example.id}"
    return [[str(name) for name in part] for part in rounds if isinstance(part, list | tuple)]


def _wanted(example: Example) -> list[list[str]]:
    """Return the right list of each turn: all names so far, in order."""
    by: Key = "first" if example.info["by"] == "first" else "last"
    so_far: list[str] = []
    wanted: list[list[str]] = []
    for part in _rounds(example):
        so_far = in_order([*so_far, *part], by)
        wanted.append(so_far)
    return wanted
