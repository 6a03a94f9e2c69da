"""The types and the base class that the sections of the config share."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from telescope_core.base.addresses import without_brackets

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Dtype = Literal["float32", "bfloat16"]
Host = Annotated[str, Field(min_length=1), AfterValidator(without_brackets)]
"""A name or an address; one of IPv6 may have the brackets of a URL."""


class Section(BaseModel):
    """A frozen section. Unknown keys are refused. Docstrings of fields go into the reference."""

    # They are not read here (`use_attribute_docstrings`): that parses the source at each import.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


SomeSection = TypeVar("SomeSection", bound=BaseModel)


def decided(section: SomeSection, **values: object) -> SomeSection:
    """Return `section` with values that other settings decide; they do not count as set."""
    copied = section.model_copy(update=values)
    # `model_copy` adds the names of what it updates.
    return copied.model_construct(_fields_set={*section.model_fields_set}, **dict(copied))


def was_set(section: BaseModel, field: str) -> bool:
    """Return whether `field` was given a value in a file or by a flag."""
    return field in section.model_fields_set and getattr(section, field) is not None


class Redundant(str):
    """A setting with its value that has no effect, because the value applies anyway."""

    __slots__ = ()


def unused(
    section: BaseModel, name: str, why: str, *, holds: Collection[object] | None = None
) -> Iterator[str]:
    """Yield a problem if a setting without effect was given, as `name has no effect why`.

    `name` is the setting as messages call it; it ends in the name of the field. `holds` lists the
    values that apply anyway; None means the default. Such a value contradicts nothing, so it gives
    a `Redundant` instead of a problem.
    """
    field = re.findall(r"\w+", name)[-1]
    if not was_set(section, field):
        return
    if holds is None:
        info = type(section).model_fields[field]
        holds = [info.get_default(call_default_factory=True, validated_data={})]
    if getattr(section, field) in holds:
        written = section.model_dump(mode="json", include={field})[field]
        yield Redundant(f"{name} = {json.dumps(written)}")
    else:
        yield f"{name} has no effect {why}"


MOST_NAMED = 12
"""Most redundant settings in a note; a file with all defaults has many more."""


class Found(NamedTuple):
    """The results of the checks of settings."""

    problems: tuple[str, ...]
    redundant: tuple[str, ...]
    """Settings that were given without effect, each with its value."""

    @property
    def note(self) -> str:
        """A note about redundant settings; empty if there are none."""
        shown = ", ".join(self.redundant[:MOST_NAMED])
        rest = len(self.redundant) - MOST_NAMED
        more = f", and {rest} more" if rest > 0 else ""
        told = f"given, but changes nothing, because it holds without being set: {shown}{more}"
        return told if self.redundant else ""


def sorted_out(found: Iterable[str]) -> Found:
    """Return refused settings and redundant ones, each once."""
    messages = tuple(dict.fromkeys(found))
    return Found(
        problems=tuple(one for one in messages if not isinstance(one, Redundant)),
        redundant=tuple(one for one in messages if isinstance(one, Redundant)),
    )
