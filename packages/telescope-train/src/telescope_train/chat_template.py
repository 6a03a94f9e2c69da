"""Where a model's chat template comes from, and what it says of replies. Imports no transformers.

What a template does to turns that were sampled is tried at the start of a run, in
`inference.probe`: that takes the model's tokenizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from telescope_core.errors import ConfigError
from telescope_train.config.schema import ModelSection
from telescope_train.inference.formats import choose_format

_SHIPPED = Path(__file__).parent / "models" / "chat_templates"
SHIPPED_MARKS = {"chatml-keeps-thinking": ("<|im_start|>", "<|im_end|>")}
"""Shipped template -> tokens that a model must have for it."""


def read_chat_template(name: str) -> str:
    """Return the Jinja text of the file `name`, or of the shipped template of that name."""
    shipped = {path.stem: path for path in _SHIPPED.glob("*.jinja")}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise ConfigError(
            f"chat_template must be a Jinja file or a shipped template "
            f"({', '.join(sorted(shipped))}), got {name!r}"
        )
    return path.read_text(encoding="utf-8")


def require_thinking_choice(model: ModelSection, template: str) -> None:
    """Raise ConfigError when `enable_thinking` is set and the template does not ask for it."""
    if model.enable_thinking is not None and "enable_thinking" not in template:
        raise ConfigError(
            "model.enable_thinking has no effect: the model's chat template does not ask for it; "
            "remove it"
        )


def template_problems(model: ModelSection) -> Iterator[str]:
    """Yield why the chat template cannot be used, as far as files on this machine tell."""
    try:
        template = _template_here(model)
        if template is not None:
            require_thinking_choice(model, template)
    except ConfigError as error:
        yield str(error)
        return
    if template == "":
        yield f"model {model.model!r} has no chat template; set chat_template to the path of one"


def how_replies_are_read(model: ModelSection) -> str:
    """Return it in words; raises ConfigError where a setting names what there is not."""
    try:
        template = _template_here(model)
    except ConfigError:
        template = None
    settings = (model.tool_call_parser, model.reasoning_parser)
    if template is None and "auto" in settings:
        return "thinking and tool calls as the chat template shows, once it is there"
    form = choose_format(template or "", tool_call_parser=settings[0], reasoning_parser=settings[1])
    return f"thinking as {form.reasoning.name}, tool calls as {form.tool_calls.name}"


def _template_here(model: ModelSection) -> str | None:
    """Return the template, "" where the model has none, None where that is not known yet."""
    if model.chat_template is not None:
        return read_chat_template(model.chat_template)
    folder = Path(model.model).expanduser()
    single = folder / "chat_template.jinja"
    if single.is_file():
        return single.read_text(encoding="utf-8")
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _in_config(config)


def _in_config(config: Any) -> str:
    """Older tokenizers keep the template in their config, some several of them by name."""
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        return "\n".join(str(one.get("template", "")) for one in template)
    return template if isinstance(template, str) else ""
