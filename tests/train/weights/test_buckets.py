"""Buckets of tensors: both ends plan the same ones, from what is known before the first byte."""

import weakref

import torch

from telescope_train.backends.transfer import TensorHeader
from telescope_train.weights.digests import Digests
from telescope_train.weights.sending import WeightSending, _Staged
from telescope_train.weights.transport import Bucket, filled, plan_buckets, receive, send


def of_bytes(*sizes: int) -> list[TensorHeader]:
    return [
        TensorHeader(name=f"{number}", dtype="uint8", shape=(size,))
        for number, size in enumerate(sizes)
    ]


def sizes(headers: list[TensorHeader], limit_bytes: int) -> list[list[int]]:
    planned = plan_buckets(headers, limit_bytes)
    assert [bucket.number for bucket in planned] == list(range(len(planned)))
    return [[header.num_bytes for header in bucket.headers] for bucket in planned]


def test_a_bucket_is_closed_before_it_is_too_large():
    assert sizes(of_bytes(10, 60, 70, 500, 1), 192) == [[10, 60], [70], [500], [1]]
    assert sizes(of_bytes(10, 60, 70), 10**6) == [[10, 60, 70]]
    assert sizes([], 192) == []


def test_each_tensor_by_itself():
    assert sizes(of_bytes(10, 0, 60, 70), 0) == [[10], [0], [60], [70]]


def test_tensors_begin_where_any_dtype_may():
    (bucket,) = plan_buckets(
        [
            TensorHeader(name="a", dtype="bfloat16", shape=(3,)),
            TensorHeader(name="b", dtype="float32", shape=(2,)),
        ],
        1000,
    )
    assert bucket.num_bytes == 128


def test_tensors_are_taken_one_at_a_time():
    headers, taken = of_bytes(100, 100, 100), []

    def tensors():
        for header in headers:
            taken.append(header.name)
            yield header.name, torch.zeros(100, dtype=torch.uint8)

    def buffer(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    buckets = filled(plan_buckets(headers, 128), tensors(), buffer, Digests())
    next(buckets)
    assert taken == ["0"], "a model is never in memory twice"


class Buffers:
    """Buffers of growing size, of which there may be one at a time."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def buffer(self, num_bytes: int) -> torch.Tensor:
        assert not any(one() is not None for one in self.made), "the one before is still held"
        flat = torch.zeros(num_bytes, dtype=torch.uint8)
        self.made.append(weakref.ref(flat.untyped_storage()))
        return flat

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        assert len(flat) == bucket.num_bytes

    def receive(self, bucket: Bucket) -> torch.Tensor:
        return self.buffer(bucket.num_bytes)

    def settle(self) -> None: ...

    def close(self) -> None: ...


def test_the_buffer_before_is_free_when_the_next_one_is_made():
    headers = of_bytes(100, 28, 200, 300)
    given = ((one.name, torch.zeros(one.num_bytes, dtype=torch.uint8)) for one in headers)
    sender, receiver, staged = Buffers(), Buffers(), Buffers()
    send(sender, headers, given, bucket_bytes=192)
    for _, tensor in receive(receiver, headers, Digests(), bucket_bytes=192):
        del tensor
    held = [(one, torch.zeros(one.num_bytes)) for one in plan_buckets(headers, 192)]
    WeightSending._sent_staged(staged, _Staged(held, Digests()))
    assert [len(one.made) for one in (sender, receiver, staged)] == [3, 3, 3]
