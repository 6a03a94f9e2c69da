"""Convert gold answers of environments, or conversations of a dataset, into samples to learn.

A dataset is one of Hugging Face, a folder or a local file; its rows are checked one by one.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.messages import REASONING_FIELDS, message_from_json
from telescope_core.base.number_text import counted
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.secret_names import secrets_line
from telescope_core.base.solved import is_solved
from telescope_core.base.types import Message, Rollout, RolloutStatus, Split, Tools
from telescope_core.examples.checks import require_whole
from telescope_core.examples.dataset_source import DatasetSpec, Row, Table, load_table
from telescope_core.examples.rows import without_nulls
from telescope_core.open import open_environment
from telescope_train.batches.batch import TrainingSample
from telescope_train.chat.supervised import RenderedConversation, render_conversations
from telescope_train.models.hub import Kind, look_on_hub
from telescope_train.sft.config import SftConfig, SftEnvironment

_ROLES = ("system", "user", "assistant", "tool")
_WEIGHT = "weight"
"""Key of an assistant message: 0 = it is not learned, 1 = it is, as without the key."""
_LOST = (
    *("function_call", "refusal", "audio", "reasoning_details", "thoughts"),
    *("train", "training", "train_detail", "trainable", "learn", "learnable"),
    *("loss", "loss_mask", "loss_scale", "loss_weight", "mask", "masked"),
)
"""Keys of other formats that hold a part of the answer, or say whether it is learned. Others, such
as an id or a score, say something about it."""
_EMPTY = (None, "", [], {})
_TOOLS = "tools"
"""Column with the tools that were offered, by the name that other trainers give it."""
_TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column in which other trainers take variables of the chat template."""
_SEEN = ("images", "image", "videos", "video", "audios")
"""Columns in which other trainers take what stands in a text as `<image>`."""
_PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    *(("instruction", "input", "output"), ("instruction", "output"), ("instruction", "response")),
)
"""Columns of other formats that hold a question, in one or two parts, and at last its answer."""
_CONVERSATIONS = "conversations"
"""Column of recorded rollouts with what an agent or several players said to the policy."""
NUM_GOLDS = 8192
"""Number of gold answers that are learned, unless set."""
_CONCURRENT_GOLDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row of the dataset."""

    label: str
    """Name of the row in error messages."""
    messages: tuple[Message, ...]
    tools: Tools
    """The functions that were offered in it, in the form of the chat API."""
    learnt: frozenset[int]
    """Places in `messages` of the assistant's messages to learn; the last message is one."""


def read_conversations(config: SftConfig) -> list[Conversation]:
    """Return all conversations of the dataset; raises ConfigError that names a row without one."""
    conversations: list[Conversation] = []
    table = _load(config)
    for number, row in enumerate(table, start=1):
        label = f"row {number} of {config.dataset}"
        _require_chat(row, config.messages_field, label)
        chat, offered = row[config.messages_field], row.get(_TOOLS)
        if not isinstance(table, list):
            # The columns of a table have one type: its rows get the keys of all others, as nulls.
            chat, offered = without_nulls(chat), without_nulls(offered)
        if without_nulls(row.get(_TEMPLATE_ARGUMENTS)) not in _EMPTY:
            raise ConfigError(
                f"{label}: has {_TEMPLATE_ARGUMENTS!r} = {_shown(row[_TEMPLATE_ARGUMENTS])}, which "
                "is not read; remove the column, and set chat_template to a template that has "
                "these values as its defaults"
            )
        if seen := next((name for name in _SEEN if row.get(name)), None):
            raise ConfigError(
                f"{label}: has a column {seen!r} that is not empty, and models are trained on text "
                "alone here; remove such rows, or the column if the messages do not speak of it"
            )
        tools = _tools(offered, label)
        # Another column than that of a record was chosen by a person.
        several = row.get(_CONVERSATIONS) if config.messages_field == "messages" else None
        conversations += [
            Conversation(label=where, messages=messages, tools=tools, learnt=learnt)
            for where, messages, learnt in _learned(chat, several, label)
        ]
    return conversations


def _require_chat(row: Row, field: str, label: str) -> None:
    """Raise ConfigError for a row without the column `field`, or with a pair of texts instead."""
    if not row:
        raise ConfigError(f"{label} is empty; remove it")
    is_missing = field not in row
    pair = next((one for one in _PAIRS if row.keys() >= set(one)), None)
    # The question alone, which a person chose among the columns.
    if pair is not None and (is_missing or (field in pair and not _has_answer(row[field]))):
        *asked, answer = (f"row[{name!r}]" for name in pair)
        parts = (
            (row[pair[0]], "user", " + '\\n' + ".join(asked)),
            (row[pair[-1]], "assistant", answer),
        )
        chat = " + ".join(
            text if isinstance(value, list) else f"[{{'role': {role!r}, 'content': {text}}}]"
            for value, role, text in parts
        )
        raise ConfigError(
            f"{label} has {' and '.join(map(repr, pair))} instead of a conversation; give it a "
            f"column of messages, in Python row['messages'] = {chat}, and let messages_field be "
            "'messages'"
        )
    if is_missing:
        raise ConfigError(
            f"{label} has no column {field!r}; set messages_field to one of its columns: "
            f"{', '.join(sorted(row))}"
        )


def _has_answer(chat: Any) -> bool:
    """Return whether `chat` is a conversation with a message of the assistant."""
    return isinstance(chat, list) and any(
        isinstance(one, Mapping) and one.get("role") == "assistant" for one in chat
    )


def _learned(
    chat: Any, several: Any, label: str
) -> Iterator[tuple[str, tuple[Message, ...], frozenset[int]]]:
    """Yield label, messages and places to learn of each conversation in a row.

    `several`: conversations of the agent or the players of a recorded rollout, in which the policy
    answered; `chat` is then what a reward reads. Answers that several begin with are learned once.
    """
    if not isinstance(several, list) or not isinstance(next(iter(several), None), list):
        yield (label, *_messages(chat, label))
        return
    known = set[tuple[Message, ...]]()
    for number, one in enumerate(several, start=1):
        if not any(message.get("role") == "assistant" for message in one):
            continue  # a request that was not answered
        where = f"{label}, conversation {number}"
        messages, ends = _messages(one, where)
        new = frozenset(end for end in ends if messages[: end + 1] not in known)
        known |= {messages[: end + 1] for end in new}
        if new:
            yield where, messages, new


def _load(config: SftConfig) -> Table:
    assert config.dataset is not None, "settings without a dataset have environments"
    spec = DatasetSpec(
        path=config.dataset,
        revision=config.dataset_revision or "main",
        subset=config.dataset_subset or "",
    )
    if spec.local is None:
        look_on_hub(Kind.DATASET, config.dataset)
    try:
        return load_table(spec, config.dataset_split)
    except EnvironmentLoadError as error:
        raise ConfigError(f"dataset {config.dataset!r} cannot be read: {error}") from error


def _messages(row: Any, label: str) -> tuple[tuple[Message, ...], frozenset[int]]:
    """Return the conversation in `row`, up to the last turn to learn, and the places of these."""
    if not isinstance(row, Sequence) or isinstance(row, str) or not row:
        raise ConfigError(f"{label}: expected a list of messages, got {_shown(row)}")
    messages = tuple(_message(fields, label) for fields in row)
    ends = [
        index
        for index, (one, fields) in enumerate(zip(messages, row, strict=True))
        if one.role == "assistant" and _is_learnt(one, fields, f"{label}, message {index}")
    ]
    if not ends:
        raise ConfigError(
            f"{label}: has no assistant message, or only those of weight 0, so nothing can be "
            "learned from it; remove the row"
        )
    if ends[0] == 0:
        raise ConfigError(
            f"{label}: begins with an assistant message that answers nothing; remove that message, "
            "or put another message before it"
        )
    return messages[: ends[-1] + 1], frozenset(ends)


def _is_learnt(message: Message, fields: Mapping[str, Any], where: str) -> bool:
    """Return whether an assistant message is learned.

    Raises ConfigError for what would be lost, and if there is nothing to learn.
    """
    for key in _LOST:
        if fields.get(key) not in _EMPTY:
            raise ConfigError(
                f"{where}: has {key!r} = {_shown(fields[key])}, which is not read; remove the key, "
                f"or put its value under content, tool_calls, {', '.join(REASONING_FIELDS)} or "
                f"{_WEIGHT} (0 = not learned)"
            )
    weight = fields.get(_WEIGHT)
    if weight not in (None, 0, 1):
        raise ConfigError(
            f"{where}: expected a weight of 0 (not learned) or 1 (learned), got {_shown(weight)}; "
            "turns are learned whole or not at all"
        )
    if weight == 0:
        return False
    if fields.get("content") is None and not message.tool_calls and not message.reasoning:
        raise ConfigError(
            f"{where}: has no content, no tool calls and no thinking, so the model would learn to "
            f"say nothing; write its text under content, give it {_WEIGHT} 0, or remove the row"
        )
    return True


def _message(fields: Any, label: str) -> Message:
    if isinstance(fields, Mapping) and "role" not in fields and {"from", "value"} <= fields.keys():
        raise ConfigError(
            f"{label}: expected messages with role and content, got 'from' and 'value' in "
            f"{_shown(fields)}; write them anew, in Python {{'role': {{'human': 'user', 'gpt': "
            "'assistant'}.get(m['from'], m['from']), 'content': m['value']} for each message m"
        )
    if not isinstance(fields, Mapping) or fields.get("role") not in _ROLES:
        raise ConfigError(
            f"{label}: expected messages with a role of {', '.join(_ROLES)} and a content, "
            f"got {_shown(fields)}"
        )
    content = fields.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"{label}: expected text as content, got {_shown(content)}")
    if content is None and fields["role"] in ("user", "system"):
        raise ConfigError(
            f"{label}: expected text as content of a {fields['role']} message, got "
            f"{_shown(fields)}; write its text under content"
        )
    try:
        calls = fields.get("tool_calls")
        if calls and isinstance(calls, str):  # as in the files of a run's rollouts
            fields = {**fields, "tool_calls": json.loads(calls)}
        message = message_from_json(fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{label}: expected tool calls as in the chat API, with function.name and "
            f"function.arguments, got {_shown(fields.get('tool_calls'))}"
        ) from error
    if not isinstance(message.reasoning, str):
        raise ConfigError(f"{label}: expected text as thinking, got {_shown(message.reasoning)}")
    texts = [message.content, message.reasoning, fields.get("tool_call_id")]
    for call in message.tool_calls:
        texts += (call.id, call.name, call.arguments)
        with suppress(ValueError, RecursionError):  # arguments that are no JSON stay a text
            # Templates may write the values, in which there are no escapes.
            texts.append(json.dumps(json.loads(call.arguments), ensure_ascii=False))
    for text in texts:
        _require_whole(text, f"{label}: a message of the role {message.role}")
    return message


def _require_whole(text: Any, where: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes."""
    try:
        require_whole(str(text), where)
    except EnvironmentLoadError as error:
        raise ConfigError(str(error)) from None


def _tools(given: Any, label: str) -> Tools:
    """Return the tools of a row: a list, or its JSON text, as tables of many shapes have it."""
    with suppress(ValueError, KeyError, TypeError):
        tools = json.loads(given) if isinstance(given, str) and given else given or []
        names = [one["function"]["name"] for one in tools]
        if isinstance(tools, list) and all(isinstance(name, str) for name in names):
            _require_whole(json.dumps(tools, ensure_ascii=False), f"{label}: column {_TOOLS!r}")
            return tools
    raise ConfigError(
        f"{label}: expected in {_TOOLS!r} a list of functions as in the chat API, with "
        f"function.name, got {_shown(given)}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldSamples:
    """Samples to learn, and held-out samples to measure on."""

    learnt: list[TrainingSample]
    held_out: list[TrainingSample]
    moment: datetime
    """What the chat template showed as the present."""
    num_truncated: int = 0
    """Number of samples that were cut to `seq_len` tokens, held-out ones included."""
    num_dropped: int = 0
    """Number of samples left out, too long or cut before the first token to learn."""

    def digest(self) -> str:
        """Return the SHA-256 of all tokens, and of which are learned, in order."""
        found = hashlib.sha256()
        for sample in (*self.learnt, *self.held_out):
            found.update(len(sample).to_bytes(8, "little"))
            found.update(sample.token_ids.tobytes() + sample.mask.tobytes())
        return found.hexdigest()

    def repeats_note(self) -> str | None:
        """Return a remark if held-out samples are learned too; None if none is."""
        known = {one.token_ids.tobytes() for one in self.learnt}
        num_known = sum(one.token_ids.tobytes() in known for one in self.held_out)
        if not num_known:
            return None
        return (
            f"{num_known} of {len(self.held_out)} held-out samples are also learned, so their "
            "accuracy and loss do not show what the model does with new ones; remove examples that "
            "repeat others"
        )


async def gold_samples(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_ids: Sequence[int] = (),
    moment: datetime | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> GoldSamples:
    """Take gold answers by weight: samples to learn from train splits, held-out from eval splits.

    `end_ids` are the tokens that end a turn, besides the tokenizer's EOS. `moment` is what the chat
    template shows as the present; None = now. `tell` gets one line for each environment that reads
    secrets.
    """
    moment = moment or datetime.now()
    total_weight = sum(environment.weight for environment in config.environments)
    learnt, held_out = [], []
    for environment in config.environments:
        share = environment.weight / total_weight
        golds = await _golds(
            environment,
            {
                Split.TRAIN: max(1, round(share * (config.num_examples or NUM_GOLDS))),
                Split.EVAL: max(1, round(share * config.num_held_out)),
            },
            tell,
        )
        for split, samples in ((Split.TRAIN, learnt), (Split.EVAL, held_out)):
            render = partial(render_conversations, tokenizer, end_ids=end_ids, moment=moment)
            samples += _samples(golds[split], render, seq_len=config.seq_len)
    return GoldSamples(learnt=learnt, held_out=held_out, moment=moment)


async def _golds(
    environment: SftEnvironment, wanted: Mapping[Split, int], tell: Callable[[str], None]
) -> dict[Split, list[Rollout]]:
    """Return the wanted number of gold rollouts of each split, or all if there are fewer."""
    client = open_environment(environment.name, dict(environment.env))
    client.tell_secrets(lambda names: tell(secrets_line(environment.name, names, os.environ)))
    try:
        description = await client.describe()
        golds: dict[Split, list[Rollout]] = {}
        for split, num_wanted in wanted.items():
            size = description.num_examples.get(split, 0)
            num_golds = num_wanted if size is None else min(size, num_wanted)
            if num_golds == 0:
                raise ConfigError(
                    f"environment {environment.name!r} has no examples in its {split} split; "
                    "the train split is learned, and the eval split is measured on"
                )
            golds[split] = []
            for start in range(0, num_golds, _CONCURRENT_GOLDS):
                indices = range(start, min(num_golds, start + _CONCURRENT_GOLDS))
                found = await asyncio.gather(*(client.gold(split, i) for i in indices))
                golds[split] += [
                    _checked(client, rollout, description.success_threshold) for rollout in found
                ]
        return golds
    finally:
        await client.close()


def _checked(client: EnvironmentClient, rollout: Rollout | None, threshold: float) -> Rollout:
    if rollout is None:
        raise ConfigError(
            f"environment {client.name!r} has no gold answers, so nothing can be learned from it; "
            "remove it from environments"
        )
    if rollout.status is RolloutStatus.FAILED:
        raise EnvironmentLoadError(
            f"environment {client.name!r}: the gold answer of {rollout.example_id!r} failed: "
            f"{rollout.error}"
        )
    if rollout.reward is None or not is_solved(rollout.reward, threshold):
        raise EnvironmentLoadError(
            f"environment {client.name!r}: the gold answer of {rollout.example_id!r} earns "
            f"{rollout.reward}, below the success threshold {threshold:g}; correct the environment"
        )
    return rollout


def _samples(
    rollouts: Sequence[Rollout],
    render: Callable[..., list[list[RenderedConversation]]],
    *,
    seq_len: int,
) -> list[TrainingSample]:
    messages, tools = [one.messages for one in rollouts], [one.tools for one in rollouts]
    labels = [f"gold answer of {one.example_id!r} in {one.environment!r}" for one in rollouts]
    rendered = render(messages, tools=tools, labels=labels)
    for rollout, parts in zip(rollouts, rendered, strict=True):
        length = max(len(part.token_ids) for part in parts)
        if length > seq_len:
            raise ConfigError(
                f"example {rollout.example_id!r} of {rollout.environment!r} has {length} tokens, "
                f"but seq_len is {seq_len}; raise seq_len"
            )
    return [
        _sample(part, source=rollout.environment, example_id=rollout.example_id)
        for rollout, parts in zip(rollouts, rendered, strict=True)
        for part in parts
    ]


def dataset_samples(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_ids: Sequence[int] = (),
    moment: datetime | None = None,
) -> GoldSamples:
    """Read the dataset. Some conversations, drawn by the seed, are held out; the rest is learned.

    `end_ids` are the tokens that end a turn, besides the tokenizer's EOS. `moment` is what the chat
    template shows as the present; None = now.
    """
    assert config.dataset is not None, "settings without a dataset have environments"
    conversations = read_conversations(config)
    num_held_out, limit = config.num_held_out, config.num_examples
    if len(conversations) <= num_held_out:
        raise ConfigError(
            f"dataset {config.dataset!r} has {counted(len(conversations), 'conversation')} and "
            f"num_held_out is {num_held_out}, so none would be left to learn; "
            f"{'lower num_held_out' if len(conversations) > 1 else 'at least two are needed'}"
        )
    order = np.random.default_rng(config.seed).permutation(len(conversations))
    chosen = order if limit is None else order[: num_held_out + limit]
    moment = moment or datetime.now()

    def render(found: Sequence[Conversation]) -> list[list[RenderedConversation]]:
        messages, tools = [one.messages for one in found], [one.tools for one in found]
        return render_conversations(
            tokenizer,
            messages,
            tools=tools,
            end_ids=end_ids,
            labels=[one.label for one in found],
            learnt=[one.learnt for one in found],
            moment=moment,
        )

    parts = [
        _fitted([conversations[index] for index in part], config, render)
        for part in (chosen[num_held_out:], chosen[:num_held_out])
    ]
    learnt, held_out = parts
    if not learnt.samples or not held_out.samples:
        raise ConfigError(
            f"no conversation of dataset {config.dataset!r} fits in seq_len = {config.seq_len}; "
            "raise seq_len"
        )
    return GoldSamples(
        learnt=learnt.samples,
        held_out=held_out.samples,
        moment=moment,
        num_truncated=sum(part.num_truncated for part in parts),
        num_dropped=sum(part.num_dropped for part in parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    samples: list[TrainingSample]
    num_truncated: int
    num_dropped: int


def _fitted(
    conversations: Sequence[Conversation],
    config: SftConfig,
    render: Callable[[Sequence[Conversation]], list[list[RenderedConversation]]],
) -> _Fitted:
    """Render conversations and apply `too_long`."""
    assert config.dataset is not None, "settings without a dataset have environments"
    samples: list[TrainingSample] = []
    num_truncated = num_dropped = 0
    rendered = render(conversations)
    for conversation, parts in zip(conversations, rendered, strict=True):
        length, limit = max(len(part.token_ids) for part in parts), config.seq_len
        if length > limit and config.too_long == "refuse":
            raise ConfigError(
                f"{conversation.label} has {length} tokens, but seq_len is {limit}; raise "
                "seq_len, or set too_long to 'truncate' or 'drop'"
            )
        kept = [part for part in parts if _is_kept(part, config)]
        num_dropped += len(parts) - len(kept)
        num_truncated += sum(len(part.token_ids) > limit for part in kept)
        for part in kept:
            cut = RenderedConversation(token_ids=part.token_ids[:limit], mask=part.mask[:limit])
            samples.append(_sample(cut, source=config.dataset, example_id=conversation.label))
    return _Fitted(samples=samples, num_truncated=num_truncated, num_dropped=num_dropped)


def _is_kept(part: RenderedConversation, config: SftConfig) -> bool:
    """Return whether a sample fits in `seq_len`, or may be cut and still has tokens to learn."""
    if len(part.token_ids) <= config.seq_len:
        return True
    return config.too_long == "truncate" and bool(part.mask[: config.seq_len].any())


def _sample(rendered: RenderedConversation, *, source: str, example_id: str) -> TrainingSample:
    return TrainingSample(
        token_ids=rendered.token_ids,
        mask=rendered.mask,
        behavior_logprobs=np.where(rendered.mask, 0.0, np.nan).astype(np.float32),
        advantage=1.0,
        temperature=1.0,
        oldest_version=0,
        newest_version=0,
        group_id=f"{source}/{example_id}",
        rollout_index=0,
        environment=source,
    )
