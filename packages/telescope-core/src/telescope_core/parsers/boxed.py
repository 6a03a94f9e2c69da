r"""The answer in the last `\boxed{...}` of a text."""

_BOXES = ("\\boxed", "\\fbox")


def boxed_answer(text: str) -> str | None:
    r"""Return the stripped content of the last `\boxed{...}` or `\fbox{...}`; None without one.

    Braces inside may be nested, and `\{` and `\}` count as ordinary characters. `\boxed 5` boxes
    the next word. If the last box is not closed, the result is None even when earlier boxes are
    closed.
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
    """Return the text between the opening brace of `text` and its closing brace, or None."""
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
