"""Messages for addresses of missing pages, and for unknown fields of rollouts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from urllib.parse import quote

from telescope_core.base.errors import unknown_name

_TOP = ("compare", "difference", "runs", "evals")
_OF_RUN = (
    *("rollouts", "groups", "examples", "timeline", "infra", "evals", "logs"),
    "config",
)


def no_page(path: str) -> str:
    """Return that there is no page at `path`, with similar pages."""
    first, _, below = path.strip("/").partition("/")
    run, _, rest = below.partition("/")
    kind = rest.partition("/")[0]
    if first == "runs" and kind and kind not in _OF_RUN:
        where = f"/runs/{quote(run, safe='')}"
        return str(unknown_name("page", kind, _OF_RUN, f"(of a run; its first page is {where})"))
    if first in _TOP:
        return f"there is no page at {path}; / lists the runs, and leads to all others"
    return str(unknown_name("page", first, _TOP, "(/ lists the runs)"))


def unfit(
    asked: Mapping[str, Sequence[str]],
    choices: Mapping[str, Collection[str]],
) -> Iterator[str]:
    """Yield a sentence for each requested value that nothing has.

    `choices` are the values that there are; a name without any is passed over.
    """
    for name, values in asked.items():
        known = choices.get(name) or ()
        for value in values:
            if known and value not in known:
                yield str(unknown_name(name.replace("_", " "), value, known))


def unfit_steps(first: int | None, last: int | None, there: Mapping[str, int | None]) -> str | None:
    """Return a sentence if none of the steps from `first` to `last` exists yet."""
    known = there["first"], there["last"]
    if known[0] is None or known[1] is None:
        return None
    is_after = first is not None and first > known[1]
    is_before = last is not None and last < known[0]
    if not is_after and not is_before:
        return None
    return f"steps {known[0]} to {known[1]} have ended, so none of those that were asked for"
