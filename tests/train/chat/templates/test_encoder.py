"""Encoding piece by piece gives the ids that the tokenizer gives for the whole text."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.test_random_conversations import parts, words
from tokenizers import AddedToken

from telescope_train.chat.encoder import Encoder


@st.composite
def texts(draw):
    family = draw(st.sampled_from(ALL_FAMILIES))
    special = [token.content for token in parts(family.name)[2].added_tokens_decoder.values()]
    pieces = words | st.sampled_from(special) | st.sampled_from([" ", "\n", "\n\n", "a", "<|im_"])
    conversation = st.lists(pieces, max_size=12).map("".join)
    return family.name, draw(st.lists(conversation, min_size=1, max_size=4))


@pytest.mark.slow
@settings(max_examples=80)
@given(texts(), st.sampled_from([0, 30, 2**24]))
def test_pieces_have_the_ids_of_the_whole(case, max_remembered):
    name, said = case
    _, renderer, tokenizer = parts(name)
    encoder = Encoder(
        tokenizer, stop_token_ids=renderer.stop_token_ids, max_remembered=max_remembered
    )
    for text in [*said, "".join(said), *said]:
        assert encoder.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False)


class Counting:
    """A tokenizer that remembers what it was asked to encode."""

    def __init__(self, tokenizer):
        self.asked: list[str] = []
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, texts, **options):
        self.asked += texts
        return self._tokenizer(texts, **options)


def counting(*more: AddedToken):
    family = ALL_BY_NAME["Qwen3-Instruct-2507"]
    tokenizer = family.tokenizer()
    tokenizer.add_tokens(list(more))
    counted = Counting(tokenizer)
    return counted, tokenizer.encode("<|im_end|>", add_special_tokens=False)


def test_no_piece_is_encoded_twice_and_copies_are_given():
    counted, stop = counting()
    encoder = Encoder(counted, stop_token_ids=stop)
    history = "one<|im_end|>\ntwo<|im_end|>\n"
    encoder.encode(history).append(0)
    assert counted.asked == ["one", "<|im_end|>\ntwo", "<|im_end|>\n"]
    assert encoder.encode(history) == array("i", counted.encode(history))
    encoder.encode(history + "three")
    assert counted.asked[3:] == ["<|im_end|>\nthree"]


@pytest.mark.parametrize("other", ["<|im_end|>!", "a<|im_", "|><"])
def test_nothing_is_cut_where_another_token_may_overlap(other):
    counted, stop = counting(AddedToken(other, special=True, normalized=False))
    text = f"one<|im_end|>!{other}a<|im_end|>< two"
    encoder = Encoder(counted, stop_token_ids=stop)
    assert encoder.encode(text).tolist() == counted.encode(text, add_special_tokens=False)
    assert counted.asked == [text]


def test_what_is_remembered_is_bounded():
    counted, stop = counting()
    encoder = Encoder(counted, stop_token_ids=stop, max_remembered=40)
    for number in range(100):
        encoder.encode(f"text {number}<|im_end|>")
    assert sum(map(len, encoder._pieces)) <= 40
    asked = len(counted.asked)
    encoder.encode("text 0")
    assert len(counted.asked) == asked + 1
