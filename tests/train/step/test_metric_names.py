"""Every key that a step writes is in docs/reference/metrics.md, and the other way round."""

import re
import sys
from pathlib import Path

import pytest

from telescope_core.processes import EnvironmentPool, ProcessSettings
from telescope_core.processes.handshake import Identity
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_loop import run
from toy_run import toy_config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
RUNS = (
    {
        "filter_overlong": True,
        "overlong_penalty_factor": 0.5,
        "overlong_buffer_tokens": 4,
        "use_ppo_clip": True,
        "use_decoupled_loss": True,
        "clip_ratio_c": 3.0,
    },
    {
        "use_tis": True,
        "tis_mode": "icepop",
        "seq_is_masking": True,
        "kl_penalty_tau": 0.1,
        "kl_in_reward": True,
    },
    {"use_tis": True, "kl_penalty_tau": 0.1, "entropy_coef": 0.01},
)
ON_A_GPU = {"mfu"}
IN_OTHER_RUNS = {
    *("signal/<env>/groups", "signal/<env>/share", "weights/unchanged"),
    *("reward/length_order", "reward/noise", "servers/lost", "servers/thrown_out"),
    *("optimizer/changed_weights", "groups/held_out"),
}
"""Of several environments, with servers, larger groups or other weights; each has its own test."""
IN_PROCESSES = {
    f"workers/<env>/{name}"
    for name in (
        *("workers", "restarts", "in_flight", "rollouts_per_s", "loop_lag_s"),
        *("memory_bytes", "stuck_threads"),
    )
}
EVALS = {
    "eval/lag_steps",
    "eval/missing",
    *(f"eval/<eval>/{name}" for name in ("version", "lag_steps", "scored", "failed")),
    *(
        f"eval/<eval>/{name}{end}"
        for name in ("reward", "pass@<k>", "maj@<k>")
        for end in ("", "/low", "/high")
    ),
}
"""What a run with evals writes; `tests/train/evals` has such runs."""


def documented() -> dict[str, re.Pattern[str]]:
    """Return the keys of the first columns, as patterns, up to the names of other systems."""
    text = PAGE.read_text(encoding="utf-8").partition("## What AReaL")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    keys = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    patterns = {key: re.sub(r"<\w+>", r"[\\w./@-]+", key) for key in keys}
    return {key: re.compile(pattern) for key, pattern in patterns.items()}


@pytest.mark.slow
async def test_the_page_lists_exactly_what_steps_write(start, tmp_path):
    model = make_tiny_model(tmp_path / "tiny", seed=0)
    rollout = {"should_accept_fn": "telescope_train.rollouts.accept:has_signal"}
    written: set[str] = set()
    for number, algorithm in enumerate(RUNS):
        # In one of them, batches are made of what ends first.
        scheduling = {"batch_order": "finished"} if number == 0 else {}
        config = toy_config(model, rollout=rollout, scheduling=scheduling, **algorithm)
        if number == 0:
            auto = config.trainer.model_copy(update={"gradient_checkpointing": "auto"})
            config = config.model_copy(update={"trainer": auto})
        _, rows = await run(config, tmp_path / str(number), start)
        written |= {key for row in rows for key in row} - {"step", "version", "time_s"}
    patterns = documented()
    missing = {key for key in written if not any(p.fullmatch(key) for p in patterns.values())}
    assert missing == set(), "document them in docs/reference/metrics.md"
    unwritten = {key for key, p in patterns.items() if not any(p.fullmatch(one) for one in written)}
    elsewhere = ON_A_GPU | IN_PROCESSES | EVALS | IN_OTHER_RUNS
    assert unwritten == elsewhere, "no step writes them"
    pool = EnvironmentPool(
        "toy", [], {}, identity=Identity(name="", version=""), processes=ProcessSettings()
    )
    assert {f"workers/<env>/{name}" for name in pool.stats()} == IN_PROCESSES
