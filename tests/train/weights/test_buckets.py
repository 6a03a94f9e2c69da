"""Buckets of tensors: what goes in comes out, and both ends form the same ones."""

import pytest
import torch

from telescope_train.weights.buckets import (
    empty,
    flattened,
    in_buckets,
    size_bytes,
    unflattened,
)

TENSORS = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.arange(7, dtype=torch.bfloat16),
    torch.empty(0, 4),
    torch.arange(33, dtype=torch.int8).view(3, 11),
    torch.arange(12, dtype=torch.float32).view(3, 4).t(),
    torch.ones(1000),
]


@pytest.mark.parametrize("limit_bytes", [1, 64, 200, 10_000])
def test_tensors_come_out_of_buckets_as_they_went_in(limit_bytes):
    def form(tensor):
        return tensor.dtype, tuple(tensor.shape)

    sent = list(in_buckets(TENSORS, lambda one: one.nbytes, limit_bytes=limit_bytes))
    forms = in_buckets(map(form, TENSORS), lambda one: size_bytes(*one), limit_bytes=limit_bytes)
    received = []
    for bucket, expected in zip(sent, forms, strict=True):
        flat = empty([size_bytes(*one) for one in expected])
        flat.copy_(flattened(bucket))
        received += unflattened(flat, expected)
    assert [form(one) for one in received] == [form(one) for one in TENSORS]
    assert all(torch.equal(a, b) for a, b in zip(received, TENSORS, strict=True))


def test_a_bucket_is_closed_before_it_is_too_large():
    sizes = [[one.nbytes for one in b] for b in in_buckets(TENSORS, lambda t: t.nbytes)]
    assert len(sizes) == 1
    small = list(in_buckets([10, 60, 70, 500, 1], lambda size: size, limit_bytes=192))
    assert small == [[10, 60], [70], [500], [1]]


def test_buckets_are_taken_one_at_a_time():
    taken = []

    def tensors():
        for size in (100, 100, 100):
            taken.append(size)
            yield size

    buckets = in_buckets(tensors(), lambda size: size, limit_bytes=128)
    assert next(buckets) == [100]
    assert len(taken) == 2, "a model is never in memory twice"
