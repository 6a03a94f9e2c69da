"""Pictures in messages: from a file to the endpoint, into records, and onto the report."""

import base64
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.pictures import png

from telescope_core import (
    Example,
    Image,
    Message,
    SingleTurnEnvironment,
    message_of,
    read_image,
    reward,
)
from telescope_core.base.images import why_unusable
from telescope_core.base.messages import message_from_json, message_to_json, message_to_record
from telescope_core.errors import EndpointError, EnvironmentLoadError
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.examples.rows import example_of
from telescope_core.images import MAX_IMAGE_BYTES, image_of, parts_of, with_marks
from telescope_core.in_process import InProcessEnvironment
from telescope_core.judge import transcript
from telescope_core.records.parquet import read_rows, write_rows
from telescope_core.records.rows import RolloutRow, row_from_json, row_to_json
from telescope_core.reports.rollouts_html import Pictures, sample, sample_list
from telescope_core.types import RolloutStatus, Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
from loopback_endpoint import ask, reply, serving

RED, GREEN = image_of(png(255)), image_of(png(0))
TWO = message_of("user", "Is ", RED, " or ", GREEN, " redder?")
URL = f"data:image/png;base64,{RED.data}"
PARTS = st.lists(
    st.one_of(st.text(min_size=1, max_size=5), st.sampled_from([RED, GREEN])), max_size=6
)


def row(*messages: Message) -> RolloutRow:
    return RolloutRow(
        step=0,
        environment="it",
        example_id="e",
        group_id="g",
        index=0,
        status=RolloutStatus.KEPT,
        messages=messages,
    )


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.png", png(), "image/png"),
        ("a.jpeg", b"\xff\xd8\xff\xe0rest", "image/jpeg"),
        ("a.gif", b"GIF89arest", "image/gif"),
        ("a.webp", b"RIFF\0\0\0\0WEBPrest", "image/webp"),
    ],
)
def test_a_picture_is_read_from_a_file_and_its_kind_from_its_bytes(tmp_path, name, data, kind):
    (tmp_path / name).write_bytes(data)
    image = read_image(tmp_path / name)
    assert (image.media_type, base64.b64decode(image.data)) == (kind, data)


def test_what_is_no_picture_is_named(tmp_path):
    with pytest.raises(EnvironmentLoadError, match=r"test_images\.py:\d+: .*missing\.png"):
        read_image(tmp_path / "missing.png")
    (tmp_path / "a.svg").write_text("<svg/>")
    with pytest.raises(EnvironmentLoadError, match=r"test_images\.py:\d+: .*a\.svg.*b'<svg/>'"):
        read_image(tmp_path / "a.svg")
    (tmp_path / "a.png").touch()
    with pytest.raises(EnvironmentLoadError, match=r"test_images\.py:\d+: .*a\.png is empty"):
        read_image(tmp_path / "a.png")
    with pytest.raises(EnvironmentLoadError, match=r"[\d,]+ bytes.*20 MiB"):
        image_of(png() + bytes(MAX_IMAGE_BYTES))


class Unprintable:
    """Like an array of numbers, which adds up with everything."""

    def __radd__(self, other):
        return other

    def __bool__(self):
        raise ValueError("ambiguous")


@pytest.mark.parametrize("value", [png(), Path("a.png"), None, Unprintable()])
def test_what_other_libraries_call_a_picture_is_refused_with_what_to_do(value):
    with pytest.raises(EnvironmentLoadError, match=r"test_images\.py:\d+: .*read_image"):
        message_of("user", "a", value)
    if not isinstance(value, bytes):
        with pytest.raises(EnvironmentLoadError, match=r"test_images\.py:\d+: .*read_image"):
            image_of(value)


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        ("data:image/jpg;base64", "image/jpeg"),
        ("DATA:IMAGE/PNG;Base64", "image/png"),
        ("data:image/png;charset=utf-8;base64", "image/png"),
        ("data:image/webp;base64", "image/webp"),
    ],
)
def test_data_urls_are_read_as_people_write_them(begin, kind):
    part = {"type": "image_url", "image_url": {"url": f"{begin},{RED.data}"}}
    message = message_from_json({"role": "user", "content": [part]})
    assert message.images == (Image(media_type=kind, data=RED.data),)


def test_how_closely_an_endpoint_is_to_look_is_kept_in_every_form():
    url = {"url": URL, "detail": "low"}
    row = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
    message = message_from_json(row)
    assert parts_of(message) == row["content"]
    for form in (message_to_json, message_to_record):
        assert message_from_json(json.loads(json.dumps(form(message)))) == message
    assert "detail" in why_unusable(
        replace(message, images=(replace(message.images[0], detail=1),))
    )


def test_texts_and_pictures_keep_their_order():
    parts = parts_of(TWO)
    assert [part.get("text") for part in parts] == ["Is ", None, " or ", None, " redder?"]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert pictures == [URL, f"data:image/png;base64,{GREEN.data}"]
    assert TWO.content == "Is  or  redder?"
    assert with_marks(TWO) == "Is [image/png, 1 KB] or [image/png, 1 KB] redder?"


@given(PARTS)
def test_every_form_of_a_message_gives_it_back(parts):
    message = message_of("user", *parts)
    for form in (message_to_json, message_to_record):
        assert message_from_json(json.loads(json.dumps(form(message)))) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message
    assert isinstance(message_to_record(message)["content"], str)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a"}}, "an address are not fetched"),
        ({"type": "image_url", "image_url": "data:image/svg+xml;base64,AA"}, "with one of image/p"),
        ({"type": "image_url", "image_url": "data:image/png,AA"}, "with one of image/png"),
        ({"type": "input_audio"}, "audio'}"),
        ({"type": "image"}, "'image'}"),
    ],
)
def test_a_part_that_cannot_be_kept_is_refused(part, said):
    with pytest.raises(ValueError, match="'text'") as error:
        message_from_json({"role": "user", "content": [part]})
    assert said in str(error.value)
    assert ("fetched" in str(error.value)) == ("fetched" in said)


def test_rows_of_data_have_pictures_as_parts():
    content = [{"type": "text", "text": "What is it?"}, parts_of(TWO)[1]]
    example = example_of({"prompt": [{"role": "user", "content": content}]}, where="row 1")
    [message] = example.prompt
    assert [image.data for image in message.images] == [RED.data]
    assert message == message_of("user", "What is it?", RED)
    with pytest.raises(EnvironmentLoadError, match="row 1, field 'prompt', message 0: "):
        example_of({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, where="row 1")


async def test_an_endpoint_gets_the_pictures():
    async with serving(reply("red")) as (endpoint, client):
        await ask(client, (TWO,))
        assert endpoint.requests[0]["messages"] == [{"role": "user", "content": parts_of(TWO)}]


async def test_an_endpoint_that_takes_none_is_told_with_what_to_do():
    async with serving((400, "text only")) as (_, client):
        with pytest.raises(EndpointError, match=r"text only.*holds 2 pictures, .* many models"):
            await ask(client, (TWO,))
        with pytest.raises(EndpointError) as plainly:
            await ask(client)
    assert "picture" not in str(plainly.value)


def test_records_keep_pictures_and_text_stays_text(tmp_path):
    rows = [row(TWO, Message(role="assistant", content="the first")), row(replace(TWO, images=()))]
    assert [row_from_json(json.loads(json.dumps(row_to_json(one)))) for one in rows] == rows
    write_rows(tmp_path / "rows.parquet", rows)
    assert list(read_rows([tmp_path / "rows.parquet"])) == rows


def test_the_report_shows_them_and_trusts_no_type():
    hostile = Image(media_type='image/png"onerror="alert(1)', data="AA==")
    page = sample(row(TWO, Message(role="user", content="x", images=(hostile,))), Pictures())
    assert page.count('<img class="picture"') == 3
    assert URL in page
    assert 'png"onerror' not in page
    assert "Is [image/png, 1 KB] or" in page


def test_the_report_writes_a_picture_once_and_only_as_many_as_have_room():
    large = [Image(media_type="image/png", data=one * 12 * 2**20) for one in "ABCD"]
    asked = [row(message_of("user", "of ", one, RED)) for one in (*large, large[1])]
    page = sample_list(asked, {}, kinds_of=lambda row: ())
    assert [page.count(one.data) for one in (*large, RED)] == [1, 1, 0, 0, 1]
    assert 24 * 2**20 < len(page) < 25 * 2**20
    assert "2 more are only named in the text, such as [image/png, 12 KB]; telescope ui" in page
    assert re.findall(r'<img [^>]*(?: id| data-same)="([^"]*)', page) == [
        *("picture-1", "picture-2", "picture-3", "picture-2"),
        *("picture-2", "picture-2", "picture-3", "picture-2"),
    ]


def test_a_judge_reads_marks_in_their_place():
    before, between, after = transcript([TWO]).split("[image/png, 1 KB]")
    assert before.splitlines() == ["[user]", "Is "]
    assert (between, after.strip()) == (" or ", "redder?")


class Shown(SingleTurnEnvironment):
    asked = (TWO,)

    def examples(self, split):
        return [Example(id="a", prompt=self.asked, answer="the first")]

    @reward
    def right(self, completion, answer):
        return float(completion == answer)


async def test_an_environment_with_pictures_is_evaluated():
    settings = EvalSettings(num_examples=1, rollouts=1, sampling=Sampling(max_tokens=5))
    rows = []
    async with serving(reply("the first")) as (endpoint, client):
        environment = InProcessEnvironment(Shown(), name="it")
        result = await run_eval(environment, client, settings, on_rollout=rows.append)
        await environment.close()
    assert result.reward.mean == 1.0
    assert endpoint.requests[0]["messages"][0]["content"] == parts_of(TWO)
    assert rows[0].messages[0] == TWO


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (replace(TWO, role="system"), "only messages of the roles user and tool"),
        (replace(TWO, images=[RED]), "images must be a tuple of Image, got ["),
        (replace(TWO, images=("a.png",)), "write: images=(read_image('a.png'),)"),
        (replace(TWO, images=(replace(RED, at=99),)), "stands at 99, which must be from 0 to"),
        (replace(TWO, images=(replace(RED, at=4), RED)), "stands at 0, which must be from 4"),
        (replace(TWO, images=(replace(RED, data="no!"),)), "is not base64: 'no!'"),
        (replace(TWO, images=(replace(RED, data="AAAA"),)), "begins with b'"),
        (replace(TWO, images=(replace(RED, data=f"{RED.data[:88]}\nAAA"),)), "with '\\n' among"),
        (replace(TWO, images=(replace(RED, data=f"{RED.data[:88]}=AAA"),)), "which ends wrong"),
        (
            replace(TWO, images=(replace(RED, data=f"{RED.data[:88]}\xe9==="),)),
            "with '\xe9===' among",
        ),
        (replace(TWO, images=(replace(RED, data=RED.data[:-1]),)), "which ends wrong"),
        (replace(TWO, images=(replace(RED, data=png()),)), "must be base64 text, got b'"),
        (replace(TWO, images=(replace(RED, media_type="image/svg+xml"),)), "expected one of image"),
    ],
)
async def test_what_cannot_be_sent_is_told_where_the_author_wrote_it(message, said):
    class Wrong(Shown):
        asked = (message,)

    client = InProcessEnvironment(Wrong(), name="it")
    with pytest.raises(EnvironmentLoadError, match=re.escape(said)) as error:
        await client.describe()
    await client.close()
    assert "example" in str(error.value)
    assert "Wrong" in str(error.value)
