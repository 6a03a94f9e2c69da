"""NCCL itself has no deadline for joining; a stand-in for it waits for ever here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.ports import free_port
from torch.distributed import TCPStore

from telescope_train.backends.transfer import Place, Wire
from telescope_train.weights.nccl import Communicator, join_within


def test_who_waits_for_a_member_that_died_gives_up_and_aborts():
    aborted = threading.Event()
    with pytest.raises(RuntimeError, match="connect all members within 0 s"):
        join_within(0.0, lambda: (aborted.wait(), None)[1], abort=aborted.set)
    assert aborted.is_set()


def test_who_joins_in_time_has_joined_and_an_error_is_its_own():
    joined: list[str] = []
    never = joined.clear
    join_within(60.0, lambda: joined.append("joined"), abort=never)
    assert joined == ["joined"]

    def refused() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled system error"):
        join_within(60.0, refused, abort=never)


def test_an_error_of_nccl_says_what_to_do_and_others_stay(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    error = RuntimeError("NCCL error: unhandled system error")

    def broadcast(*_: object, **__: object) -> None:
        raise error

    member = Communicator.__new__(Communicator)
    member._communicator = SimpleNamespace(broadcast=broadcast)
    with pytest.raises(RuntimeError, match=r"^NCCL error: unhandled system error; .*NCCL_DEBUG"):
        member.broadcast(torch.zeros(1))
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        member.broadcast(torch.zeros(1))
    assert caught.value is error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_fails_otherwise_has_not_joined():
    def broken() -> None:
        raise LookupError("no such symbol")

    with pytest.raises(RuntimeError, match="joining over NCCL has failed"):
        join_within(60.0, broken, abort=list)


def test_what_is_aborted_is_the_group_as_far_as_it_has_come():
    destroyed: list[str] = []
    joining = Communicator.__new__(Communicator)
    waits_in_nccl = SimpleNamespace(destroy=lambda: destroyed.append("too early"))
    joining._communicator = waits_in_nccl
    joining._abort_joining()
    assert waits_in_nccl.disabled, "it would queue a reduction that nobody else takes part in"
    reduces = SimpleNamespace(comm=7, destroy=lambda: destroyed.append("reduces"))
    joining._communicator = reduces
    joining._abort_joining()
    assert destroyed == ["reduces"]


@pytest.mark.engine
def test_a_member_that_has_no_nccl_does_not_join(tmp_path, monkeypatch):
    """vLLM's communicator is silent then, and digests would tell that wrong weights arrived."""
    # A CUDA build of torch brings NCCL with it, on any machine.
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(tmp_path / "libnccl.so.2"))
    place = Place(wire=Wire(transport="nccl"), host="127.0.0.1", port=free_port(), world_size=2)
    join = partial(Communicator, place, device=torch.device("cpu"))
    with ThreadPoolExecutor(2) as threads:
        for found in [threads.submit(join, rank=rank) for rank in range(2)]:
            with pytest.raises(RuntimeError, match="finds no NCCL"):
                found.result(timeout=300)


@pytest.mark.parametrize("dies", [False, True])
def test_workers_hear_that_rank_0_has_left_or_died(dies):
    """NCCL tells nobody: a broadcast that others take part in would never end."""
    within = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=within, wait_for_workers=False)

    def member(rank: int, to: TCPStore) -> Communicator:
        made = Communicator.__new__(Communicator)
        made._rank, made._store = rank, to
        made._communicator = SimpleNamespace(destroy=list)
        return made

    one, other = (
        member(rank, TCPStore("127.0.0.1", store.port, timeout=within)) for rank in (1, 2)
    )
    other.leave()  # of which the others need not hear: rank 0 waits for its answer
    assert not one.is_left()
    if dies:
        del store
    else:
        member(0, store).leave()
        store.check(["what was sent before is there when this is answered"])
    assert one.is_left()
