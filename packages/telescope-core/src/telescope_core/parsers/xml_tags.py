"""Find answers in tags such as `<answer>42</answer>`.

Tags are found by text search, because models do not write valid XML.
"""

from collections.abc import Mapping, Sequence


def xml_tag(text: str, name: str) -> str | None:
    """Return the stripped content of the last complete `<name>...</name>`; None without one.

    When tags of the same name are nested, the innermost one counts.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)].strip()


def xml_fields(text: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return name -> content of the last tag of that name; names without a tag are left out."""
    found = {name: xml_tag(text, name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def follows_xml_format(text: str, names: Sequence[str]) -> bool:
    """Return whether `text` is exactly these tags, each once and in this order.

    Only whitespace may stand outside the tags. The content of the tags does not matter, so this
    can serve as a reward for the format alone.
    """
    rest = text
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        before, _, rest = rest.partition(opening)
        if before.strip() or closing not in rest:
            return False
        rest = rest.partition(closing)[2]
    return not rest.strip()
