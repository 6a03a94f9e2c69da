"""Digests see every byte, every place and every name, and nothing of how tensors were packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telescope_train.backends.transfer import TensorHeader
from telescope_train.weights.digests import Digests, difference
from telescope_train.weights.transport import filled, plan_buckets

SIZES = [1, 7, 8, 9, 64, 8191, 8192, 8200, 100_003]


def content(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def digest(tensors: dict[str, torch.Tensor], *, limit_bytes: int = 2**20) -> Digests:
    digests = Digests()
    headers = [TensorHeader.from_tensor(*one) for one in tensors.items()]

    def buffer(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    for _ in filled(plan_buckets(headers, limit_bytes), tensors.items(), buffer, digests):
        pass
    return digests


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_counts(size: int) -> None:
    tensor = content(size)
    whole = digest({"a": tensor}).whole()
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] ^= 1
        assert digest({"a": changed}).whole() != whole
    assert digest({"a": tensor.clone()}).whole() == whole
    assert digest({"b": tensor}).whole() != whole


def test_what_is_left_out_or_swapped_counts() -> None:
    rows = content(8 * 1024 * 4).view(4, -1)
    whole = digest({"a": rows.flatten()}).whole()
    assert digest({"a": rows[[1, 0, 2, 3]].flatten()}).whole() != whole
    one, other = content(100, 1), content(100, 2)
    assert digest({"a": one, "b": other}).whole() != digest({"a": other, "b": one}).whole()
    assert digest({"a": one}).whole() != digest({"a": one, "b": other}).whole()
    assert digest({"a": torch.zeros(8, dtype=torch.uint8)}).whole() != (
        digest({"a": torch.zeros(16, dtype=torch.uint8)}).whole()
    )


@pytest.mark.slow
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6), st.sampled_from([64, 9000]))
def test_how_tensors_share_buckets_does_not_count(sizes: list[int], limit_bytes: int) -> None:
    tensors = {f"t{place}": content(size, place) for place, size in enumerate(sizes)}
    turned = dict(reversed(tensors.items()))
    assert digest(tensors).whole() == digest(tensors, limit_bytes=limit_bytes).whole()
    assert digest(tensors).whole() == digest(turned, limit_bytes=limit_bytes).whole()


@given(st.binary(min_size=0, max_size=40), st.sampled_from([0, 8192, 16384]))
def test_it_is_the_sum_that_it_says_it_is(end: bytes, before: int) -> None:
    tensor = torch.cat(
        [content(before), torch.frombuffer(bytearray(end + b"."), dtype=torch.uint8)]
    )
    digests = Digests()
    digests.add("a", tensor)
    raw = tensor.numpy().tobytes()
    words = [int.from_bytes(raw[8 * n : 8 * n + 8], "little") for n in range(len(raw) // 8)]
    rows, left = len(words) // 1024, len(words) % 1024
    expected = [
        sum((2 * row + 1) * sum(words[1024 * row : 1024 * (row + 1)]) for row in range(rows)),
        sum((2 * place + 1) * words[1024 * rows + place] for place in range(left)),
        int.from_bytes(raw[8 * len(words) :], "little") + len(raw),
    ]
    assert digests.by_name()["a"] == "-".join(f"{value % 2**64:x}" for value in expected)


def test_a_difference_names_the_tensors() -> None:
    sent = {f"layer{n}": str(n) for n in range(6)}

    def named(received: dict[str, str]) -> list[str]:
        said = difference(sent, received)
        return [name for name in sent if name in said]

    assert named(sent) == []
    assert named({**sent, "layer3": "x"}) == ["layer3"]
    # Not all of them, where every tensor of a large model differs.
    assert named({}) == ["layer0", "layer1", "layer2"]
    assert difference(sent, {}).split()[:3] == ["6", "of", "6"]
