"""Write rewards, losses, means of metrics and counts for people."""


def format_metric(value: float) -> str:
    """Return a reward, or the mean of a metric, as text in the style of `style_of`."""
    return f"{value:{style_of(value)}}"


def style_of(*values: float | None) -> str:
    """Return how to write numbers that stand together: with three decimals, or three digits.

    Digits are for numbers of which three decimals would show nothing, or fill lines. None is left
    out.
    """
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return ".3f" if largest == 0 or 0.01 <= largest < 1e6 else ".3g"


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts: 1 example, 2,000 examples."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """Return a noun for `number` things: example, examples."""
    return noun if number == 1 else f"{noun}s"
