"""What a guess tells: one mark for each of its letters. Pure."""

from collections import Counter

RIGHT, ELSEWHERE, ABSENT = "G", "Y", "-"


def feedback(guess: str, hidden: str) -> str:
    """Return a mark per letter: G in its place, Y elsewhere in the word, - not in it (any more).

    Every letter of `hidden` is spent once, on its place first and then from the left: guessing
    `geese` for `elder` gives `-YY--`, for two e's and not three.
    """
    left = Counter(h for g, h in zip(guess, hidden, strict=True) if g != h)
    marks: list[str] = []
    for letter, true in zip(guess, hidden, strict=True):
        if letter == true:
            marks.append(RIGHT)
        elif left[letter]:
            left[letter] -= 1
            marks.append(ELSEWHERE)
        else:
            marks.append(ABSENT)
    return "".join(marks)


def progress(marks: str) -> float:
    """Return how much of the word a guess has found, 0 to 1; a letter elsewhere is half of one."""
    return (marks.count(RIGHT) + 0.5 * marks.count(ELSEWHERE)) / len(marks)
