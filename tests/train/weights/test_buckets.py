"""Buckets of tensors: both ends plan the same ones, from what is known before the first byte."""

import torch

from telescope_train.backends.transfer import TensorHeader
from telescope_train.weights.digests import Digests
from telescope_train.weights.transport import filled, plan_buckets


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
