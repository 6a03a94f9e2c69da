"""Names of settings, and the answers to names that are not settings.

A file of another system has many such names. They are answered together, in one message: the name
here, or why there is no such setting. A name may be recognized by its last parts (`optim.lr`). An
answer may be for a section: `critic.**` for everything in it, and `data.*` for its names without
answers of their own.
"""

import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import BaseModel

from telescope_core.base.errors import ConfigError, nearest, unknown_name
from telescope_core.base.types import JsonValue

KeyPath = tuple[str, ...]
FEW = 3
"""Unknown names that are answered one by one; more are grouped by answer."""
_WIDTH = 80
_TABLES = (dict, list, tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Every name in a schema, and other known names with an answer to each."""

    schema: type[BaseModel]
    sections: Mapping[str, type[BaseModel]]
    leaves: Mapping[str, KeyPath]
    """Leaf name -> (section, leaf), or (leaf,) for a setting outside any section."""
    tables: Mapping[str, Collection[str]]
    """Name of each list of tables, such as `environments` -> setting names of one entry."""
    foreign: Mapping[str, str]
    """Name in another system -> name here, with a remark after a colon."""
    refused: Mapping[str, str]
    """Name, or section with `.*` or `.**` -> why it is not a setting here, and what to do."""

    def annotation(self, path: KeyPath) -> object:
        """Return the type of the setting at `path`."""
        owner = self.sections[path[0]] if len(path) == 2 else self.schema
        return owner.model_fields[path[-1]].annotation

    def knows(self, path: KeyPath) -> bool:
        """Return whether there is a setting at `path`."""
        return self.leaves.get(path[-1]) == path

    def takes_tables(self, path: KeyPath) -> bool:
        """Return whether the setting at `path` is a table or a list."""
        kinds = {self.annotation(path), *typing.get_args(self.annotation(path))}
        return not {typing.get_origin(kind) or kind for kind in kinds}.isdisjoint(_TABLES)


class Unknown(NamedTuple):
    """A name that is not a setting."""

    origin: str
    """Its source: a file, or `flag --name` or `argument name=value` themselves."""
    place: str
    """Its place in a file, such as `items[0].nam`; empty for a flag."""
    path: KeyPath
    candidates: Collection[str] | None = None
    """Names for the search of the nearest one; None = those of its section, or all."""
    line: str = ""
    """Its line in a file, as the end of a sentence; empty = not known."""


class _Answer(NamedTuple):
    kind: Literal["here", "refused", "unknown"]
    text: str
    """Advice about this one name, as a sentence."""
    brief: str = ""
    """Short form of the advice for lists: the setting here, or the reason."""
    section: str = ""
    """Section to which the reason applies as a whole."""


def names_of(
    schema: type[BaseModel],
    leaves: Mapping[str, KeyPath],
    *,
    foreign: Mapping[str, str],
    refused: Mapping[str, str],
) -> Names:
    """Return the names of `schema`, whose settings are `leaves`."""
    models = {name: as_model(info.annotation) for name, info in schema.model_fields.items()}
    sections = {name: model for name, model in models.items() if model is not None}
    fields = [pair for owner in (schema, *sections.values()) for pair in owner.model_fields.items()]
    items = {name: item_model(info.annotation) for name, info in fields}
    return Names(
        schema=schema,
        sections=sections,
        tables={name: item.model_fields for name, item in items.items() if item is not None},
        leaves=leaves,
        foreign=foreign,
        refused=refused,
    )


def as_model(annotation: object) -> type[BaseModel] | None:
    """Return the type of a section; None for any other annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def item_model(annotation: object) -> type[BaseModel] | None:
    """Return the type of the entries of a list of tables; None for any other annotation."""
    arguments = typing.get_args(annotation)
    is_list = typing.get_origin(annotation) in (list, tuple)
    return as_model(arguments[0]) if is_list and arguments else None


def paths_below(path: KeyPath, value: JsonValue) -> Iterator[KeyPath]:
    """Yield the path of each unknown value in a table or in a list of tables."""
    tables = [value] if isinstance(value, Mapping) else []
    if isinstance(value, Sequence) and not isinstance(value, str):
        tables = [one for one in value if isinstance(one, Mapping)]
    inner = {key: found for table in tables for key, found in table.items()}
    if not inner:
        yield path
    for key, found in inner.items():
        yield from paths_below((*path, key), found)


def refusal(unknown: Sequence[Unknown], names: Names) -> ConfigError:
    """Return the error with an answer to every name in `unknown`, which is not empty."""
    answers = [(one, _answer(one, names)) for one in unknown]
    if len(answers) <= FEW:
        lines = (
            f"{one.origin}: {f'{one.place}: ' if one.place else ''}{answer.text}{one.line}"
            for one, answer in answers
        )
        return ConfigError("\n".join(dict.fromkeys(lines)))
    origins = dict.fromkeys(_source(one) for one in unknown)
    blocks = [
        _block(origin, [(one, answer) for one, answer in answers if _source(one) == origin])
        for origin in origins
    ]
    return ConfigError("\n".join(blocks))


def _source(one: Unknown) -> str:
    return one.origin if one.place else "flags"


def _block(origin: str, answers: Sequence[tuple[Unknown, _Answer]]) -> str:
    """Return the answers to the names of one file, or of the flags."""
    here = [f"{_shown(one)} -> {answer.brief}" for one, answer in answers if answer.kind == "here"]
    reasons: dict[str, dict[str, None]] = {}
    for one, answer in answers:
        if answer.kind == "refused":
            reasons.setdefault(answer.brief, {})[answer.section or _shown(one)] = None
    advice = "; write what you need under the names on the right" if here else ""
    named = (
        "1 name is no setting" if len(answers) == 1 else f"{len(answers)} names are not settings"
    )
    lines = [f"{origin}: {named} here{advice}"]
    lines += _listed("called otherwise, or in another section:", here)
    reasoned = [f"{', '.join(found)}: {reason}" for reason, found in reasons.items()]
    lines += _listed("without an equal here:", reasoned)
    rest = [_shown(one) for one, answer in answers if answer.kind == "unknown"]
    lines += _listed("not known:", [", ".join(rest)] if rest else [])
    return "\n".join(lines)


def _shown(one: Unknown) -> str:
    return one.place or one.origin.partition(" ")[2]


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    return [
        f"  {title}",
        *(
            line
            for item in items
            for line in textwrap.wrap(
                item,
                _WIDTH,
                initial_indent="    ",
                subsequent_indent="        ",
                break_on_hyphens=False,
                break_long_words=False,
            )
        ),
    ]


def _answer(one: Unknown, names: Names) -> _Answer:
    path, key = one.path, one.path[-1]
    # Longer ends of a path say more than its last part.
    ends = (path[start:] for start in range(len(path)))
    answer = _by_section(path, names, "**")
    answer = answer or next(filter(None, (_by_name(end, names, one) for end in ends)), None)
    answer = answer or _by_section(path, names, "*")
    if answer is None and len(path) > 1 and one.candidates is None:
        answer = _in_another_section(path, names)
    if answer is not None:
        return answer
    home = names.leaves.get(key) if one.candidates is not None else None
    if home is not None:
        place = f"in [{home[0]}]" if len(home) > 1 else "at the top of the file"
        text = f"{key!r} is a setting, but not of each entry; set it {place}"
        return _Answer("here", text, ".".join(home))
    for table, fields in names.tables.items():
        if key in fields and one.candidates is None:
            how = "set it there in a settings file"
            text = f"{key!r} is a setting of each [[{table}]] entry; {how}"
            return _Answer("here", text, f"{key} {_of_table(key, names, table)}")
    if len(path) > 1 and path[0] not in names.sections and one.candidates is None:
        # The section is what is not known, perhaps misspelled.
        return _Answer(
            "unknown", str(unknown_name("section", path[0], {*names.sections, *names.tables}))
        )
    return _Answer("unknown", str(unknown_name("setting", key, _candidates(one, names))))


def _by_name(end: KeyPath, names: Names, one: Unknown) -> _Answer | None:
    """Return the answer to a name by its last part."""
    key = ".".join(end)
    if key in names.refused:
        reason = names.refused[key]
        return _Answer("refused", f"{end[-1]!r} is no setting here: {reason}", reason)
    if key not in names.foreign:
        return None
    here, _, note = names.foreign[key].partition(": ")
    is_outside = here in names.leaves and here not in (one.candidates or ())
    of_table = "" if is_outside else _of_table(here, names, one.path[0])
    place = f"{here} {of_table}" if of_table else ".".join(names.leaves[here])
    where = f" ({of_table or place})" if place != here else ""
    text = f"unknown setting {end[-1]!r}; here it is called {here!r}{where}"
    if not note:
        return _Answer("here", text, place)
    return _Answer("here", f"{text}: {note}", f"{place} ({note})")


def _of_table(field: str, names: Names, first: str) -> str:
    table = next(one for one in (first, *names.tables) if field in names.tables.get(one, ()))
    return f"of each [[{table}]] entry"


def _by_section(path: KeyPath, names: Names, stars: str) -> _Answer | None:
    """Return the answer to a section on the path, outermost first."""
    for depth in range(1, len(path)):
        for start in range(depth):
            reason = names.refused.get(f"{'.'.join(path[start:depth])}.{stars}")
            if reason is not None:
                section = ".".join(path[:depth])
                text = f"there is no [{section}] here: {reason}"
                return _Answer("refused", text, reason, section if stars == "**" else "")
    return None


def _in_another_section(path: KeyPath, names: Names) -> _Answer | None:
    """Return the answer to a setting of this schema that is in the wrong place."""
    section, key = path[0], path[-1]
    home = names.leaves.get(key)
    if home is None:
        return None
    of_home = home[0]
    place = f"in [{of_home}]" if len(home) > 1 else "above the first [section]"
    if section in names.sections and len(path) == 2:
        text = f"{key!r} is a setting, but it does not belong to [{section}]; set it {place}"
    elif len(path) == 2 and of_home in nearest(section, names.sections):
        text = f"unknown setting {section!r}; did you mean {of_home!r}?"
    else:
        where = ".".join(path[:-1])
        text = f"there is no section [{where}] here, and {key!r} is a setting; set it {place}"
    return _Answer("here", text, ".".join(home))


def _candidates(one: Unknown, names: Names) -> Collection[str]:
    if one.candidates is not None:
        return one.candidates
    everything = [*names.leaves, *names.sections]
    if len(one.path) == 1 or one.path[0] not in names.sections:
        return everything
    close = nearest(one.path[-1], names.sections[one.path[0]].model_fields)
    return close or everything
