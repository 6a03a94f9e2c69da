"""What commands say of settings files that are missing, and of flags that are no settings."""

from collections.abc import Sequence

from telescope_core.base.errors import ConfigError

SMALLEST_RUN = """\
[run]
name = "first"
number_of_steps = 100

[model]
model = "Qwen/Qwen3-0.6B"

[[environments]]
name = "countdown"
"""
"""The smallest settings file of a run: what has no default."""
SMALLEST_SFT = """\
model = "Qwen/Qwen3-0.6B"
output = "taught"
dataset = "conversations.jsonl"
"""
"""The same of a supervised training, with what to learn."""


def no_settings_file(call: str, smallest: str) -> ConfigError:
    """Return the error for a command without the settings file that `call` names."""
    return ConfigError(
        f"expected a settings file, got none; write: telescope {call}\n\nThe smallest one holds "
        f"what has no default, such as:\n\n{smallest}"
    )


def require_no_dry_run(flags: Sequence[str]) -> None:
    """Raise ConfigError for another spelling of --dry-run, to which no setting is close."""
    for flag in flags:
        if flag.replace("-", "").replace("_", "") == "dryrun":
            raise ConfigError(f"unknown flag {flag!r}; did you mean '--dry-run'?")
