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

faults()
print(faults())
keep_freed_memory()
faults()
print(faults())
"""


def test_a_block_that_was_freed_is_used_again() -> None:
    """In a process of its own, which begins without the setting."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=300, check=True
    )
    without, kept = map(int, done.stdout.split())
    assert without > 1000
    assert kept < 100
