"""The reference of addresses names all that an answer holds."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = "/runs/first"
ADDRESSES = Path(__file__).parents[2] / "docs" / "reference" / "ui-addresses.md"
OF_OTHERS = {
    *("choices", "columns", "environments", "golden_answers", "latest", "metrics", "pass_at"),
    *("quantiles", "result", "rewards", "run", "summary", "tags", "values", "versions"),
}
"""Objects whose names come from a run, or are documented where they are written."""


@pytest.mark.parametrize(
    "address",
    [
        *("/", RUN, f"{RUN}/rollouts", f"{RUN}/rollouts?distribution=reward"),
        *(f"{RUN}/rollouts?q=says", f"{RUN}/rollouts/2.0/1/1", f"{RUN}/groups/2.0"),
        *(f"{RUN}/examples/math/e1", f"{RUN}/timeline", f"{RUN}/infra", f"{RUN}/evals"),
        *(f"{RUN}/evals/math-after", f"{RUN}/evals/math-after/rollouts?q=alert"),
        *(f"{RUN}/logs", f"{RUN}/config"),
        *("/compare?run=first&run=second", "/compare/examples?run=first&run=second"),
        "/difference?left=first%2F2.0%2F1%2F1&right=second%2F2.0%2F1%2F1",
    ],
)
def test_every_name_in_an_answer_is_in_the_reference(ui, address):
    known = set(re.findall(r"\w+", ADDRESSES.read_text()))
    names = set(names_in(ui.get(address)))
    assert "page" in names
    found = {word for name in names for word in re.findall(r"\w+", name)}
    assert found <= known


def names_in(value: object) -> Iterator[str]:
    """Yield the names in an answer, those of columns included, but not names of the run's own."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if "/" not in name:
                yield name
            if name == "columns":
                yield from (column for column in inner if "/" not in column)
            elif name not in OF_OTHERS:
                yield from names_in(inner)
    elif isinstance(value, list) and value:
        yield from names_in(value[0])
