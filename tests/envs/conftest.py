"""What these tests share with those of the Hub."""

from tests.hub.fixtures import (
    fresh_python,
    make_project,
    published,
    published_once,
    registry,
    registry_place,
    rewrite,
    toy_wheel,
)

__all__ = [
    "fresh_python",
    "make_project",
    "published",
    "published_once",
    "registry",
    "registry_place",
    "rewrite",
    "toy_wheel",
]
