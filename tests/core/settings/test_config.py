"""Settings from files and flags: layers, names, types, and what each mistake is answered with."""

import contextlib
import json
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from telescope_core.errors import ConfigError
from telescope_core.settings.config import (
    leaf_paths,
    load_config,
    save_resolved,
    split_arguments,
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Item(Strict):
    name: str
    weight: float = 1.0


class Plays(Strict):
    plays: tuple[Item, ...] = ()
    loud: bool = False


class Fit(Strict):
    rate: float = Field(default=0.5, gt=0)
    use_clip: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    shape: Literal["flat", "round"] = "flat"
    limit: int | None = None
    stop: tuple[str, ...] = ()


class Body(Strict):
    body: str
    size: int = 1


class Toy(Strict):
    body: Body
    fit: Fit = Field(default_factory=Fit)
    plays: Plays = Field(default_factory=Plays)
    items: tuple[Item, ...] = ()


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def load(files: list[Path], *flags: str) -> Toy:
    return load_config(
        Toy,
        files,
        flags,
        refused_names={
            "coarse": "it would be wrong; use rate",
            "critic.**": "nothing is judged",
            "store.*": "keep it yourself",
        },
        foreign_names={"lr": "rate", "batch": "size: of one batch", "clip.use": "use_clip"},
    )


def error(files: list[Path], *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(files, *flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("rate = 0.1\n\nsise = 2", "a.toml", 3),
        ("# sise\n[body]\nbody = 'sise'\n\nsise = 2", "a.toml", 5),
        ("[fit]\nstop = [\n 'a',\n 2,\n]", "a.toml", 4),
        ("[fit]\nlimit = [\n 'a',\n 2,\n]", "a.toml", 2),
        ('fit.limit = """\n[fit]\nsise = 1\n"""', "a.toml", 1),
        ("items = [\n  {name = 'a'},\n  {name = 'b', nam = 3},\n]", "a.toml", 3),
        ("items = [\n  {name = 'a'},\n  {},\n]", "a.toml", 3),
        ("items = [{name = '\u2028'}]\nsise = 2", "a.toml", 2),
        ("fit.stop = 3", "a.toml", 1),
        ("stop = 3", "a.toml", 1),
        ("[[items]]\nname = 'a'\n[[items]]\nname = 'b'\nnam = 3", "a.toml", 5),
        ("body:\n  body: b\n  sise: 2", "a.yaml", 3),
        ("items:\n- name: a\n- name: b\n  nam: 3", "a.yaml", 4),
        ("items: [{name: a},\n  {name: b, nam: 3}]\n", "a.yaml", 2),
        ('# [[\n{"fit": {\n  "stop": [\n"a",\n 2]}}', "a.yaml", 5),
        ('{\n "items": [\n  {"name": "a"},\n  {}\n ]}', "a.yaml", 4),
        ('items:\n- name: "a\u2028b"\nsise: 2', "a.yaml", 3),
    ],
)
def test_an_error_names_the_line_where_its_setting_begins(write, text, name, line):
    assert error([write(text, name)], "--body", "b").endswith(f" (line {line})")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("items = [\n  {name = 'a', parts = [\n  1], nam = 3},\n]", "a.toml"),
        ("base: &base\n  nam: 3\nitems:\n- <<: *base\n  name: a", "a.yaml"),
    ],
)
def test_no_line_is_named_rather_than_a_wrong_one(write, text, name):
    found = error([write(text, name)], "--body", "b")
    (told,) = (one for one in found.splitlines() if "items[0].nam:" in one)
    assert "(line" not in told


def test_a_file_of_yaml_is_not_read_again_for_each_of_its_lines(write, monkeypatch):
    read, scan = [], yaml.scanner.Scanner.__init__
    monkeypatch.setattr(yaml.scanner.Scanner, "__init__", lambda self: read.append(scan(self)))
    entries = "".join(f"- name: n{number}\n" for number in range(100))
    assert error([write(f"items:\n{entries}sise: 2", "a.yaml")], "--body", "b").endswith(
        " (line 102)"
    )
    assert len(read) == 2


def test_defaults_hold_where_nothing_is_said():
    config = load([], "--body", "b")
    assert config == Toy(body=Body(body="b"))


def test_later_files_win_leaf_by_leaf(write):
    first = write('[body]\nbody = "a"\nsize = 3\n[fit]\nstop = ["x", "y"]\n', "a.toml")
    second = write("body:\n  body: b\nfit:\n  stop: [z]\n", "b.yaml")
    config = load([first, second])
    assert (config.body.body, config.body.size, config.fit.stop) == ("b", 3, ("z",))


def test_flags_win_over_files(write):
    path = write('rate = 0.1\nbody = "a"\n')
    assert load([path], "--rate", "0.2").fit.rate == 0.2
    assert load([path], "--fit.rate=0.3").fit.rate == 0.3
    assert load([path], "--rate", "0.2", "--fit.rate", "0.4").fit.rate == 0.4


@pytest.mark.parametrize("flag", ["--use_clip", "--use-clip", "--fit.use_clip", "--fit.use-clip"])
def test_a_flag_may_leave_out_its_section_and_use_dashes(flag):
    assert load([], "--body", "b", flag).fit.use_clip is True


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--use_clip"], True),
        (["--use_clip", "true"], True),
        (["--use_clip", "False"], False),
        (["--use_clip=false"], False),
        (["--use_clip", "--rate", "1"], True),
        (["--no-use_clip"], False),
        (["--no_use_clip", "--rate", "1"], False),
        (["--no-fit.use-clip"], False),
        (["--no-use-clip", "--use-clip"], True),
    ],
)
def test_booleans_with_and_without_a_value(flags, expected):
    assert load([], "--body", "b", *flags).fit.use_clip is expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-rate"], "flag --no-rate: unknown setting 'no_rate'; did you mean 'rate'"),
        (["--no-use_clip", "true"], "unexpected argument 'true'"),
        (["--no-use_clip=true"], "flag --no-use_clip: unknown setting 'no_use_clip'"),
    ],
)
def test_only_booleans_are_turned_off_and_without_a_value(flags, says):
    assert says in error([], "--body", "b", *flags)


def test_lists_are_json_and_null_means_absent():
    config = load([], "--body=b", "--betas", "[0.1, 0.2]", "--limit", "null", "--stop", '["]"]')
    assert config.fit.betas == (0.1, 0.2)
    assert config.fit.limit is None
    assert config.fit.stop == ("]",)


def test_text_flags_are_taken_as_they_are():
    assert load([], "--body", "12").body.body == "12"
    assert load([], "--body=--x").body.body == "--x"


def test_negative_numbers_are_values():
    assert load([], "--body", "b", "--size", "-3").body.size == -3


def test_a_section_and_a_leaf_may_share_a_name(write):
    assert load([write('body = "leaf"\n')]).body.body == "leaf"
    path = write('body = "b"\n[[plays]]\nname = "x"\n')
    assert load([path]).plays.plays == (Item(name="x"),)
    path = write('body = "b"\n[plays]\nloud = true\n[[plays.plays]]\nname = "x"\n')
    assert load([path]).plays == Plays(plays=(Item(name="x"),), loud=True)


def test_twice_in_one_file_is_an_error(write):
    message = error([write('rate = 1\nbody = "b"\n[fit]\nrate = 2\n')])
    assert "rate is set twice" in message
    assert "[fit]" in message
    assert "given twice" in error([write("rate: 1\nrate: 2\n", "a.yaml")])
    assert "contains itself" in error([write("stop: &a [*a]\n", "a.yaml")])
    assert "cannot be parsed" in error([write("rate = 1\nrate = 2\n")])


def test_yaml_scalars_are_those_of_version_1_2(write):
    path = write("body: on\nrate: 1e-3\nstop: [yes, 12:30, ~]\n", "a.yaml")
    assert "fit.stop[2]" in error([path])
    path = write("body: on\nrate: 1e-3\nstop: [yes, 12:30, null-ish]\nlimit: ~\n", "a.yaml")
    config = load([path])
    assert (config.body.body, config.fit.rate) == ("on", 1e-3)
    assert config.fit.stop == ("yes", "12:30", "null-ish")
    assert load([write("body: b\nlimit:\n", "b.yaml")]).fit.limit is None
    assert load([write("body: 007\nrate: 2e3\nsize: -5\n", "c.yaml")]).body.body == "007"
    merged = "body: b\nfit: &a {rate: 0.1}\nitems: [&b {name: x}, {<<: *b, weight: 2}]\n"
    assert load([write(merged, "d.yaml")]).items[1] == Item(name="x", weight=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ratte = 1", "unknown setting 'ratte'; did you mean 'rate'"),
        ("[fit]\nratte = 1", "fit.ratte: unknown setting 'ratte'; did you mean 'rate'"),
        ("[fti]\nrate = 1", "unknown setting 'fti'; did you mean 'fit'"),
        ("[fti]\nrat = 1", "unknown section 'fti'; did you mean 'fit'"),
        ("[rats]\nno = 1", "unknown section 'rats'; known: "),
        ("[item]\nno = 1", "unknown section 'item'; did you mean 'items'"),
        (
            "[fit]\nsize = 1",
            "'size' is a setting, but it does not belong to [fit]; set it in [body]",
        ),
        ("[fit]\nitems = []", "set it above the first [section]"),
        ("[[items]]\nitems = []", "items[0].items: 'items' is a setting, but not of each entry; "),
        ("[[items]]\nrate = 1", "set it in [fit]"),
        ("lr = 1", "here it is called 'rate' (fit.rate)"),
        ("[fit]\nlr = 1", "here it is called 'rate' (fit.rate)"),
        ("coarse = 1", "coarse: 'coarse' is no setting here: it would be wrong; use rate"),
        ("[fit]\ncoarse = 1", "fit.coarse: 'coarse' is no setting here: it would be wrong"),
        ("[tuner.schedule]\nlr = 1", "tuner.schedule.lr: unknown setting 'lr'; here it is called"),
        ("[tuner]\nrate = 1", "there is no section [tuner] here, and 'rate' is a setting; set it"),
        ("[critic.net]\nrate = 1", "there is no [critic] here: nothing is judged"),
        ("[store]\nlr = 1", "store.lr: unknown setting 'lr'; here it is called 'rate'"),
        ("[store]\nrate = 1", "store.rate: there is no [store] here: keep it yourself"),
        ("[shape]\nside = 1", "shape.side: unknown setting"),
        ("[[runs]]\nlr = 1", "runs.lr: unknown setting 'lr'; here it is called 'rate'"),
        ("batch = 1", "here it is called 'size' (body.size): of one batch"),
        ("fit = 3", "expected a table [fit] of settings, got 3"),
        ("rate = 'x'", "fit.rate: expected a valid number, got 'x'"),
        ("use_clip = 1", "fit.use_clip: expected true or false, got 1"),
        ("size = 1.5", "body.size: expected a valid integer, got 1.5"),
        ("size = true", "body.size: expected a valid integer, got true"),
        ("rate = -1", "fit.rate: expected greater than 0, got -1"),
        ("rate = nan", "fit.rate: expected"),
        ("shape = 'flatt'", "fit.shape: expected 'flat' or 'round', got 'flatt'"),
        ("betas = [1]", "fit.betas"),
        ("[[items]]\nweight = 2", "items[0].name is required; add name there"),
        ("[[items]]\nname = 'a'\nwieght = 2", "items[0].wieght: unknown setting 'wieght'"),
        ("[[items]]\nname = 'a'\nlr = 2", "items[0].lr: unknown setting 'lr'; here it is called"),
        ("[[plays]]\nname = 'a'\nweight = 'b'", "plays.plays[0].weight: expected a valid number"),
        ("rate = 1979-05-27", "expected text, a number"),
    ],
)
def test_mistakes_in_a_file_name_the_file_the_key_and_the_fix(write, text, expected):
    path = write(text + "\n")
    message = error([path], "--body", "b")
    assert expected in message
    assert message.startswith(str(path))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--ratte", "1"], "flag --ratte: unknown setting 'ratte'; did you mean 'rate'"),
        (["--rate"], "expected a value after the flag"),
        (["--rate", "--size", "1"], "expected a value after the flag"),
        (["rate=1"], "unexpected argument 'rate=1'"),
        (["--rate", "fast"], "flag --rate: fit.rate: expected a valid number, got 'fast'"),
        (["--use_clip=maybe"], "expected true or false, got 'maybe'"),
        (["--weight", "2"], "'weight' is a setting of each [[plays]] entry"),
        (["--items.0.name", "x"], "pass a list or table as a whole, in JSON"),
        (["--items.name", "x"], "pass a list or table as a whole, in JSON"),
        (["--items", '[{"name": "x", "name": "y"}]'], "an object has the key 'name' twice"),
        (["--items", "[{name: 1}]"], "begins like JSON but is not valid JSON"),
        (
            ["--fit.size", "1"],
            "'size' is a setting, but it does not belong to [fit]; set it in [body]",
        ),
        (["--items", '[{"nam": "x"}]'], "unknown setting 'nam'; did you mean 'name'"),
        (["--"], "unexpected argument '--'"),
        (["--lr", "1"], "here it is called 'rate'"),
        (
            ["--actor.rate", "1"],
            "there is no section [actor] here, and 'rate' is a setting; set it",
        ),
        (["--actor.optim.lr", "1"], "here it is called 'rate'"),
        (["--clip.use=1"], "flag --clip.use: unknown setting 'use'; here it is called 'use_clip'"),
        (["--shape.side", "1"], "flag --shape.side: unknown section 'shape'; known: body"),
        (["--betas.0", "1"], "pass a list or table as a whole, in JSON"),
    ],
)
def test_mistakes_in_flags(flags, expected):
    assert expected in error([], "--body", "b", *flags)


def test_assignments_as_other_systems_take_them_are_answered():
    assert "argument +actor.lr=1: unknown setting 'lr'; here it is called 'rate'" in error(
        [Path("+actor.lr=1")]
    )
    assert "a setting is written --fit.rate VALUE" in error([Path("fit.rate=1")])


def test_all_unknown_names_are_answered_in_one_message(write):
    foreign = "[actor]\nlr = 1\nbatch = 2\ncoarse = 3\n[critic]\nrate = 1\nfoo.bar = 2\n"
    other = write("ratte = 1\nzzz = 1\n", "b.toml")
    message = error([write(foreign), other], "--lr", "1", "--body", "b")
    lines = message.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{other.parent / 'run.toml'}: 5 names are not settings here; write what you need under "
        "the names on the right",
        f"{other}: 2 names are not settings here",
        "flags: 1 name is no setting here; write what you need under the names on the right",
    ]
    assert "    actor.lr -> fit.rate" in lines
    assert "    actor.batch -> body.size (of one batch)" in lines
    assert "    actor.coarse: it would be wrong; use rate" in lines
    assert "    critic: nothing is judged" in lines
    assert "    ratte, zzz" in lines
    assert "    --lr -> fit.rate" in lines
    few = error([write("ratte = 1\n[fit]\nlr = 2\n")], "--body", "b")
    assert len(few.splitlines()) == 2
    assert "did you mean 'rate'" in few


def test_every_wrong_value_is_reported_at_once(write):
    message = error([write("rate = 'x'\nsize = 'y'\n")])
    assert "fit.rate" in message
    assert "body.size" in message
    assert "body.body is required; set it in a file, or pass --body VALUE" in message


def test_missing_and_broken_files(write, tmp_path):
    write("", "quick.toml")
    assert "did you mean" in error([tmp_path / "quikc.toml"])
    assert "does not exist either" in error([tmp_path / "no" / "a.toml"])
    assert "ending in .toml, .yaml, .yml" in error([write("{}", "a.json")])
    assert "cannot be parsed" in error([write("a = = 1")])
    assert "cannot be parsed" in error([write("a: [1", "a.yaml")])
    assert "expected a table of settings" in error([write("- 1\n", "a.yaml")])
    assert "keys must be text, got 1" in error([write("1: 2\n", "a.yaml")])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in error([tmp_path / "binary.toml"])
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read" in error([tmp_path / "folder.toml"])


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "[body]\nbody = 'b'"), ("a.yaml", "{body: {body: b}}")]
)
def test_a_byte_order_mark_is_skipped(write, name, text):
    assert load([write(f"\ufeff{text}\n", name)]) == Toy(body=Body(body="b"))


def test_an_empty_file_says_nothing(write):
    assert load([write("", "a.yaml"), write("")], "--body", "b") == Toy(body=Body(body="b"))


def test_files_stand_before_flags():
    assert split_arguments(["a.toml", "b.yaml", "--x", "c"]) == (
        [Path("a.toml"), Path("b.yaml")],
        ["--x", "c"],
    )
    assert split_arguments(["a.toml"]) == ([Path("a.toml")], [])


def test_two_leaves_of_one_name_are_a_defect_of_the_schema():
    class Left(Strict):
        same: int = 0

    class Twice(Strict):
        left: Left = Left()
        same: int = 0

    with pytest.raises(AssertionError, match="same"):
        leaf_paths(Twice)


def test_the_resolved_file_reads_back_equal(tmp_path):
    config = load([], "--body", "b", "--items", '[{"name": "x"}]')
    save_resolved(config, tmp_path / "config.json")
    written = (tmp_path / "config.json").read_text()
    assert Toy.model_validate_json(written, strict=True) == config
    assert json.loads(written)["fit"]["rate"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=8)
toys = st.builds(
    Toy,
    body=st.builds(Body, body=words, size=st.integers(-(2**53), 2**53)),
    fit=st.builds(
        Fit,
        rate=st.floats(1e-300, 1e300),
        use_clip=st.booleans(),
        betas=st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)),
        shape=st.sampled_from(["flat", "round"]),
        limit=st.none() | st.integers(-9, 9),
        stop=st.lists(words, max_size=3).map(tuple),
    ),
    items=st.lists(st.builds(Item, name=words), max_size=2).map(tuple),
)


@pytest.mark.slow
@given(toys)
@settings(max_examples=60)
def test_any_settings_survive_yaml_and_flags(tmp_path_factory, toy):
    path = tmp_path_factory.mktemp("toy") / "a.yaml"
    path.write_text(toy.model_dump_json(), encoding="utf-8")
    assert load([path]) == toy
    flags = []
    for name, keys in leaf_paths(Toy).items():
        value = toy.model_dump(mode="json")
        for key in keys:
            value = value[key]
        flags.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    assert load([], *flags) == toy


@given(st.lists(st.text(max_size=12), max_size=4))
@settings(max_examples=150)
def test_any_flags_are_accepted_or_refused_with_a_config_error(flags):
    with contextlib.suppress(ConfigError):
        load([], "--body", "b", *flags)
