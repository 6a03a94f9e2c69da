"""The pages as a parser sees them: what to type, what there is, and no text that is more."""

from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx
import pytest
from tests.envs.projects import toy_publication
from tests.envs.serving import served

from telescope_envs.records.release import Deprecation, Status

NASTY = "<script>document.title = 'owned'</script> & \"quotes\""


class Page(HTMLParser):
    """Collects texts, elements and the links that a browser would follow or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: set[str] = set()
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "action")]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A plain environment, and one whose texts try to be more than text."""
    with served(tmp_path_factory.mktemp("pages") / "hub") as hub:
        hub.store.publish(toy_publication(name="plain"))
        for version in ("0.1.0", "0.2.0"):
            hub.store.publish(toy_publication(version, name="nasty", summary=NASTY))
        status = Status(
            yanked={"0.2.0": "paid for <i>nothing</i>"},
            deprecated=Deprecation(reason="too <i>easy</i>", replacement="acme/plain"),
            advisories=("<u>Scores</u> differ.",),
        )
        hub.store.change_status("acme/nasty", lambda _: status)
        yield hub


@pytest.fixture
def open_page(hub):
    def read(path: str) -> Page:
        answer = httpx.get(f"{hub.address}/{path}", headers={"Accept": "text/html"})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        return Page(answer.text)

    return read


def test_the_front_page_lists_all_that_is_published(open_page, hub):
    page = open_page("")
    assert {f"telescope env search --registry {hub.address}", "acme/plain"} <= set(page.texts)
    assert f"0.1.0 (deprecated): {NASTY}" in page.texts


def test_an_empty_registry_says_so(tmp_path):
    with served(tmp_path / "hub") as hub:
        assert "Nothing is published yet." in httpx.get(f"{hub.address}/").text
        hub.store.publish(toy_publication())
        assert "Nothing is published yet." not in httpx.get(f"{hub.address}/").text


def test_the_page_of_an_environment_says_how_to_install_it_and_what_it_was(open_page, hub):
    assert {
        f"telescope env install acme/plain --registry {hub.address}",
        f"telescope env info acme/plain --registry {hub.address}",
        f"sha256 {toy_publication(name='plain').release.wheel.sha256}",
    } <= set(open_page("environments/acme/plain").texts)
    assert {
        NASTY,
        "Deprecated: too <i>easy</i>",
        "Advisory: <u>Scores</u> differ.",
        "(yanked: paid for <i>nothing</i>)",
    } <= set(open_page("environments/acme/nasty").texts)


@pytest.mark.slow
def test_every_text_is_only_a_text_and_every_link_leads_somewhere(open_page, hub):
    for path in ("", "environments/acme/nasty", "environments/acme/plain"):
        page = open_page(path)
        plain = {"html", "head", "meta", "title", "body", "h1", "p", "pre", "a", "br"}
        assert page.elements <= plain
        targets = [urljoin(f"{hub.address}/{path}", link) for link in page.links]
        assert targets
        assert {httpx.get(target).status_code for target in targets} == {200}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("environments/acme/plian", "did you mean 'acme/plain'"),
        ("no/such/thing", "there is nothing at 'no/such/thing'"),
    ],
)
def test_what_is_not_there_is_named(hub, path, text):
    answer = httpx.get(f"{hub.address}/{path}", headers={"Accept": "text/html"})
    assert answer.status_code == 404
    assert text in answer.json()["error"]
