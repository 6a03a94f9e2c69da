"""What commands say that got no settings file: the smallest one that works."""

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
