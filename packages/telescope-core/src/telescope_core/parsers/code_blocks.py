"""Find the code in a reply: the last fenced block, as models write it in Markdown."""

_FENCE = "```"
_LANGUAGES = ("", "python", "python3", "py")


def code_block(text: str) -> str | None:
    """Return the content of the last fenced block of Python, or without a language; None if none.

    Text after `</think>` is read, if there is such a mark. A block that was cut off goes on to the
    end of the text. The fence must begin its line, up to spaces, so that fences inside of strings
    of a program do not end it.
    """
    found: str | None = None
    language: str | None = None
    lines: list[str] = []
    for line in text.rpartition("</think>")[2].split("\n"):
        bare = line.strip()
        if language is None:
            if bare.startswith(_FENCE):
                language, lines = bare[len(_FENCE) :].strip().lower(), []
        elif bare == _FENCE:
            found = "\n".join(lines) if language in _LANGUAGES else found
            language = None
        else:
            lines.append(line)
    return "\n".join(lines) if language in _LANGUAGES else found
