"""A rank takes the way of a GPU, on a device that is emulated: see tests/train/emulated_gpu."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from telescope_train.backends.fsdp.muon import Muon

SOURCES = Path(__file__).parents[1] / "emulated_gpu"
NEAR = {"bfloat16": 0.03, "adapters": 1e-4, "loaded whole": 0.03}
CASES = tuple(NEAR)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict]:
    """What a rank on the emulated GPU said of a step, beside the same rank on the CPU."""
    folder = tmp_path_factory.mktemp("emulated")
    library, torch = folder / "device.so", Path(find_spec("torch").origin).parent
    paths = ["-I", torch / "include", "-L", torch / "lib", f"-Wl,--no-as-needed,-rpath,{torch}/lib"]
    build = ["g++", "-shared", "-fPIC", "-std=c++20", SOURCES / "device.cpp", "-o", library]
    subprocess.run([*build, *paths, "-lc10", "-ltorch_cpu"], check=True, timeout=600)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join([str(SOURCES), str(SOURCES.parent)]),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    run = subprocess.run(
        [sys.executable, SOURCES / "steps.py", folder, *CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "near"), NEAR.items())
def test_a_step_on_a_gpu_has_the_numbers_of_the_cpu_and_mixes_no_devices(told, case, near):
    found = told[case]
    assert found["failed_tests"] == []
    assert found["gradient"] < near
    assert found["logprobs"] < near
    host, gpu = found["metrics"]
    assert gpu == {name: pytest.approx(value, rel=near, abs=near) for name, value in host.items()}
    assert found["restored"] == 0.0, "a checkpoint restores every weight on the GPU"
    assert found["sent"] == ["cuda"], "servers on the same GPU get weights that never left it"


@pytest.mark.slow
def test_a_rank_takes_no_more_of_its_gpu_than_its_share(told):
    assert "leave of 40.0 GiB" in told["adapters"]["room"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bfloat16", "adapters"])
def test_a_gpu_is_waited_for_when_numbers_are_read_alone(told, case):
    assert told[case]["early"] == {}
    assert any("after_backward" in one for one in told[case]["waits"]), "else nobody would see it"


@pytest.mark.slow
def test_no_product_of_muon_waits_for_the_gpu(told):
    places = {one.rpartition(" in ")[2] for one in told["loaded whole"]["waits"]}
    assert "_clip" in places, "its norm is read"
    assert not places & {*vars(Muon), "orthogonalize"}


@pytest.mark.slow
def test_layers_in_16_bits_attend_by_varlen_kernels_to_prefixes_that_are_computed_once(told):
    assert told["bfloat16"]["attention"] == "varlen"
    assert told["bfloat16"]["shares"]
