"""The metrics of a run in sections, so that each is found without its name; and their curves."""

import math
from collections.abc import Collection, Sequence

from telescope_core.base.errors import unknown_name
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.curves import shared_curves
from telescope_ui.base.parameters import CurveParameters
from telescope_ui.index.one_run import OneRun

SECTIONS = {
    "reward": ("task_reward/", "reward/", "final_reward/", "rewards/", "reward_shaping/"),
    "rollouts": ("groups/", "rollouts/", "filtered/", "failures/", "turns/"),
    "length": ("completion_len/", "seq_len/", "truncated/", "no_eos_ratio", "length_bias"),
    "policy": ("loss/", "entropy", "kl/", "advantage/", "clip_fraction/"),
    "optimizer": ("grad_norm", "learning_rate", "optimizer/", "gradient/", "activations/"),
    "off-policy": (
        *("staleness/", "mismatch/", "importance_weight/", "behave_imp_weight/", "tis/"),
        *("seq_is_mask/", "effective_sample_size", "version"),
    ),
    "time": ("time/", "tokens/", "pack/", "mfu"),
    "engine": ("queue/", "requests/", "workers/"),
    "evals": ("eval/", "accuracy", "nll/"),
}
"""Section -> prefixes of its metrics; others are in `other`."""
_OTHER = "other"
_NO_CURVES = ("time_s",)
USUAL = (
    *("accuracy", "nll/held_out", "entropy", "loss/total", "grad_norm"),
    *("completion_len/mean", "truncated/fraction"),
    *("mismatch/mean", "staleness/mean", "time/step_s", "tokens/rollout_per_s"),
)
"""Metrics that are shown by default, with all terms of the loss."""


def sections_of(names: Collection[str]) -> dict[str, list[str]]:
    """Return the metrics `names` by section; sections without any are left out."""
    found: dict[str, list[str]] = {section: [] for section in (*SECTIONS, _OTHER)}
    for name in names:
        if name not in _NO_CURVES:
            fits = (key for key, starts in SECTIONS.items() if name.startswith(starts))
            found[next(fits, _OTHER)].append(name)
    return {section: metrics for section, metrics in found.items() if metrics}


def usual(names: Collection[str]) -> list[str]:
    """Return those of the metrics `names` that are shown by default."""
    terms = sorted(name for name in names if name.startswith("loss/") and name not in USUAL)
    at = USUAL.index("loss/total") + 1
    return [name for name in (*USUAL[:at], *terms, *USUAL[at:]) if name in names]


def chosen_metrics(names: Sequence[str], asked: CurveParameters) -> list[str]:
    """Return the requested ones of the metrics `names`, each once; by default, the usual ones.

    Raises ParameterError for a section that none of them is in.
    """
    sections = sections_of(names)
    for section in asked.section:
        if section not in sections:
            raise ParameterError(f"section: {unknown_name('section', section, list(sections))}")
    whole = [name for section in asked.section for name in sections[section]]
    return list(dict.fromkeys([*(asked.metric or usual(names)), *whole]))


def curves_of(run: OneRun, asked: CurveParameters) -> JsonObject:
    """Return the sections of the metrics of a run, and the curves of requested ones."""
    names = run.metrics.names()
    chosen = chosen_metrics(names, asked)
    with_time = ["time_s"] if "time_s" in names else []
    columns = run.metrics.columns(list(dict.fromkeys([*chosen, *with_time])))
    values = {name: columns.values[name] for name in chosen}
    drawn = asked.drawn
    curves = shared_curves(columns.steps, values, drawn)
    times = dict(zip(columns.steps, columns.values.get("time_s", ()), strict=False))
    curves["times_s"] = [times.get(step, math.nan) for step in curves["steps"]]
    return {
        "sections": [
            {"name": name, "metrics": metrics} for name, metrics in sections_of(names).items()
        ],
        "usual": distinct(run, usual(names)),
        "curves": curves,
    }


def distinct(run: OneRun, metrics: Sequence[str]) -> list[str]:
    """Return `metrics` without those that equal an earlier one, except for rounding."""
    columns = run.metrics.columns(metrics).values
    found: list[str] = []
    for name in metrics:
        if not any(_are_same(columns[name], columns[other]) for other in found):
            found.append(name)
    return found


def _are_same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether both have equal values at the same steps, except for rounding."""
    return all(
        math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )
