"""The table of templates in the documentation is what the scenarios show."""

from pathlib import Path

import pytest
from tests.train.chat.templates.counterparts import COUNTERPARTS, UNCOMPARED
from tests.train.chat.templates.newer_families import ALL_FAMILIES

PAGE = Path(__file__).parents[4] / "docs/explanation/token-exactness.md"
HEAD = (
    "| template | calls | thinking read as | answers | calls and results | thinking | thinking "
    "and calls | published template |\n|---|---|---|---|---|---|---|---|"
)


def table() -> str:
    """What `test_families` holds each family to, as a table."""
    rows = []
    for family in ALL_FAMILIES:
        form = family.renderer().format
        names = ("multi", "tools", "thinking", "thinking tools")
        counts = [str(family.chains.get(name, "")) for name in names]
        compared = {**UNCOMPARED, **COUNTERPARTS}[family.name].text
        rows.append(f"| {' | '.join([family.name, form.tool_calls.name, form.reasoning.name])} | "
                    f"{' | '.join(counts)} | {compared} |")  # fmt: skip
    return "\n".join([HEAD, *rows])


@pytest.mark.slow
def test_the_table_of_templates_is_true():
    assert table() in PAGE.read_text()
    assert len({family.template for family in ALL_FAMILIES}) >= 12


def test_every_family_is_compared_or_it_is_said_why_not():
    assert {*COUNTERPARTS, *UNCOMPARED} == {family.name for family in ALL_FAMILIES}
    assert not {*COUNTERPARTS} & {*UNCOMPARED}
