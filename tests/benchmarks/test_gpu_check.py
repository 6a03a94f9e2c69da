"""`make gpu-check` without a GPU: what needs none runs, and a broken limit is a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
sys.path[:0] = [str(SCRIPT.parent), str(ROOT / "tests" / "train"), str(ROOT / "benchmarks")]

import gpu_check  # noqa: E402
from bench_decoding import Decoded  # noqa: E402
from gpu_parts import attention, beside_trl, decoding, measures, speeds, steps  # noqa: E402
from gpu_parts.part import Found, Part, within  # noqa: E402

from telescope_train.models.attention.kinds import ATTENTION_KINDS, SHARING_KINDS  # noqa: E402

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
VERSIONS = ["torch 1"]


def result(is_met: bool | None, part: str = "a") -> gpu_check.Result:
    return gpu_check.Result(part=part, found="1", limit="2", is_met=is_met, seconds=1.0)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([True, None], 0),
        ([True, False, None], 1),
        ([None, None], 2),  # a machine on which nothing ran has proved nothing
        ([], 2),
    ],
)
def test_the_exit_status_says_what_came_of_it(tmp_path, verdicts, status):
    results = [result(verdict) for verdict in verdicts]
    text = gpu_check.write(results, VERSIONS, tmp_path)
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert gpu_check.status_of(results) == written["status"] == status
    assert (tmp_path / "gpu-check.md").read_text() == text
    met, missed, left_out = (verdicts.count(one) for one in (True, False, None))
    assert f"{met} met, {missed} missed, {left_out} left out." in text
    assert text.count("| MISSED |") == missed
    assert "torch 1" in text


def test_a_limit_that_is_broken_on_purpose_is_missed(monkeypatch):
    kind = next(one for one in ATTENTION_KINDS if one.name == "packed_blocks")
    assert attention.check(kind, CPU, torch.float32).is_met
    monkeypatch.setitem(attention.MOST, torch.float32, 1e-12)
    assert attention.check(kind, CPU, torch.float32).is_met is False


def test_attention_that_leaks_is_missed_by_far(monkeypatch):
    cascade = next(one for one in SHARING_KINDS if one.name == "cascade")
    assert attention.check(cascade, CPU, torch.float32).is_met
    plain, _ = attention.batches()
    logprobs_M, gradient = attention.reference(attention.model(), plain)
    mixed = (logprobs_M.roll(1), gradient)
    monkeypatch.setattr(attention, "packed", lambda lm, row, kind, device: mixed)
    assert attention.check(cascade, CPU, torch.float32).is_met is False


def test_a_kind_that_needs_a_gpu_says_so_and_is_not_counted():
    found = attention.check(ATTENTION_KINDS[0], CPU, torch.float32)
    assert found.is_met is None
    assert "CUDA" in found.text


def test_a_number_that_is_none_keeps_no_limit():
    assert within("nan", float("nan"), 1.0).is_met is False


def test_speed_and_memory_are_held_to_their_limits():
    row = {"tokens_per_s": 8e4, "mfu": 0.3, "peak_gib": 20.0}
    assert steps.judged(row, 19.0).is_met
    assert steps.judged(row, None).is_met
    assert steps.judged(row | {"mfu": 0.2}, 19.0).is_met is False
    assert steps.judged(row, 15.0).is_met is False
    assert steps.judged({"problem": "out of memory"}, 15.0).is_met is False
    # On a CPU nothing was measured, which is not the same as met.
    assert steps.judged(row | {"mfu": None}, 19.0).is_met is None


def test_a_profile_is_told_by_kinds_of_kernels(monkeypatch):
    kernels = [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", 40.0),
        ("void flash_fwd_kernel<...>", 30.0),
        ("_rms_norm_backward_kernel", 10.0),
        ("void at::native::multi_tensor_apply_kernel<FusedAdam...>", 10.0),
        ("Memcpy DtoD (Device -> Device)", 5.0),
        ("void at::native::reduce_kernel<512, 1>", 5.0),
    ]
    monkeypatch.setattr(steps, "ON_GPU", True)
    found = steps.judged_profile(kernels)
    assert found.is_met
    assert found.text == (
        "attention 30%, products 40%, our kernels 10%, optimizer 10%, copies 5%, rest 5%"
    )
    assert steps.judged_profile([*kernels, ("other", 100.0)]).is_met is False
    assert steps.judged_profile([]).is_met is False


def test_steps_beside_those_of_trl_are_compared_after_the_first_two():
    assert beside_trl.step_s([0.0, 50.0, 60.0, 61.0, 63.0, 64.0]) == 1.0
    assert beside_trl.judged(1.0, 1.6, "").is_met
    assert beside_trl.judged(1.0, 1.4, "").is_met is False


def test_decoding_beside_plain_vllm_is_held_to_its_limit():
    def found(ours):
        return [Decoded("ours", 1.0), Decoded("ours", ours), Decoded("ours", 200.0)] + [
            Decoded("plain", one) for one in (90.0, 100.0, 110.0)
        ]

    assert decoding.judged(found(96.0)).is_met
    assert decoding.judged(found(94.0)).is_met is False


def test_single_parts_of_training_are_held_to_their_limits():
    assert speeds.judged_packing(2.5, mean=0.4).is_met
    assert speeds.judged_packing(1.1, mean=0.4).is_met is False
    assert speeds.judged_changes(0.01).is_met
    assert speeds.judged_changes(0.0).is_met is False
    assert speeds.judged_changes(0.9).is_met is False
    # 600 million parameters, whose moments are 4.5 GiB.
    for saved_gib, added_s, is_met in [(4.4, 2.0, True), (4.4, 3.0, False), (2.0, 0.1, False)]:
        found = speeds.judged_offload([1.0, 1.0 + added_s], [20.0, 20.0 - saved_gib], 600_000_000)
        assert found.is_met is is_met, found
    assert speeds.judged_sleep(0.95, 0.3, 0.2, 10**9).is_met
    assert speeds.judged_sleep(0.4, 0.3, 0.2, 10**9).is_met is False
    assert speeds.judged_sleep(0.95, 0.3, 60.0, 10**9).is_met is False


def test_the_time_of_a_run_must_be_explained_and_weights_take_little_of_it():
    def rows(*, sync_s: float, wall_s: float):
        parts = {"time/generate_s": 1.0, "time/train_s": 1.0, "time/wait_s": 0.2}
        return [{**parts, "time/sync_s": sync_s, "time_s": step * wall_s} for step in range(4)]

    found = measures.judged_shares(rows(sync_s=0.1, wall_s=2.5), "cuda")
    assert found.is_met
    assert found.text == "generate 43%, train 43%, sync 4%, wait 9%; steps are 92% of 7.5 s"
    assert measures.judged_shares(rows(sync_s=0.1, wall_s=5.0), "cuda").is_met is False
    assert measures.judged_shares(rows(sync_s=2.0, wall_s=4.5), "cuda").is_met is False


@pytest.fixture
def parts_process(monkeypatch, tmp_path):
    """The process of parts, whose program is a stand-in without torch."""
    script = tmp_path / "part.py"
    script.write_text(
        "import os, sys, time\n"
        "for name in sys.stdin:\n"
        "    if 'slow' in name: time.sleep(600)\n"
        "    if 'dies' in name: sys.exit('no GPU')\n"
        f"    if 'breaks' in name: print({gpu_check.BROKEN!r} + 'ValueError: 3', flush=True)\n"
        "    print('words before')\n"
        '    found = \'{"text": "%d", "is_met": true}\' % os.getpid()\n'
        f"    print({gpu_check.MARK!r} + found, flush=True)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    process = gpu_check.PartsProcess([])
    yield process
    process.close()


def part(name, **more):
    return Part(name=name, limit="", run=lambda: Found(text="", is_met=True), **more)


def test_parts_share_a_process_until_one_dies_or_does_not_end(parts_process):
    first, second = (parts_process.found(part(name), 60) for name in "ab")
    assert first.is_met
    assert first == second
    dead = parts_process.found(part("dies"), 60)
    assert dead == Found(text="ended with 1: no GPU", is_met=False)
    third = parts_process.found(part("c"), 60)
    assert third.is_met
    assert third != first
    broken = parts_process.found(part("breaks"), 60)
    assert broken == Found(text="ValueError: 3", is_met=False)
    assert parts_process.found(part("slow"), 1) is None
    fourth = parts_process.found(part("d"), 60)
    assert fourth.is_met
    assert fourth != third


def test_what_the_minutes_do_not_reach_is_left_out(parts_process):
    """A part that had less time than it may take is not called a failure."""
    slow = gpu_check._result(part("slow", seconds=1), 0, parts_process, 100.0)
    assert slow.is_met is False
    assert "1 s" in slow.text
    assert gpu_check._result(part("slow", seconds=120), 0, parts_process, 1.0) is None
    assert gpu_check._result(part("a"), 0, parts_process, 0.0) is None
    many = [part("a", num_gpus=2), part("b")]
    results = list(gpu_check.results_of(many, 1, [], minutes=0.0))
    assert [one.is_met for one in results] == [None, None]
    assert "needs 2 GPUs, here are 1" in results[0].found
    assert "--minutes gives more" in results[1].found


def test_every_part_has_a_name_of_its_own_and_none_is_forgotten():
    for num_gpus in (0, 1, 2):
        parts = gpu_check.all_parts(num_gpus, 1)
        assert len({part.name for part in parts}) == len(parts)
        kinds = {one.name for one in (*ATTENTION_KINDS, *SHARING_KINDS)}
        named = " ".join(part.name for part in parts)
        assert all(f"attention: {kind}," in named for kind in kinds)
        named += " ".join(part.limit for part in parts)
        assert all(f"G{number}" in named for number in range(1, 11))
        assert "run on" in parts[0].name, "what matters most comes first"
        # What has no limit is named as what cannot be measured.
        assert [part.name[:2] for part in parts if not part.limit] == ["G9"]


@pytest.mark.engine
def test_the_script_runs_what_needs_no_gpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cpu", "--mib", "1", "--only", "weights over"]
    done = subprocess.run(
        [*command, "--minutes", "48", "--results", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [one["is_met"] for one in written["results"]] == [True, True, None, None]
    assert "telescope-train" in done.stdout
