"""Find the chat template of a model, and what it shows about replies.

Imports no transformers. The check of a template on sampled turns is in `chat.probe`, at the start
of a run, because it requires the model's tokenizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from telescope_core.base.errors import ConfigError
from telescope_train.chat.formats import choose_format
from telescope_train.config.schema import ModelSection

_SHIPPED = Path(__file__).parent / "templates"
SHIPPED_MARKS = {
    "chatml-keeps-thinking": ("<|im_start|>", "<|im_end|>"),
    "deepseek-r1-keeps-thinking": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "</think>"),
}
"""Shipped template -> tokens that a model must have to use it."""


def read_chat_template(name: str) -> str:
    """Return the Jinja text of the shipped template `name`, of the file there, or `name` itself.

    A text with a Jinja expression or statement is taken as the template itself.
    """
    if "{{" in name or "{%" in name:
        return name
    shipped = {path.stem: path for path in _SHIPPED.glob("*.jinja")}
    path = shipped.get(name, Path(name).expanduser())
    if not path.is_file():
        raise ConfigError(
            f"chat_template must be a Jinja file, the text of a template, or a shipped template "
            f"({', '.join(sorted(shipped))}), got {name!r}"
        )
    return path.read_text(encoding="utf-8")


def require_thinking_choice(model: ModelSection, template: str) -> None:
    """Raise ConfigError if `enable_thinking` is set but the template does not read it."""
    if model.enable_thinking is not None and "enable_thinking" not in template:
        raise ConfigError(
            "model.enable_thinking has no effect: the model's chat template does not read it; "
            "remove it"
        )


def template_problems(model: ModelSection) -> Iterator[str]:
    """Yield the reasons why the chat template cannot be used, as far as local files show."""
    try:
        template = _template_here(model)
        if template is not None:
            require_thinking_choice(model, template)
    except ConfigError as error:
        yield str(error)
        return
    if template == "":
        yield (
            f"model {model.model!r} has no chat template; set chat_template to the path of a "
            "template, or to its text"
        )


def how_replies_are_read(model: ModelSection) -> str:
    """Describe how replies are read; raises ConfigError if a setting names an unknown parser."""
    try:
        template = _template_here(model)
    except ConfigError:
        template = None
    settings = (model.tool_call_parser, model.reasoning_parser)
    if template is None and "auto" in settings:
        return "thinking and tool calls as the chat template shows, once it is available"
    form = choose_format(template or "", tool_call_parser=settings[0], reasoning_parser=settings[1])
    return f"thinking as {form.reasoning.name}, tool calls as {form.tool_calls.name}"


def _template_here(model: ModelSection) -> str | None:
    """Return the template; "" if the model has none, None if that is not known yet."""
    if model.chat_template is not None:
        return read_chat_template(model.chat_template)
    return template_in(Path(model.model).expanduser())


def template_in(folder: Path) -> str | None:
    """Return the chat template of a model folder; "" if it has none, None if it cannot be read."""
    single = folder / "chat_template.jinja"
    if single.is_file():
        return single.read_text(encoding="utf-8")
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _in_config(config)


def _in_config(config: Any) -> str:
    """Return the template in a tokenizer's config, where older models keep one or several."""
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        return "\n".join(str(one.get("template", "")) for one in template)
    return template if isinstance(template, str) else ""


def template_text(tokenizer: Any) -> str:
    """Return the chat template of `tokenizer`; if it has several, return all of them joined."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())
