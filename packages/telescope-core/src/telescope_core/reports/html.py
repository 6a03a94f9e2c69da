"""HTML building blocks of a report: the page, facts, tables and figures."""

from collections.abc import Mapping, Sequence
from html import escape

from telescope_core.reports.style import NUM_COLORS, PAGE_STYLE


def page(title: str, parts: Sequence[str]) -> str:
    """Return a self-contained HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(part for part in parts if part) + "\n</main></body></html>\n"
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a row of facts from pairs of (value, name); a number stays on one line."""
    number = ' class="number"'
    cells = (
        f'<div class="fact"><b{"" if any(map(str.isalpha, value)) else number}>{escape(value)}</b>'
        f"<span>{escape(name)}</span></div>"
        for value, name in pairs
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def figure(title: str, chart: str, *, note: str = "") -> str:
    """Return a chart with its title, and `note` under the title."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{chart}</figure>"


def keys(entries: Sequence[tuple[str, int]]) -> str:
    """Return a legend from pairs of (text, color index)."""
    items = (
        f'<li><span class="key c{color % NUM_COLORS}"></span>{escape(text)}</li>'
        for text, color in entries
    )
    return f'<ul class="keys">{"".join(items)}</ul>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 1) -> str:
    """Return a table; columns after the first `num_text_columns` are aligned as numbers."""
    number = ' class="number"'

    def cells(kind: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{number if i >= num_text_columns else ''}>{escape(text)}</{kind}>"
            for i, text in enumerate(texts)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    header = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="scroll"><table>{header}<tbody>{body}</tbody></table></div>'


def flat_settings(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as pairs of (dotted name, value) in their order."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += flat_settings(value, f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                rows += flat_settings(item, f"{name}[{index}].")  # pyright: ignore[reportUnknownArgumentType]
        else:
            rows.append((name, "none" if value is None else str(value)))  # pyright: ignore[reportUnknownArgumentType]
    return rows
