"""Build an environment from its class, and check the result before it is played."""

import inspect
from typing import Any, cast

from telescope_core.base.code_places import is_authors, location_of, raised_at
from telescope_core.base.errors import (
    CodeExitError,
    EnvironmentLoadError,
    StrayCancelError,
    TelescopeError,
)
from telescope_core.environments.attribute_checks import check_built
from telescope_core.environments.author_errors import contained
from telescope_core.environments.class_checks import class_location


def built(cls: type, config: object) -> Any:
    """Return `cls(config)`; any error of its constructor becomes an EnvironmentLoadError."""
    constructor: Any = cls.__init__
    where = location_of(constructor) if is_authors(constructor) else class_location(cls)
    try:
        inspect.signature(constructor).bind(None, config)
    except TypeError:
        takes = ", ".join(inspect.signature(constructor).parameters)
        raise EnvironmentLoadError(
            f"{where} must take (self, config=None), because it is called with the settings; it "
            f"takes ({takes}); make what it needs a field of Config"
        ) from None
    try:
        with contained():
            return cls(config)
    except (CodeExitError, StrayCancelError) as error:
        raise EnvironmentLoadError(f"{where}: {error}") from error
    except TelescopeError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
        raise EnvironmentLoadError(f"{where} raised {text}{raised_at(error)}") from error


def require_built(environment: Any, *, known: set[str]) -> None:
    """Raise EnvironmentLoadError when `environment` cannot be played as it was built."""
    cls = cast(type[Any], type(environment))
    where = class_location(cls)
    if "config" not in vars(environment):
        constructor: Any = cls.__init__
        raise EnvironmentLoadError(
            f"{location_of(constructor)} must begin with super().__init__(config), which sets "
            "self.config and what else playing needs"
        )
    for one in (*environment.score_functions, *environment.hooks):
        if one.name in vars(environment):
            raise EnvironmentLoadError(
                f"{where}: self.{one.name} is set, which hides the {one.kind} of that name; "
                "rename one of the two"
            )
    check_built(environment, known=known, where=where)
