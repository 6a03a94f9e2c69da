"""What all tests of the Hub share; more fixtures in fixtures.py, writers in projects.py."""

from tests.envs.fixtures import (
    fresh_python,
    home,
    make_project,
    packages_without_environments,
    published,
    published_once,
    registry,
    registry_place,
    rewrite,
    toy_wheel,
    without_environments,
)

__all__ = [
    "fresh_python",
    "home",
    "make_project",
    "packages_without_environments",
    "published",
    "published_once",
    "registry",
    "registry_place",
    "rewrite",
    "toy_wheel",
    "without_environments",
]
