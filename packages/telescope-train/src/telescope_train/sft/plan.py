"""What `telescope sft --dry-run` shows: how much would be learned, and which of its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.base import interrupts
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import escaped, quoted, row, wrapped
from telescope_train.batches.batch import TrainingSample
from telescope_train.sft.checkpoints import log_folder
from telescope_train.sft.config import SftConfig
from telescope_train.sft.run import prepare

_MOST_SOURCES = 4
"""Environments whose first sample is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """Tokens of a sample in a row, all of which are learned, or none."""

    text: str
    num_tokens: int
    is_learned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSample:
    """The first sample of an environment or dataset."""

    source: str
    parts: tuple[SamplePart, ...]
    """All of its tokens, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """What a supervised training would do. Samples are those after truncating and dropping."""

    model: str
    output: str
    log_folder: str
    first_step: int
    """Number of steps that the checkpoint to continue from has taken; 0 = a new training."""
    num_steps: int
    stop_at_accuracy: float | None
    """Accuracy at which it ends before the last step."""
    batch_size: int
    passes: float
    """How often each sample is learned in all steps, on average."""
    num_samples: int
    """Number of samples to learn."""
    num_tokens: int
    """Tokens of the samples to learn."""
    num_learned_tokens: int
    """Those of them that the assistant wrote, which are learned."""
    longest: int
    """Tokens of the longest sample, held-out ones included."""
    seq_len: int
    num_held_out: int
    num_truncated: int
    num_dropped: int
    first: tuple[FirstSample, ...]
    notes: tuple[str, ...]


def plan_sft(config: SftConfig) -> SftPlan:
    """Read the model's files and all samples; writes nothing.

    Raises TelescopeError for what could not be trained.
    """
    notes: list[str] = []
    with interrupts.taken():
        prepared = prepare(config, notes.append)
    config, samples = prepared.config, prepared.samples
    sources = {sample.environment: sample for sample in reversed(samples.learnt)}
    shown = islice(reversed(sources.items()), _MOST_SOURCES)
    return SftPlan(
        model=config.model,
        output=config.output,
        log_folder=str(log_folder(config)),
        first_step=prepared.point.step if prepared.point else 0,
        num_steps=config.number_of_steps,
        stop_at_accuracy=config.stop_at_accuracy,
        batch_size=config.batch_size,
        passes=config.number_of_steps * config.batch_size / len(samples.learnt),
        num_samples=len(samples.learnt),
        num_tokens=sum(map(len, samples.learnt)),
        num_learned_tokens=sum(int(sample.mask.sum()) for sample in samples.learnt),
        longest=max(map(len, (*samples.learnt, *samples.held_out))),
        seq_len=config.seq_len,
        num_held_out=len(samples.held_out),
        num_truncated=samples.num_truncated,
        num_dropped=samples.num_dropped,
        first=tuple(
            FirstSample(source=source, parts=tuple(_parts(sample, prepared.tokenizer)))
            for source, sample in shown
        ),
        notes=tuple(notes),
    )


def _parts(sample: TrainingSample, tokenizer: PreTrainedTokenizerBase) -> Iterator[SamplePart]:
    pairs = zip(sample.mask.tolist(), sample.token_ids.tolist(), strict=True)
    for is_learned, group in groupby(pairs, key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        yield SamplePart(text=str(text), num_tokens=len(ids), is_learned=is_learned)


def render_sft_plan(plan: SftPlan) -> str:
    """Return the text that `telescope sft --dry-run` prints, at most 80 columns wide."""
    steps = counted(plan.num_steps, "step")
    if plan.first_step:
        steps = f"steps {plan.first_step + 1} to {plan.num_steps}"
    if plan.stop_at_accuracy is not None:
        steps = f"{steps}, or until accuracy is {plan.stop_at_accuracy:g},"
    head = (
        f"{steps} of {counted(plan.batch_size, 'sample')} on {plan.model}: each sample "
        f"{plan.passes:,.{1 if plan.passes < 100 else 0}f} times"
    )
    learned = f"{plan.num_tokens:,} tokens, {plan.num_learned_tokens:,} of them learned"
    lines = [
        *wrapped(head, ""),
        "",
        "samples",
        row("to learn", f"{plan.num_samples:,}, with {learned}"),
        row("held out", f"{plan.num_held_out:,}"),
        row("longest", f"{plan.longest:,} of seq_len = {plan.seq_len:,} tokens"),
        row("too long", f"{plan.num_truncated:,} truncated, {plan.num_dropped:,} dropped"),
        "",
    ]
    for one in plan.first:
        count = counted(sum(part.num_tokens for part in one.parts), "token")
        lines += wrapped(f"first sample of {one.source}: {count}; learned is what has a bar", "")
        for part in one.parts:
            lines += quoted(part.text, "  | " if part.is_learned else "    ")
        lines.append("")
    lines += ["written to", row("model", plan.output), row("measurements", plan.log_folder), ""]
    if plan.notes:
        lines += ["to know", *(line for note in plan.notes for line in wrapped(note, "- ")), ""]
    lines.append("Nothing was started. Whether memory suffices was not checked.")
    return escaped("\n".join(line.rstrip() for line in lines))
