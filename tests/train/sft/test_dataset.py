"""Supervised training on conversations: what is learnt, what is refused, what is counted."""

import json
import random
import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.errors import ConfigError
from telescope_core.records.files import plain
from telescope_core.records.parquet import write_rows
from telescope_core.records.rows import RolloutRow, row_to_json
from telescope_core.types import Message, RolloutStatus, ToolCall
from telescope_train.chat.supervised import render_conversations
from telescope_train.checkpoints.folders import read_checkpoint
from telescope_train.models.tiny import character_tokenizer
from telescope_train.sft import examples
from telescope_train.sft.checkpoints import moment_of
from telescope_train.sft.config import load_sft_config
from telescope_train.sft.examples import dataset_samples, read_conversations
from telescope_train.sft.run import run_sft

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENIZER = character_tokenizer()
TEXT = st.text(alphabet=string.ascii_letters + " ?\n", min_size=1, max_size=8)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Whoever asks for this reads datasets, and imports their library, which takes a while."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


READS = (pytest.mark.slow, pytest.mark.usefixtures("own_cache"))


def reads_datasets(test):
    """Mark a test that reads datasets."""
    for mark in READS:
        test = mark(test)
    return test


def conversation(number: int) -> list[dict]:
    """Two turns of the assistant: a letter again, and once more."""
    letter = random.Random(number).choice("abcd")
    return [
        {"role": "system", "content": "say it again"},
        {"role": "user", "content": letter},
        {"role": "assistant", "content": letter},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": letter * 2},
        {"role": "user", "content": "thanks"},
    ]


def calling(name: str, arguments: object) -> dict:
    """A turn that calls one tool."""
    call = {"id": "1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def write(path: Path, rows: list, *, field: str = "messages") -> Path:
    path.write_text("".join(json.dumps({field: row}) + "\n" for row in rows))
    return path


def config_of(path: Path, *flags: str):
    folder = path.parent
    return load_sft_config(
        [],
        [
            *(
                "--model",
                str(folder / "base"),
                "--make_tiny_model",
                "--output",
                str(folder / "out"),
            ),
            *("--dataset", str(path), "--num_held_out", "4", "--warmup_steps", "2"),
            *flags,
        ],
    )


@reads_datasets
def test_every_turn_of_the_assistant_is_learnt_and_nothing_else(tmp_path):
    path = write(tmp_path / "chats.jsonl", [conversation(n) for n in range(10)])
    samples = dataset_samples(config_of(path), TOKENIZER)
    assert (len(samples.learnt), len(samples.held_out)) == (6, 4)
    assert (samples.num_truncated, samples.num_dropped) == (0, 0)
    for sample in (*samples.learnt, *samples.held_out):
        whole = TOKENIZER.decode(sample.token_ids)
        letter = whole.partition("<|user|>")[2][0]
        learnt = TOKENIZER.decode(sample.token_ids[sample.mask])
        assert learnt == f"{letter}<|end|>{letter * 2}<|end|>"
        assert "thanks" not in whole, "what nobody answered is left out"
        assert np.isnan(sample.behavior_logprobs[~sample.mask]).all()
    names = [sample.group_id for sample in (*samples.learnt, *samples.held_out)]
    assert len(set(names)) == 10
    again = dataset_samples(config_of(path), TOKENIZER)
    assert [s.group_id for s in again.held_out] == [s.group_id for s in samples.held_out]


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT), max_size=8),
    last=TEXT,
)
@settings(max_examples=60)
def test_the_mask_is_exactly_what_the_assistant_wrote(turns, last):
    messages = [Message(role="user", content="go")]
    messages += [Message(role=role, content=text) for role, text in turns]
    messages.append(Message(role="assistant", content=last))
    ((rendered,),) = render_conversations(TOKENIZER, [messages])
    expected_ids: list[int] = []
    expected_mask: list[bool] = []
    for message in messages:
        mark = TOKENIZER.convert_tokens_to_ids(f"<|{message.role}|>")
        body = [*TOKENIZER(message.content)["input_ids"], TOKENIZER.eos_token_id]
        expected_ids += [mark, *body]
        expected_mask += [False, *([message.role == "assistant"] * len(body))]
    assert rendered.token_ids.tolist() == expected_ids
    assert rendered.mask.tolist() == expected_mask


def test_held_out_samples_that_are_also_learned_are_counted(tmp_path):
    def chat(text: str) -> list[dict]:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]

    path = write(tmp_path / "chats.jsonl", [chat(letter) for letter in string.ascii_lowercase])
    samples = dataset_samples(config_of(path), TOKENIZER)
    assert samples.repeats_note() is None
    note = replace(samples, held_out=[*samples.held_out, samples.learnt[3]]).repeats_note()
    assert note is not None
    assert note.startswith("1 of 5 held-out samples are also learned")


def long_ones() -> list:
    """Nine that fit in 60 tokens, one whose second answer does not, one with no room at all."""
    rows = [conversation(n) for n in range(9)]
    rows.append([*conversation(9)[:4], {"role": "assistant", "content": "z" * 80}])
    rows.append([{"role": "user", "content": "y" * 80}, {"role": "assistant", "content": "n"}])
    return rows


@reads_datasets
def test_conversations_that_are_too_long(tmp_path):
    path = write(tmp_path / "chats.jsonl", long_ones())
    short = ("--seq_len", "60", "--num_held_out", "1")
    with pytest.raises(ConfigError, match=r"tokens, but seq_len is 60; raise seq_len, or set too_"):
        dataset_samples(config_of(path, *short), TOKENIZER)
    cut = dataset_samples(config_of(path, *short, "--too_long", "truncate"), TOKENIZER)
    assert (cut.num_truncated, cut.num_dropped) == (1, 1)
    assert max(len(sample) for sample in cut.learnt) == 60
    dropped = dataset_samples(config_of(path, *short, "--too_long", "drop"), TOKENIZER)
    assert (dropped.num_truncated, dropped.num_dropped) == (0, 2)
    assert len(cut.learnt) - len(dropped.learnt) == 1
    with pytest.raises(ConfigError, match="no conversation of dataset"):
        dataset_samples(config_of(path, "--seq_len", "3", "--too_long", "drop"), TOKENIZER)


@reads_datasets
@pytest.mark.parametrize(("too_long", "counts"), [("drop", (0, 3)), ("truncate", (3, 0))])
def test_each_sample_of_a_conversation_that_is_too_long_is_counted(tmp_path, too_long, counts):
    """The template shows earlier turns without their end, so each turn is a sample of its own."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>' + m.content }}"
        "{%- if m.role != 'assistant' or loop.last -%}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    )
    short, long = (
        conversation(0),
        [*conversation(1)[:4], {"role": "assistant", "content": "z" * 80}],
    )
    path = write(tmp_path / "chats.jsonl", [short, short, long, long, long])
    flags = ("--seq_len", "60", "--num_held_out", "1", "--too_long", too_long)
    samples = dataset_samples(config_of(path, *flags), tokenizer)
    assert (samples.num_truncated, samples.num_dropped) == counts
    assert len(samples.learnt) + len(samples.held_out) + samples.num_dropped == 10


@pytest.mark.slow
def test_a_resume_with_other_rows_of_a_dataset_on_the_hub_is_refused(tmp_path, monkeypatch):
    """A branch moves, while the settings and all files here stay as they are."""
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": conversation(number)} for number in range(12)]
    monkeypatch.setattr(examples, "look_on_hub", lambda *known: None)
    monkeypatch.setattr(examples, "load_table", lambda *asked: rows)
    flags = ("--gradient_checkpointing", "false", "--checkpoint_every", "1", "--num_held_out", "2")
    run_sft(config_of(Path("acme/chats"), *flags, "--number_of_steps", "2"))
    again = ("--number_of_steps", "3", "--resume_from_checkpoint", "latest")
    more = config_of(Path("acme/chats"), *flags, *again)
    rows[3] = {"messages": [*conversation(3)[:4], {"role": "assistant", "content": "zz"}]}
    with pytest.raises(ConfigError, match=r"'acme/chats' has other rows.*step-000002.*revision"):
        run_sft(more)
    rows[3] = {"messages": conversation(3)}
    assert run_sft(more).is_dir()


@pytest.mark.slow
def test_a_training_whose_template_shows_the_time_is_resumed_at_another_time(tmp_path):
    template = "<|system|>{{ strftime_now('%f') }}<|end|>" + TOKENIZER.chat_template
    (tmp_path / "time.jinja").write_text(template)
    path = write(tmp_path / "chats.jsonl", [conversation(n) for n in range(6)])
    flags = ("--gradient_checkpointing", "false", "--checkpoint_every", "1", "--num_held_out", "2")
    flags += ("--chat_template", str(tmp_path / "time.jinja"))
    run_sft(config_of(path, *flags, "--number_of_steps", "2"))
    again = ("--number_of_steps", "3", "--resume_from_checkpoint", "latest")
    assert run_sft(config_of(path, *flags, *again)).is_dir()
    saved = tmp_path / "out-log" / "checkpoints"
    first, last = (read_checkpoint(saved / f"step-00000{step}") for step in (1, 3))
    assert moment_of(first) == moment_of(last) is not None
    assert last.manifest.config.pop("sft_moment"), "as in a checkpoint of an earlier version"
    assert moment_of(last) is None


@reads_datasets
def test_training_on_conversations_lowers_the_held_out_loss(tmp_path):
    path = write(tmp_path / "chats.jsonl", [conversation(n) for n in range(40)], field="chat")
    rows, told = [], []
    config = config_of(
        path,
        *("--messages_field", "chat", "--number_of_steps", "12", "--batch_size", "16"),
        *("--learning_rate", "3e-3", "--gradient_checkpointing", "false"),
    )
    run_sft(config, on_row=rows.append, tell=told.append)
    assert any(line.startswith("4 of 4 held-out samples are also learned") for line in told)
    assert [row.step for row in rows] == [0, 10, 12]
    assert rows[-1].metrics["nll/held_out"] < 0.7 * rows[0].metrics["nll/held_out"]
    assert rows[0].metrics["examples/learnt"] == 36
    assert (tmp_path / "out" / "model.safetensors").is_file()


@reads_datasets
def test_a_folder_and_num_examples(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [conversation(n) for n in range(10)])
    samples = dataset_samples(config_of(tmp_path / "data", "--num_examples", "3"), TOKENIZER)
    assert (len(samples.learnt), len(samples.held_out)) == (3, 4)


@reads_datasets
@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ([{"role": "user", "content": "a"}], "assistant"),
        ([{"role": "assistant", "content": "a"}], "assistant"),
        ([{"role": "human", "content": "a"}], "role"),
        ([], "list"),
        (
            [*conversation(1)[:2], {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}],
            "tool calls",
        ),
        ([*conversation(1)[:4], {**conversation(1)[4], "train": False}], "message 4.*'train'"),
        ([*conversation(1)[:2], {**conversation(1)[2], "refusal": "no"}], "message 2.*'refusal'"),
        ([*conversation(1)[:2], {**conversation(1)[2], "weight": 0.5}], "weight of 0.*0.5"),
        ([*conversation(1)[:2], {**conversation(1)[2], "weight": 0}], "weight 0"),
        ([*conversation(1)[:2], {**conversation(1)[2], "thinking": 7}], "thinking, got 7"),
        ([*conversation(1)[:2], {**conversation(1)[2], "content": None}], "message 2.*no content"),
        ([*conversation(1)[:2], {"role": "assistant", "text": "a"}], "message 2.*no content"),
        ([{"role": "user", "content": None}, conversation(1)[2]], "content of a user message"),
        ([{"role": "user", "content": "cut \ud83d"}, conversation(1)[2]], r"user has half.*ud83d"),
        ([*conversation(1)[:2], {**conversation(1)[2], "content": "\ud83d"}], "assistant has half"),
        ([*conversation(1)[:2], {**conversation(1)[2], "thinking": "\ud83d"}], "has half"),
        ([*conversation(1)[:2], calling("\ud83d", {})], "has half"),
        ([*conversation(1)[:2], calling("f", {"a": ["\ud83d"]})], "has half"),
        ([*conversation(1)[:2], calling("f", '{"a": "\\ud83d"}')], "has half"),
    ],
)
def test_rows_that_are_no_conversation_are_named(tmp_path, row, fact):
    others = [conversation(number) for number in range(5)]
    path = write(tmp_path / "chats.jsonl", [others[0], row, *others[1:]])
    with pytest.raises(ConfigError, match=rf"\brow 2\b.*{path.name}.*{fact}"):
        dataset_samples(config_of(path), TOKENIZER)
    write(path, others)
    assert len(dataset_samples(config_of(path), TOKENIZER).learnt) == 1


@pytest.mark.parametrize(
    ("weights", "learnt", "whole"),
    [((0, 1), "yy", "xyy"), ((1, 0), "x", "x"), ((1, None), "xyy", "xyy")],
)
def test_turns_of_weight_0_are_not_learned(tmp_path, weights, learnt, whole):
    row = conversation(0)
    for place, text, weight in zip((2, 4), ("x", "yy"), weights, strict=True):
        row[place] |= {"content": text, "weight": weight, "name": "", "audio": None}
    config = config_of(write(tmp_path / "chats.jsonl", [row] * 2), "--num_held_out", "1")
    (sample,) = dataset_samples(config, TOKENIZER).learnt
    shown = TOKENIZER.decode(sample.token_ids[sample.mask])
    assert shown.replace("<|end|>", "") == learnt
    turns = TOKENIZER.decode(sample.token_ids).split("<|assistant|>")[1:]
    assert "".join(turn.partition("<|end|>")[0] for turn in turns) == whole


@pytest.mark.parametrize(
    "told",
    [
        *({"loss_mask": 0}, {"loss_mask": 1}, {"loss_scale": 0.0}, {"loss_weight": 0}),
        *({"mask": True}, {"masked": True}, {"trainable": False}, {"training": False}),
        *({"train_detail": [{"begin_offset": 0, "train": False}]}, {"learn": False}),
    ],
    ids=json.dumps,
)
def test_turns_that_another_key_says_are_learned_or_not_are_refused(tmp_path, told):
    rows = [conversation(0), conversation(1)]
    rows[1][2] |= told
    config = config_of(write(tmp_path / "chats.jsonl", rows))
    with pytest.raises(ConfigError, match=rf"row 2\b.*message 2: has '{next(iter(told))}'.*weight"):
        read_conversations(config)
    rows[1][2] |= dict.fromkeys(told)
    assert len(read_conversations(config_of(write(tmp_path / "chats.jsonl", rows)))) == 2


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("field", ["messages", "first"])
@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "a", "completion": "b", "source": "x"}, "a"),
        ({"prompt": "a", "response": "b"}, "a"),
        ({"question": "a", "answer": "b"}, "a"),
        ({"instruction": "a", "output": "b"}, "a"),
        ({"instruction": "a", "input": "1", "output": "b"}, "a\n1"),
        ({"prompt": [ASKED], "completion": [SAID]}, "a"),
        ({"prompt": [ASKED], "completion": "b"}, "a"),
    ],
    ids=lambda row: "+".join(row) if isinstance(row, dict) else "",
)
def test_rows_of_a_question_and_its_answer_are_refused_with_what_makes_messages(
    tmp_path, row, asked, field
):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    chosen = field if field == "messages" else next(iter(row))
    with pytest.raises(ConfigError, match=r"row 1 of .*instead of a conversation") as caught:
        read_conversations(config_of(path, "--messages_field", chosen))
    code = str(caught.value).partition("in Python ")[2].partition(", and let")[0]
    exec(code, {}, {"row": row})
    path.write_text(json.dumps(row))
    (found,) = read_conversations(config_of(path))
    assert [(one.role, one.content) for one in found.messages] == [
        ("user", asked),
        ("assistant", "b"),
    ]


def test_a_conversation_beside_an_answer_is_read(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": [ASKED, SAID], "response": "b"}))
    (found,) = read_conversations(config_of(path, "--messages_field", "prompt"))
    assert [one.content for one in found.messages] == ["a", "b"]


def test_messages_of_from_and_value_are_refused_with_what_makes_them_messages(tmp_path):
    chat = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]
    chat += [{"from": "gpt", "value": "b"}]
    path = write(tmp_path / "chats.jsonl", [chat])
    with pytest.raises(ConfigError, match=r"row 1 of .*got 'from' and 'value'") as caught:
        read_conversations(config_of(path))
    code = str(caught.value).partition("in Python ")[2].partition(" for each")[0]
    write(path, [[eval(code, {}, {"m": m}) for m in chat]])
    (found,) = read_conversations(config_of(path))
    assert [one.role for one in found.messages] == ["system", "user", "assistant"]


def test_an_empty_row_is_refused(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [ASKED, SAID]}) + "\n{}\n")
    with pytest.raises(ConfigError, match=r"row 2 of .* is empty; remove it"):
        read_conversations(config_of(path))


def test_variables_of_the_template_in_a_row_are_refused(tmp_path):
    path, rows = tmp_path / "chats.jsonl", [{"messages": conversation(0)} for _ in range(3)]
    for row, values in zip(rows, (None, {"thinking": None}, {"thinking": False}), strict=True):
        row["chat_template_kwargs"] = values
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError, match=r"row 3\b.*'chat_template_kwargs'.*set chat_template"):
        read_conversations(config_of(path))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:2]))
    assert len(read_conversations(config_of(path))) == 2


def test_rows_with_pictures_in_a_column_are_refused(tmp_path):
    path, rows = tmp_path / "chats.jsonl", [{"messages": conversation(0)} for _ in range(3)]
    for row, seen in zip(rows, (None, [], ["a.png"]), strict=True):
        row["images"] = seen
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError, match=r"row 3\b.* a column 'images' .* trained on text"):
        read_conversations(config_of(path))


def test_conversations_are_read_as_they_are_written(tmp_path):
    arguments = [{"path": "a"}, {"n": 7}]
    calls = [{"id": "1", "function": {"name": "go", "arguments": one}} for one in arguments]
    rows = [
        [
            {"role": "user", "content": "2019-11-30T08:10:00"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2019-11-30", "tool_call_id": "1"},
            {"role": "assistant", "content": "2019-11-30", "thinking": "2019"},
        ]
        for call in calls
    ]
    found = read_conversations(config_of(write(tmp_path / "chats.jsonl", rows)))
    assert [one.messages[0].content for one in found] == ["2019-11-30T08:10:00"] * 2
    assert [one.messages[3].reasoning for one in found] == ["2019"] * 2
    written = [json.loads(one.messages[1].tool_calls[0].arguments) for one in found]
    assert written == arguments


def test_all_that_an_agent_asked_is_learned_and_each_answer_once(tmp_path):
    def said(*texts):
        roles = ("user", "assistant") * len(texts)
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    begun, branch, other = said("a", "b"), said("a", "b", "c", "d"), said("a", "b", "e", "f", "g")
    row = {"messages": said("task", "what the program printed")}
    row["conversations"] = [begun, branch, begun, other, said("x", "y")[:1]]
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "conversations": []}) + "\n")
    found = read_conversations(config_of(path))
    learned = [[one.messages[place].content for place in sorted(one.learnt)] for one in found]
    assert learned == [["b"], ["d"], ["f"], ["what the program printed"]]
    assert "conversation 4" in found[2].label
    path.write_text(json.dumps({**row, "other": begun}) + "\n")
    (chosen,) = read_conversations(config_of(path, "--messages_field", "other"))
    assert chosen.messages[0].content == "a"


@pytest.mark.parametrize(
    "arguments",
    [[{"path": {"a": 1}, "all": [{"x": 1}]}, {"n": 7, "path": {"b": 2}}], ['{"n": null}', "{}"]],
)
def test_keys_that_a_parquet_table_fills_with_nulls_are_left_out(tmp_path, arguments):
    """The columns of a table have one type, so arguments of one row are keys of all of them."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "go", "arguments": one}}],
                },
            ],
            "tools": [{"function": {"name": "go", "parameters": {"properties": one}}}],
        }
        for one in arguments
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    found = read_conversations(config_of(tmp_path / "chats.parquet"))
    calls = [one.messages[1].tool_calls[0] for one in found]
    texts = [one if isinstance(one, str) else json.dumps(one) for one in arguments]
    assert [json.loads(call.arguments) for call in calls] == [json.loads(one) for one in texts]
    assert [one.tools for one in found] == [row["tools"] for row in rows]


SHELL = {
    "type": "function",
    "function": {"name": "shell", "parameters": {"properties": {"command": {"type": "string"}}}},
}


def offering(path: Path, offered: list) -> Path:
    """Write a conversation for each of `offered`, which stands in its column `tools`."""
    rows = [
        {"messages": conversation(n), **({} if tools is None else {"tools": tools})}
        for n, tools in enumerate(offered)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_rollouts_of_evals_and_of_runs_are_conversations_with_their_tools(tmp_path):
    calls = (ToolCall(id="c", name="shell", arguments='{"command": "ls"}'),)
    messages = (
        Message(role="user", content="look"),
        Message(role="assistant", content="", tool_calls=calls),
        Message(role="tool", content="a b", tool_call_id="c"),
        Message(role="assistant", content="two files", reasoning="a and b"),
    )
    about = {"step": 1, "environment": "e", "example_id": "x", "group_id": "g"}
    row = RolloutRow(**about, index=0, status=RolloutStatus.KEPT, messages=messages, tools=(SHELL,))
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(plain(row_to_json(row))))
    write_rows(tmp_path / "step-000001.parquet", [row])
    for name in ("rollouts.jsonl", "step-000001.parquet"):
        (found,) = read_conversations(config_of(tmp_path / name))
        assert (found.messages, found.tools) == (messages, [SHELL])


def test_tools_that_a_conversation_offers_are_shown_and_not_learned(tmp_path):
    offered = [[SHELL], json.dumps([SHELL]), None, "", []]
    config = config_of(offering(tmp_path / "chats.jsonl", offered), "--num_held_out", "1")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (EXAMPLES / "agent.jinja").read_text()
    samples = dataset_samples(config, tokenizer)
    opening = "<|system|>Tools: shell(command)<|end|><|system|>say it again<|end|>"
    shown = 0
    for sample in (*samples.learnt, *samples.held_out):
        text = tokenizer.decode(sample.token_ids)
        is_shown = text.startswith(opening)
        assert is_shown or text.startswith("<|system|>say it again<|end|>")
        assert "shell" not in tokenizer.decode(sample.token_ids[sample.mask])
        shown += is_shown
    assert shown == 2


@pytest.mark.parametrize(
    ("tools", "facts"),
    [
        ([SHELL], "chat template.*chat_template"),
        ([SHELL["function"]], r"\brow 4\b.*tools.*function\.name"),
        ("no json", r"\brow 4\b.*tools"),
        ({"shell": {}}, r"\brow 4\b.*tools"),
        ([{"function": {"name": "a", "description": "\ud83d"}}], r"\brow 4\b.*tools.*has half"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused(tmp_path, tools, facts):
    path = offering(tmp_path / "chats.jsonl", [None, None, None, tools, None, None])
    with pytest.raises(ConfigError, match=facts):
        dataset_samples(config_of(path), TOKENIZER)


CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if not m.tool_calls or text }}"
    "{% for call in (m.tool_calls or [])[:shown] %}[{{ call.function.name }}]{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("shown", "has_text", "lost"),
    [(2, True, None), (0, True, "'shell'"), (1, True, "'shell'"), (2, False, "text beside")],
)
def test_calls_that_the_template_leaves_out_are_refused(tmp_path, shown, has_text, lost):
    calls = [{"id": name, "function": {"name": "shell", "arguments": "{}"}} for name in "ab"]
    said = {"role": "assistant", "content": " I ask shell: ", "tool_calls": calls}
    rows = [conversation(0), [{"role": "user", "content": "a"}, said]]
    config = config_of(write(tmp_path / "chats.jsonl", rows), "--num_held_out", "1")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = f"{{% set shown, text = {shown}, {has_text} %}}{CALLS}"
    if lost is None:
        assert len(dataset_samples(config, tokenizer).learnt) == 1
        return
    with pytest.raises(ConfigError, match=rf"\brow 2\b.*{lost}.*message 1\b.*chat_template"):
        dataset_samples(config, tokenizer)


@reads_datasets
def test_datasets_that_cannot_be_used(tmp_path):
    path = write(tmp_path / "chats.jsonl", [conversation(n) for n in range(4)])
    for flags, message in [
        (("--messages_field", "chat"), "'chat'.*messages_field.*messages"),
        ((), r"\b4 conversations.*num_held_out.*\b4\b"),
    ]:
        with pytest.raises(ConfigError, match=message):
            dataset_samples(config_of(path, *flags), TOKENIZER)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json\n")
    with pytest.raises(ConfigError, match=r"broken\.jsonl"):
        dataset_samples(config_of(broken), TOKENIZER)
    other = tmp_path / "chats.txt"
    other.write_text("hello")
    with pytest.raises(ConfigError, match=r"\.jsonl, \.json, \.csv"):
        dataset_samples(config_of(other), TOKENIZER)
    fewer = dataset_samples(config_of(path, "--num_held_out", "3"), TOKENIZER)
    assert (len(fewer.learnt), len(fewer.held_out)) == (1, 3)


PLAYED = ["--environments", '[{"name": "a"}]']


@pytest.mark.parametrize(
    ("flags", "facts", "fixed"),
    [
        ([*PLAYED, "--dataset", "x"], "environments.*dataset.*both", PLAYED),
        ([], "environments.*dataset.*neither", ["--dataset", "x"]),
        ([*PLAYED, "--too_long", "drop"], "too_long", ["--dataset", "x", "--too_long", "drop"]),
        (
            ["--dataset", ".", "--dataset_revision", "1"],
            "dataset_revision",
            ["--dataset", "some/rows", "--dataset_revision", "1"],
        ),
        (
            ["--dataset", __file__, "--dataset_split", "test"],
            "dataset_split.*is a file",
            ["--dataset", __file__, "--dataset_split", "train"],
        ),
        (
            ["--dataset", __file__, "--dataset_split", "train[:9]"],
            "dataset_split.*is a file",
            ["--dataset", str(Path(__file__).parent), "--dataset_split", "train[:9]"],
        ),
        ([*PLAYED, "--model", "./o"], "output must not.*model './o'", PLAYED),
        ([*PLAYED, "--model", "o/base"], "output must not.*model 'o/base'", PLAYED),
        *(
            (["--dataset", "x", f"--{name}", "1"], answer, ["--dataset", "x"])
            for name, answer in (
                ("gradient_accumulation_steps", "called 'batch_size'.*over all ranks"),
                ("per_device_train_batch_size", "called 'batch_size'.*over all ranks"),
                ("per_device_eval_batch_size", "seq_len if memory is short"),
                ("eval_dataset", "num_held_out"),
                ("eval.top_p", "num_held_out"),
                ("max_prompt_length", "seq_len bounds a whole conversation"),
                ("eval_steps", "called 'loss_log_every'"),
                ("eval_strategy", "called 'loss_log_every'"),
                ("assistant_only_loss", "always so"),
                ("completion_only_loss", "always so"),
                ("shuffle_dataset", "dataset.*order of the seed"),
                ("data.image_key", "come from dataset"),
                ("data.dataset", "called 'dataset'"),
                ("data.messages_key", "called 'messages_field'"),
                ("data.max_len", "called 'seq_len'"),
                ("truncation_mode", "called 'too_long'"),
                ("report_to", "use_wandb"),
                ("logger.wandb.project", "wandb_project"),
                ("optimizer_config.adam_betas", "by default"),
            )
        ),
    ],
)
def test_settings_of_the_source(flags, facts, fixed):
    base = ["--model", "m", "--output", "o"]
    with pytest.raises(ConfigError, match=facts):
        load_sft_config([], [*base, *flags])
    assert load_sft_config([], [*base, *fixed]).output == "o"
