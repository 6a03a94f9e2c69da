import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from telescope_core.errors import ConfigError
from telescope_core.types import Message
from telescope_train.chat.supervised import render_conversations
from telescope_train.chat.tokenizer import load_tokenizer, require_rows
from telescope_train.config.schema import ModelSection
from telescope_train.models.attention.blocks import packed_attention, packed_layout
from telescope_train.models.cpu_kernels import _is_made_by_amd, replace_linears, replace_rms_norms
from telescope_train.models.load import load_model, settle_rotations
from telescope_train.models.location import locate_model
from telescope_train.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(ModelSection(model=str(tiny)))


def test_the_tiny_model_is_reproducible_and_small(tiny_of_quickstart, tmp_path):
    again = make_tiny_model(tmp_path / "again", seed=0)
    other = make_tiny_model(tmp_path / "other", seed=1)
    weights = (tiny_of_quickstart / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]
    loaded = load_model(str(tiny_of_quickstart))
    assert 500_000 < loaded.model.num_parameters() < 700_000
    assert loaded.vocab_size == len(AutoTokenizer.from_pretrained(tiny_of_quickstart)) == 103
    config = json.loads((tiny_of_quickstart / "config.json").read_text())
    assert config["tie_word_embeddings"] is True


def test_the_character_tokenizer_loses_nothing_it_knows(tokenizer):
    text = "3 5 8=16\n(a+b)*[c]~`\"'\\ \t!"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text.replace("\t", "<|unk|>")
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]


words = st.text("ab<|>= \n1", max_size=6)


@given(texts=st.lists(words, min_size=1, max_size=5))
@settings(max_examples=40)
def test_the_template_only_appends(tokenizer, texts):
    messages = [
        {"role": ["user", "assistant"][index % 2], "content": text}
        for index, text in enumerate(texts)
    ]

    def ids(count, is_prompt):
        text = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=is_prompt
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = ids(len(messages), False)
    for count in range(1, len(messages) + 1):
        assert whole[: len(ids(count, False))] == ids(count, False)
        if count < len(messages) and messages[count]["role"] == "assistant":
            assert whole[: len(ids(count, True))] == ids(count, True)


def test_only_what_the_assistant_wrote_is_learnt(tokenizer):
    conversation = [
        Message(role="system", content="s"),
        Message(role="user", content="1+1="),
        Message(role="assistant", content="2"),
        Message(role="user", content="why"),
        Message(role="assistant", content="so"),
    ]
    (one,), (two,) = render_conversations(tokenizer, [conversation, conversation[:3]])
    assert tokenizer.decode(one.token_ids[one.mask]) == "2<|end|>so<|end|>"
    assert tokenizer.decode(two.token_ids[two.mask]) == "2<|end|>"
    assert (
        tokenizer.decode(two.token_ids)
        == "<|system|>s<|end|><|user|>1+1=<|end|><|assistant|>2<|end|>"
    )


def test_a_template_that_rewrites_history_gives_several_samples(tokenizer, tiny, tmp_path):
    template = tmp_path / "rewriting.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rewriting = load_tokenizer(ModelSection(model=str(tiny), chat_template=str(template)))
    turns = [Message(role=role, content=role) for role in ("user", "assistant") * 2]
    (parts,) = render_conversations(rewriting, [turns])
    assert [rewriting.decode(part.token_ids) for part in parts] == [
        "<|user|>user<|end|><|assistant|>assistant<|end|>",
        "<|user|>user<|end|><|assistant|><|end|><|user|>user<|end|><|assistant|>assistant<|end|>",
    ]
    for part in parts:
        assert rewriting.decode(part.token_ids[part.mask]) == "assistant<|end|>"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<|end|>")
    with pytest.raises(ConfigError, match="does not continue its own generation prompt"):
        render_conversations(
            load_tokenizer(ModelSection(model=str(tiny), chat_template=str(template))), [turns[:2]]
        )


def test_models_that_do_not_exist(tiny, tmp_path):
    assert locate_model(str(tiny)) == str(tiny)
    assert locate_model("some-owner/some-model") == "some-owner/some-model"
    with pytest.raises(ConfigError, match=r"did you mean .*tiny"):
        locate_model(str(tiny.parent / "tinny"))
    with pytest.raises(ConfigError, match=r"there is no folder .nowhere. either"):
        locate_model("./nowhere/model")
    with pytest.raises(ConfigError, match=r"without config\.json"):
        locate_model(str(tmp_path))
    for folder, name, exported in (
        ("run", "run.json", "checkpoints/final/hf"),
        ("step-000020", "checkpoint.json", "hf"),
    ):
        place = tmp_path / folder
        (place / exported).mkdir(parents=True)
        for there in (name, "config.json"):
            (place / there).write_text("{}")
        with pytest.raises(ConfigError, match=f"telescope export .*{folder} --output"):
            locate_model(str(place))
        (place / exported / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=f"{folder}/{exported}"):
            locate_model(str(place))
    with pytest.raises(ConfigError, match="is a file"):
        locate_model(str(tiny / "config.json"))
    with pytest.raises(
        ConfigError, match=r"chat_template must be a Jinja file, .*\(chatml-keeps-thinking, "
    ):
        load_tokenizer(ModelSection(model=str(tiny), chat_template=str(tmp_path / "none.jinja")))


def test_a_folder_with_a_broken_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    with pytest.raises(ConfigError, match="experts"):
        load_model(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.integers(0, 99))
@settings(max_examples=30)
def test_packed_attention_equals_attention_of_each_sequence(lengths, data):
    generator = torch.Generator().manual_seed(data)
    positions_T = np.concatenate([np.arange(length) for length in lengths])
    layout = packed_layout(np.array(lengths), torch.device("cpu"))
    assert sum(s for s, _ in layout.blocks) == len(lengths)

    def states(num_heads):
        shape = (1, num_heads, len(positions_T), 8)
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    inputs = states(4), states(2), states(2)
    together, _ = packed_attention(None, *inputs, None, packed_layout=layout, scaling=0.3)
    alone = []
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        part = [values[:, :, start : start + length] for values in inputs]
        alone.append(
            F.scaled_dot_product_attention(*part, is_causal=True, scale=0.3, enable_gqa=True)
        )
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    assert torch.allclose(together, expected, atol=1e-12)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for found, wanted in zip(
        torch.autograd.grad(together, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        assert torch.allclose(found, wanted, atol=1e-12)


def test_long_sequences_are_not_padded_to_attend_to_much_more():
    lengths = np.array([7431, 6900, 6100, 5700, 4029, 3300, 700, 650, 90, 80])
    blocks = packed_layout(lengths, torch.device("cpu")).blocks
    padded = sum(number * length**2 for number, length in blocks)
    assert padded <= 1.05 * (lengths**2).sum()
    assert len(blocks) < len(lengths), "short ones go together"


def assert_equal_gradients(exact, faster):
    ids = torch.arange(40)[None] + 7
    for model in (exact, faster):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for name, value in exact.named_parameters():
        found = dict(faster.named_parameters())[name].grad.double()
        difference = (found - value.grad).norm() / value.grad.norm()
        assert difference < 1e-5, name


def test_faster_norms_are_equal_with_their_gradients(tiny):
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    faster = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    assert replace_rms_norms(faster) == 2 * 4 + 1
    assert_equal_gradients(plain, faster)  # transformers takes norms in float32
    norm = torch.nn.Module()
    assert replace_rms_norms(norm) == 0


def test_faster_linears_are_equal_with_their_gradients(tiny):
    exact = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    faster = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert replace_linears(faster) == 2 * 7 + 1
    assert_equal_gradients(exact, faster)


@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 3), (300, 3), (3,), (0, 3)])
def test_a_faster_linear_has_a_bias_and_any_number_of_rows(shape):
    linear = torch.nn.Linear(3, 7)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, requires_grad=True)
    upstream = torch.randn((*shape[:-1], 7), generator=generator)
    inputs = [values, linear.weight, linear.bias]
    expected = linear(values)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    assert replace_linears(linear) == 1
    found = linear(values)
    assert torch.allclose(found, expected, atol=1e-6)
    for one, other in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    only_bias = torch.autograd.grad(linear(values), [linear.bias], upstream)
    assert torch.allclose(only_bias[0], wanted[2], rtol=1e-5, atol=1e-5)


def test_other_linears_keep_their_forward():
    class Doubling(torch.nn.Linear):
        def forward(self, values):
            return 2 * super().forward(values)

    others = torch.nn.ModuleList([Doubling(3, 3), torch.nn.Linear(3, 3, dtype=torch.float64)])
    assert replace_linears(others) == 0


def test_the_maker_of_a_cpu_is_read_where_linux_says_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert not _is_made_by_amd(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n")
    assert not _is_made_by_amd(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    assert _is_made_by_amd(cpuinfo)


def test_a_token_that_texts_become_must_have_a_row(tokenizer, tiny):
    num_rows = len(tokenizer)
    wider = AutoTokenizer.from_pretrained(tiny)
    assert require_rows("m", wider, num_rows) is None
    wider.add_special_tokens({"additional_special_tokens": ["<|picture|>"]})
    assert "<|picture|>" in require_rows("m", wider, num_rows)
    assert require_rows("m", wider, num_rows + 1) is None
    wider.chat_template += "{# <|picture|> #}"
    with pytest.raises(ConfigError, match=r"<\|picture\|>"):
        require_rows("m", wider, num_rows)
    wider = AutoTokenizer.from_pretrained(tiny)
    wider.add_tokens([f"<word{number}>" for number in range(5)])
    with pytest.raises(
        ConfigError, match=rf"{num_rows + 5} tokens.*{num_rows} rows.*<word0>.*2 mo"
    ):
        require_rows("m", wider, num_rows)


@pytest.mark.parametrize(("longest", "num_tokens"), [(40, 40), (16, 10)])
def test_long_rotations_are_chosen_once_for_all_sequences(longest, num_tokens):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2, 4, 8]}
    config = Phi3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**rope, "rope_theta": 100.0, "original_max_position_embeddings": 16},
        pad_token_id=0,
    )
    torch.manual_seed(0)
    lm = Phi3ForCausalLM(config).eval()
    tokens = torch.randint(50, (1, 40))
    with torch.no_grad():
        # What comes first does not see what follows, but has the rotations of the whole.
        expected = lm(tokens[:, :num_tokens], use_cache=False).logits[:, :10]
        alone = lm(tokens[:, :10], use_cache=False).logits
        settle_rotations(lm, longest)
        settled = lm(tokens[:, :10], use_cache=False).logits
    torch.testing.assert_close(settled, expected)
    assert torch.equal(alone, expected) == (num_tokens == 10)


def test_rotations_of_each_length_are_refused_beyond_the_positions():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    config = LlamaConfig(
        **sizes,
        vocab_size=50,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters=rope,
    )
    settle_rotations(LlamaForCausalLM(config), 16)
    with pytest.raises(ConfigError, match="beyond 16 tokens, and there are some of 17"):
        settle_rotations(LlamaForCausalLM(config), 17)
