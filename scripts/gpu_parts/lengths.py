"""An environment whose rewards differ for a model with random weights, so that it is trained."""

from typing import Any

from telescope_core import Example, SingleTurnEnvironment, reward


class Lengths(SingleTurnEnvironment):
    """Answer with few characters."""

    def draw(self, random: Any) -> Example:
        """Return a number to be asked for."""
        number = str(random.randint(0, 999))
        return Example(id=number, prompt=number, answer=number)

    @reward
    def short(self, completion: str) -> float:
        """Pay for each character that was not written."""
        return 1.0 / (1 + len(completion))
