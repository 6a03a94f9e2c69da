"""Freed memory is kept: the second time, a large block costs no page fault."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
COUNT = """
import resource
from telescope_train.trainer.worker import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 64_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {kept}:
    keep_freed_memory()
faults()
print(faults())
"""


def faults_of_a_second_block(*, kept: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(kept=kept)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return int(done.stdout)


def test_a_block_that_was_freed_is_used_again() -> None:
    assert faults_of_a_second_block(kept=False) > 1000
    assert faults_of_a_second_block(kept=True) < 100
