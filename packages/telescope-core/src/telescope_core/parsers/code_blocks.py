"""Find the code in a reply: the last fenced block, as models write it in Markdown."""

_LEAST_TICKS = 3
_LANGUAGES = ("", "python", "python3", "py")


def code_block(text: str) -> str | None:
    """Return the content of the last fenced block of Python, or without a language; None if none.

    Text after `</think>` is read, if there is such a mark. A block begins with a line of three or
    more backticks and ends with one of as many or more, as in CommonMark 0.31, 4.5; one that was
    cut off goes on to the end of the text.
    """
    found: str | None = None
    language: str | None = None
    fence = ""
    lines: list[str] = []
    for line in text.rpartition("</think>")[2].split("\n"):
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if language is None:
            if len(ticks) >= _LEAST_TICKS and "`" not in bare[len(ticks) :]:
                said = bare[len(ticks) :].lower().split()
                fence, language, lines = ticks, said[0] if said else "", []
        elif bare == ticks and len(ticks) >= len(fence):
            found = "\n".join(lines) if language in _LANGUAGES else found
            language = None
        else:
            lines.append(line)
    return "\n".join(lines) if language in _LANGUAGES else found
