"""The protocols that environments, locators, policies and trackers implement."""

from telescope_core.base.protocols import (
    EnvironmentClient,
    EnvironmentLocation,
    EnvironmentLocator,
    EnvironmentPlace,
    ExampleSource,
    PlayRequest,
    Policy,
    PolicySource,
    Tracker,
)

__all__ = [
    "EnvironmentClient",
    "EnvironmentLocation",
    "EnvironmentLocator",
    "EnvironmentPlace",
    "ExampleSource",
    "PlayRequest",
    "Policy",
    "PolicySource",
    "Tracker",
]
