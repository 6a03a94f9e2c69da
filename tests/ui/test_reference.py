"""The reference of addresses names all that an answer holds."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

RUN = "/runs/first"
ADDRESSES = Path(__file__).parents[2] / "docs" / "reference" / "ui-addresses.md"
SECTIONS = re.split(r"^## ", ADDRESSES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
OF_OTHERS = {
    *("choices", "columns", "environments", "golden_answers", "latest", "metrics", "pass_at"),
    *("quantiles", "result", "rewards", "run", "summary", "tags", "values", "versions"),
}
"""Objects whose names come from a run, or are documented where they are written."""
OF_SECTIONS = {"curves", "messages", "prompt", "row", "titles", "verdict", "versus"}
"""Objects that are documented in the section of another page."""


@pytest.mark.parametrize(
    ("section", "addresses"),
    [
        ("`/`", ["/"]),
        ("`/runs/{run}`", [RUN]),
        (
            "`/runs/{run}/rollouts`",
            [f"{RUN}/rollouts", f"{RUN}/rollouts?distribution=reward", f"{RUN}/rollouts?q=says"],
        ),
        ("One rollout", [f"{RUN}/rollouts/2.0/1/1"]),
        ("Groups and examples", [f"{RUN}/groups/2.0", f"{RUN}/examples/math/e1"]),
        ("`/runs/{run}/timeline`", [f"{RUN}/timeline"]),
        ("`/runs/{run}/infra`", [f"{RUN}/infra"]),
        (
            "Evals",
            [f"{RUN}/evals{rest}" for rest in ("", "/math-after", "/math-after/rollouts?q=alert")],
        ),
        ("`/runs/{run}/logs`", [f"{RUN}/logs"]),
        ("`/runs/{run}/config`", [f"{RUN}/config"]),
        (
            "`/compare`",
            ["/compare?run=first&run=second", "/compare/examples?run=first&run=second"],
        ),
        ("`/difference`", ["/difference?left=first%2F2.0%2F1%2F1&right=second%2F2.0%2F1%2F1"]),
    ],
)
def test_every_name_in_an_answer_is_in_its_section_of_the_reference(ui, section, addresses):
    of_all = set(re.findall(r"\w+", "\n".join(SECTIONS)))
    own = [one for one in SECTIONS if one.startswith(("In general\n", "Pages\n", f"{section}\n"))]
    assert len(own) == 3
    known = set(re.findall(r"\w+", "\n".join(own)))
    for address in addresses:
        answer = ui.get(address)
        names = set(names_in(answer, OF_OTHERS | OF_SECTIONS))
        assert "page" in names
        assert words_of(names) <= known, address
        assert words_of(names_in(answer, OF_OTHERS)) <= of_all, address


def words_of(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in re.findall(r"\w+", name)}


def names_in(value: object, unread: set[str]) -> Iterator[str]:
    """Yield the names in an answer, those of columns included, but not names of the run's own.

    Of the objects called as in `unread`, only that name is yielded.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if "/" not in name:
                yield name
            if name == "columns":
                yield from (column for column in inner if "/" not in column)
            elif name not in unread:
                yield from names_in(inner, unread)
    elif isinstance(value, list):
        for one in value[:3]:
            yield from names_in(one, unread)
