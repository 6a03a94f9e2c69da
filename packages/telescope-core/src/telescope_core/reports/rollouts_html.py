"""The rollouts that a report shows, early and late, good and bad; their HTML, and a filter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import zip_longest

from telescope_core.base.images import url_of, with_marks
from telescope_core.base.messages import tool_name
from telescope_core.base.number_text import counted, format_metric
from telescope_core.base.types import Image, Message, TurnInfo
from telescope_core.records.rows import RolloutRow
from telescope_core.records.run_folder import RunFolder

NUM_SAMPLES = 100
"""Rollouts in the report of a run or an eval."""


def run_samples(run: RunFolder) -> list[RolloutRow]:
    """Return rollouts of `run`, half from its first step and half from its last."""
    steps = run.rollout_steps()
    if not steps:
        return []
    if len(steps) == 1:
        return pick(run.rollouts(steps, with_tokens=False), NUM_SAMPLES)
    early = pick(run.rollouts(steps[:1], with_tokens=False), NUM_SAMPLES // 2)
    return early + pick(run.rollouts(steps[-1:], with_tokens=False), NUM_SAMPLES - len(early))


def pick(rows: Sequence[RolloutRow], count: int) -> list[RolloutRow]:
    """Return up to `count` rows, taken in turn from each environment: best, worst, next best..."""
    by_environment: dict[str, list[RolloutRow]] = {}
    for row in rows:
        if row.messages:
            by_environment.setdefault(row.environment, []).append(row)
    queues = [_best_and_worst(group) for _, group in sorted(by_environment.items())]
    mixed = [row for turn in zip_longest(*queues) for row in turn if row is not None]
    return mixed[:count]


def _best_and_worst(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Order rows as best, worst, second best...; then repeated examples, then failures."""
    scored = [row for row in rows if row.reward is not None]
    ranked = sorted(scored, key=lambda row: (-(row.reward or 0.0), row.group_id, row.index))
    alternating: list[RolloutRow] = []
    while ranked:
        alternating.append(ranked.pop(0 if len(alternating) % 2 == 0 else -1))
    seen: set[str] = set()
    fresh: list[RolloutRow] = []
    again: list[RolloutRow] = []
    for row in alternating:
        (again if row.group_id in seen else fresh).append(row)
        seen.add(row.group_id)
    return fresh + again + [row for row in rows if row.reward is None]


_LONGEST_TEXT = 4000
MAX_PICTURE_BYTES = 32 * 2**20
"""Most bytes of pictures in a page, as text; one of the largest size fits."""
_NUM_OPEN = 3
_SCRIPT = """
(() => {
  const all = [...document.querySelectorAll('.sample')];
  const kind = document.getElementById('kind'), text = document.getElementById('text');
  const show = () => {
    const words = text.value.toLowerCase();
    let shown = 0;
    for (const one of all) {
      const fits = (!kind.value || one.dataset.kind.split(' ').includes(kind.value))
        && one.textContent.toLowerCase().includes(words);
      one.hidden = !fits;
      shown += fits;
    }
    document.getElementById('shown').textContent = shown + ' of ' + all.length + ' shown';
  };
  for (const one of document.querySelectorAll('img[data-same]')) {
    one.src = document.getElementById(one.dataset.same).src;
  }
  const every = open => () => all.forEach(one => { one.querySelector('details').open = open; });
  document.getElementById('filter').hidden = false;
  kind.onchange = text.oninput = show;
  document.getElementById('open').onclick = every(true);
  document.getElementById('close').onclick = every(false);
  show();
})();
"""


class Pictures:
    """The pictures of a page: each is written once, and only as many as have room."""

    def __init__(self) -> None:
        self._written: dict[Image, str] = {}
        """The id of each picture that is in the page."""
        self._num_bytes = 0
        self.num_left_out = 0
        """Places where a picture is only named in the text."""

    def of(self, message: Message) -> str:
        """Return the pictures of a message; the script shows again those that are in the page."""
        found: list[str] = []
        for number, image in enumerate(message.images, start=1):
            picture = replace(image, at=0)
            tag = f'<img class="picture" alt="picture {number}'
            if (name := self._written.get(picture)) is not None:
                found.append(f'{tag}, as further up" data-same="{name}">')
            elif self._num_bytes + len(image.data) > MAX_PICTURE_BYTES:
                self.num_left_out += 1
            else:
                self._num_bytes += len(image.data)
                name = self._written[picture] = f"picture-{len(self._written) + 1}"
                found.append(f'{tag}" id="{name}" src="{escape(url_of(image))}">')
        return "".join(found)


def sample(
    row: RolloutRow,
    pictures: Pictures,
    *,
    with_step: bool = True,
    is_open: bool = True,
    kinds: Sequence[str] = (),
) -> str:
    """Return one rollout; `kinds` are the names by which `sample_filter` finds it."""
    body = _offered(row) + "".join(_message(message, pictures) for message in row.messages)
    for number, conversation in enumerate(row.conversations, start=1):
        said = "".join(_message(message, pictures) for message in conversation)
        body += f"<h4>Conversation {number} of its program</h4>{said}"
    expected = "".join(
        f'<div class="turn gold"><span class="role">expected: {escape(name)}</span>'
        f"<pre>{escape(_cut(answer))}</pre></div>"
        for name, answer in row.golden_answers.items()
    )
    notes = "".join(_note(one) for one in row.info)
    error = f'<pre class="bad">{escape(row.error)}</pre>' if row.error else ""
    opened = " open" if is_open else ""
    return (
        f'<article class="sample" data-kind="{escape(" ".join(kinds))}"><details{opened}>'
        f"<summary>{_header(row, with_step=with_step)}</summary>{body}{expected}{notes}"
        f"{_numbers(row)}{error}</details></article>"
    )


def _offered(row: RolloutRow) -> str:
    names = ", ".join(map(tool_name, row.tools))
    role = '<div class="turn"><span class="role">tools that the model was offered</span>'
    return f"{role}<pre>{escape(names)}</pre></div>" if names else ""


def sample_list(
    rows: Sequence[RolloutRow],
    kinds: Mapping[str, str],
    *,
    kinds_of: Callable[[RolloutRow], Sequence[str]],
    with_step: bool = True,
) -> str:
    """Return `rows` under a filter by kind and word; the first few are open.

    `kinds` maps kind -> its text, and `kinds_of` tells the kinds of a rollout.
    """
    pictures = Pictures()
    body = "".join(
        sample(row, pictures, with_step=with_step, is_open=index < _NUM_OPEN, kinds=kinds_of(row))
        for index, row in enumerate(rows)
    )
    left_out = ""
    if pictures.num_left_out:
        left_out = (
            f'<p class="soft">This page holds at most {MAX_PICTURE_BYTES // 2**20} MiB of '
            f"pictures. {pictures.num_left_out:,} more are only named in the text, such as "
            "[image/png, 12 KB]; telescope ui shows all of them.</p>"
        )
    return f"{left_out}{sample_filter(kinds)}{body}{filter_script()}"


def sample_filter(kinds: Mapping[str, str]) -> str:
    """Return the controls that filter the samples; `kinds` maps kind -> its label.

    They stay hidden where scripts are off, and the page then shows every sample.
    """
    options = "".join(
        f'<option value="{escape(kind)}">{escape(text)}</option>' for kind, text in kinds.items()
    )
    return (
        '<div id="filter" class="filter" hidden>'
        f'<label>Show <select id="kind"><option value="">all</option>{options}</select></label>'
        '<label>containing <input id="text" type="search"></label>'
        '<button id="open" type="button">open all</button>'
        '<button id="close" type="button">close all</button>'
        '<span id="shown" class="soft" role="status"></span></div>'
    )


def filter_script() -> str:
    """Return the script of `sample_filter`; it must follow the samples."""
    return f"<script>{_SCRIPT}</script>"


def _header(row: RolloutRow, *, with_step: bool) -> str:
    reward = "none" if row.reward is None else format_metric(row.reward)
    tokens = "-" if row.num_completion_tokens is None else row.num_completion_tokens
    labels = [f"step <b>{row.step}</b>"] if with_step else []
    labels += [
        f"<b>{escape(row.environment)}</b>",
        f"reward <b>{reward}</b>",
        f"status <b>{row.status.value}</b>"
        + (f" ({escape(row.status_reason.replace('_', ' '))})" if row.status_reason else ""),
        f"{counted(row.num_turns, 'turn')}, {tokens} tokens"
        + ", truncated" * row.is_truncated
        + ", stopped by a content filter" * row.is_filtered
        + ", refused" * row.is_refused,
        f"example {escape(row.example_id or 'unknown')}",
    ]
    return "".join(f"<span>{label}</span> " for label in labels)


def _message(message: Message, pictures: Pictures) -> str:
    text = with_marks(message)
    if message.refusal:
        text = f"{text}\n[refused] {message.refusal}".lstrip()
    if message.reasoning:
        text = f"[thinking]\n{message.reasoning}\n[/thinking]\n{text}"
    text = _cut(text)
    for call in message.tool_calls:
        text += f"\n{call.name}({call.arguments})"
    css_class = "said" if message.role == "assistant" else "asked"
    return (
        f'<div class="turn {css_class}"><span class="role">{escape(message.role)}</span>'
        f"<pre>{escape(text) or '(empty)'}</pre>{pictures.of(message)}</div>"
    )


def _note(note: TurnInfo) -> str:
    return (
        f'<div class="turn note"><span class="role">{escape(note.key)}, turn {note.turn + 1}</span>'
        f"<pre>{escape(_cut(note.value))}</pre></div>"
    )


def _numbers(row: RolloutRow) -> str:
    """Return the rewards, metrics and tags by name."""
    pairs = [(f"reward {name}", f"{value:g}") for name, value in row.rewards.items()]
    pairs += [(name, f"{value:g}") for name, value in row.metrics.items()]
    pairs += list(row.tags.items())
    items = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in pairs)
    return f'<ul class="keys">{items}</ul>' if items else ""


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}\n[{len(text) - _LONGEST_TEXT} more characters]"
