"""Meters and spans of a real GPU."""

from pathlib import Path

import pytest
import torch

from telescope_train.observability.spans import SpanRecorder
from telescope_train.observability.system import NodeMeters

pytestmark = pytest.mark.gpu


def work(times: int) -> None:
    """Keep the GPU busy: the calls return long before it is done."""
    matrix = torch.ones(4096, 4096, device="cuda")
    for _ in range(times):
        matrix = matrix @ matrix.mul_(1e-4)


def test_the_gpus_of_this_machine_have_meters(tmp_path: Path):
    import pynvml

    busy = torch.ones(2**26, device="cuda")
    torch.cuda.synchronize()
    found = {(one.part, one.name): one.value for one in NodeMeters(tmp_path).read() if one.part}
    parts = {part for part, _ in found}
    assert len(parts) == pynvml.nvmlDeviceGetCount() >= torch.cuda.device_count()
    for part in parts:
        used, total = (found[part, f"gpu/memory_{kind}_bytes"] for kind in ("used", "total"))
        assert 0 < used <= total
        assert 0 < found[part, "gpu/power_watts"] < 3000
        assert 0 < found[part, "gpu/temperature_celsius"] < 130
        assert 0 <= found[part, "gpu/used_share"] <= 1
        assert 1e8 < found[part, "gpu/sm_clock_hertz"] < 1e10
    assert max(found[part, "gpu/memory_used_bytes"] for part in parts) >= busy.nbytes


def test_spans_are_as_long_as_the_gpu_worked_and_lie_in_the_order_of_its_work():
    work(2)  # what the first use of the GPU takes is no part of it
    recorder = SpanRecorder(torch.device("cuda"))
    recorder.begin(3)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with recorder.span("forward", microbatch=0):
        work(20)
    with recorder.span("backward", microbatch=0):
        work(40)
    end.record()
    with recorder.span("metrics", on_cpu=True):
        torch.cuda.synchronize()
    spans = {one.name: one for one in recorder.take().spans}
    assert list(spans) == ["metrics", "forward", "backward"]
    forward, backward = spans["forward"], spans["backward"]
    assert (forward.step, forward.microbatch) == (3, 0)
    # The clock of the GPU tells in float32, to within a microsecond here.
    assert forward.begin_s + forward.duration_s <= backward.begin_s + 1e-5
    whole_s = begin.elapsed_time(end) / 1e3
    assert forward.duration_s + backward.duration_s == pytest.approx(whole_s, rel=0.02)
    assert backward.duration_s == pytest.approx(2 * forward.duration_s, rel=0.3)
    # The CPU, which waited for it, saw its end when the GPU had come to it.
    metrics_end_s = spans["metrics"].begin_s + spans["metrics"].duration_s
    assert backward.begin_s + backward.duration_s <= metrics_end_s + 1e-3


def test_what_the_gpu_has_not_ended_is_told_later():
    recorder = SpanRecorder(torch.device("cuda"))
    recorder.begin(1)
    with recorder.span("forward"):
        work(200)
    first = recorder.take().spans
    torch.cuda.synchronize()
    assert [one.name for one in [*first, *recorder.take().spans]] == ["forward"]


def test_without_events_work_on_a_gpu_has_no_spans():
    recorder = SpanRecorder(torch.device("cuda"), times_gpu=False)
    recorder.begin(1)
    with recorder.span("forward"):
        work(1)
    with recorder.span("metrics", on_cpu=True):
        torch.cuda.synchronize()
    assert [one.name for one in recorder.take().spans] == ["metrics"]
