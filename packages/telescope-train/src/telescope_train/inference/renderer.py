"""Messages to tokens and back, with the model's own tokenizer and chat template."""

from collections.abc import Sequence
from typing import Any

from telescope_core.errors import ConfigError
from telescope_core.types import JsonValue, Message
from telescope_train.config.schema import ModelSection
from telescope_train.models.load import load_stop_ids, load_tokenizer
from telescope_train.models.render import template_message

MAX_ENCODED = 1024
"""Texts whose tokens are remembered: a group's rollouts open with the same prompt."""


class Renderer:
    """Renders conversations exactly as the model's template writes them."""

    def __init__(
        self, tokenizer: Any, *, stop_token_ids: Sequence[int], chat_template: str | None = None
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template; set chat_template to a Jinja "
                "template, or use an instruction-tuned model"
            )
        if not stop_token_ids:
            raise ConfigError(
                "the model names no end-of-turn token; set eos_token_id in its "
                "generation_config.json, so that a completion can end"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.stop_token_ids = tuple(stop_token_ids)
        self._encoded: dict[str, list[int]] = {}
        self._stop_texts = [tokenizer.decode([token]) for token in stop_token_ids]

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
        add_generation_prompt: bool,
    ) -> str:
        """Return the template's text for `messages`."""
        return self._tokenizer.apply_chat_template(
            [template_message(message) for message in messages],
            tools=list(tools) or None,
            chat_template=self._chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    def encode(self, text: str) -> list[int]:
        """Tokenize rendered text; the template wrote the special tokens, so none is added."""
        token_ids = self._encoded.get(text)
        if token_ids is None:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.pop(next(iter(self._encoded)))
            self._encoded[text] = token_ids
        return list(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def bridge(
        self,
        messages: Sequence[Message],
        num_covered: int,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> str | None:
        """Return the text between a sampled end-of-turn token and the next completion.

        `messages[:num_covered]` ends with the sampled assistant message. None when the template
        rewrites that part once more messages follow: then tokens cannot be carried over.
        """
        before = self.text(messages[:num_covered], tools=tools, add_generation_prompt=False)
        after = self.text(messages, tools=tools, add_generation_prompt=True)
        if not after.startswith(before):
            return None
        ends = [
            position + len(text)
            for text in self._stop_texts
            if (position := before.rfind(text)) >= 0
        ]
        return after[max(ends) :] if ends else None


def load_renderer(model: ModelSection) -> Renderer:
    """Return the renderer of the config's model."""
    tokenizer = load_tokenizer(
        model.model, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code
    )
    return Renderer(tokenizer, stop_token_ids=load_stop_ids(model.model))
