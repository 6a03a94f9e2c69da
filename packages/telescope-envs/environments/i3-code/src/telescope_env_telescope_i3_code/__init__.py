"""I3 code: programming problems with hidden tests, which never enter the sandbox."""

from telescope_env_telescope_i3_code.environment import I3Code

__all__ = ["I3Code"]
