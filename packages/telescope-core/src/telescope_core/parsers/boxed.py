r"""The answer in the last `\boxed{...}` of a text."""

_BOXES = ("\\boxed", "\\fbox")


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last box, without spaces around it; None without a whole box.

    Braces inside may be nested, and `\{` and `\}` are characters. `\boxed 5` boxes up to the end
    of the word. A last box that is not closed is no answer, whatever boxes come before it.
    """
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    box = next(box for box in _BOXES if text.startswith(box, start))
    rest = text[start + len(box) :]
    inside = rest.lstrip(" ")
    if inside.startswith("{"):
        return _balanced(inside)
    words = inside.split(maxsplit=1) if rest.startswith(" ") else []
    return words[0].rstrip("$.,;") or None if words else None


def _balanced(text: str) -> str | None:
    """Return what stands between the opening brace of `text` and the one that closes it."""
    depth = 0
    is_escaped = False
    for end, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:end].strip()
    return None
