"""Nim, a match of two seats: who takes the last stone wins.

    telescope eval ./examples/nim.py:Nim --base-url http://127.0.0.1:8000/v1

See docs/how-to/play-a-match.md.
"""

import re

from telescope_core import Example, ListSource, Split
from telescope_core.matches import MatchEnvironment


class Nim(MatchEnvironment):
    """Take 1 to 3 stones in turn; what is no move takes one."""

    seats = ("first", "second")
    system_prompt = "Take 1 to 3 stones in turn. Who takes the last one wins. Answer with a number."

    def examples(self, split):
        piles = range(4, 10) if split == Split.TRAIN else range(10, 13)
        return ListSource([Example(id=f"{n} stones", prompt="", info={"stones": n}) for n in piles])

    async def play_match(self, match):
        left, mover, other = match.example.info["stones"], "first", "second"
        while left:
            said = await match[mover].ask(f"{left} stones are left. How many do you take?")
            number = re.search(r"\d+", said)
            taken = int(number[0]) if number else 1
            taken = taken if 1 <= taken <= min(3, left) else 1
            left, mover, other = left - taken, other, mover
        return {mover: 0.0, other: 1.0}
