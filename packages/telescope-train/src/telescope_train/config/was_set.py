"""Whether the user gave a setting: one that has no effect is refused only then."""

from pydantic import BaseModel


def was_set(section: BaseModel, field: str) -> bool:
    """Return whether `field` was given a value in a file or by a flag."""
    return field in section.model_fields_set and getattr(section, field) is not None
