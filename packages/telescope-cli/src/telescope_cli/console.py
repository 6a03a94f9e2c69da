"""Consoles of the commands: texts of others are escaped, and reports fit a narrow terminal."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from telescope_core.base.terminal import WIDTH, escaped, report_width

_UNLIMITED_WIDTH = 10_000


class EscapingConsole(Console):
    """A console that shows what a terminal would act on as text; its own styles stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render, with all text escaped."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escaped(segment.text)
            yield Segment(text, segment.style, segment.control)


def report_console() -> EscapingConsole:
    """Return a console for a report, of 80 columns or those of a narrower terminal."""
    console = EscapingConsole(highlight=False)
    console.width = report_width()
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table; if a narrow terminal would cut its numbers, print each row as a list."""
    head, *others = table.columns
    if console.width < WIDTH:
        for column in others:
            column.no_wrap = True
            column.min_width = max(_text(cell).cell_len for cell in (column.header, *column.cells))
        unlimited = console.options.update_width(_UNLIMITED_WIDTH)
        if Measurement.get(console, unlimited, table).minimum > console.width:
            for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
                console.print(Text.assemble(f"{head.header}: " if head.header else "", _text(name)))
                for column, cell in zip(others, cells, strict=True):
                    console.print(Text.assemble(f"  {column.header}: ", _text(cell)))
            return
    console.print(table)


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))
