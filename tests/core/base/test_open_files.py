"""The limit of open files is raised as far as it may be, and said where it is reached."""

import errno
import fcntl
import os
import resource

import pytest

from telescope_core.base import open_files
from telescope_core.base.open_files import advice_for, is_ready, raise_limit, require_open
from telescope_core.errors import ConfigError


@pytest.fixture
def limits(monkeypatch):
    """The limits of a system that has only these; what is beyond `real` is refused."""
    system = {"now": (1024, 4096), "real": 2**40}

    def put(kind, wanted):
        if max(wanted[0], 0) > system["real"]:
            raise ValueError("current limit exceeds maximum limit")
        system["now"] = wanted

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind: system["now"])
    monkeypatch.setattr(open_files.resource, "setrlimit", put)
    return system


@pytest.mark.parametrize(
    ("before", "real", "after"),
    [
        ((1024, 4096), 2**40, (4096, 4096)),
        ((1024, 2**20), 2**40, (65_536, 2**20)),
        ((2**17, 2**20), 2**40, (2**17, 2**20)),
        ((256, resource.RLIM_INFINITY), 10_240, (10_240, resource.RLIM_INFINITY)),
        ((1024, 2**20), 1024, (1024, 2**20)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2**40, (resource.RLIM_INFINITY,) * 2),
    ],
)
def test_the_soft_limit_is_raised_toward_the_hard_one(limits, before, real, after):
    limits.update(now=before, real=real)
    raise_limit()
    assert limits["now"] == after


def test_more_rollouts_than_can_be_open_are_refused_with_the_number_that_can(limits):
    require_open(3000)
    with pytest.raises(ConfigError, match=r"may have only 4096 open; lower --concurrency to 3968"):
        require_open(4000)
    require_open(3968)
    limits["now"] = (1024, 2**20)
    require_open(100_000)
    assert limits["now"][0] >= 100_000


def test_only_a_lack_of_descriptors_has_this_advice(limits):
    assert "(1024); raise the limit with ulimit -n" in advice_for(OSError(errno.EMFILE, "no"))
    assert "fs.file-max" in advice_for(OSError(errno.ENFILE, "no"))
    for code in (errno.EMFILE, errno.ENFILE):
        assert "(in training: max_open_rollouts)" in advice_for(OSError(code, "no"))
    assert not advice_for(OSError(errno.ENOENT, "no"))
    assert not advice_for(ValueError("no"))


def test_descriptors_beyond_those_of_select_are_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if raise_limit() < 1200:
        pytest.skip("the hard limit is too low")
    read_fd, write_fd = os.pipe()
    high_fd = fcntl.fcntl(read_fd, fcntl.F_DUPFD, 1100)
    try:
        assert high_fd >= 1100
        assert not is_ready(high_fd, wait_s=0.0)
        assert is_ready(write_fd, wait_s=0.0, to_write=True)
        os.write(write_fd, b"x")
        assert is_ready(high_fd, wait_s=60.0)
    finally:
        for descriptor in (read_fd, write_fd, high_fd):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
