"""The pages as a parser sees them: every fact, every link, and no text that is more than text."""

from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx
import pytest
from tests.envs.projects import toy_publication
from tests.envs.server.showing import NASTY, fill_with_everything
from tests.envs.serving import served

from telescope_envs.server.pages import PER_PAGE


class Page(HTMLParser):
    """Collects texts, elements and the links that a browser would follow or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "action")]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with served(tmp_path_factory.mktemp("pages") / "hub") as hub:
        fill_with_everything(hub.store)
        yield hub


@pytest.fixture(scope="module")
def client(hub):
    with httpx.Client(base_url=f"{hub.address}/", follow_redirects=True) as client:
        yield client


@pytest.fixture(scope="module")
def open_page(client):
    def read(path: str, status=200) -> Page:
        answer = client.get(path, headers={"Accept": "text/html"})
        assert answer.status_code == status
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        return Page(answer.text)

    return read


def test_the_front_page_lists_all_that_is_published(open_page):
    page = open_page("")
    assert {"acme/plain", "acme/nasty", "2 environments", "validated"} <= set(page.texts)
    assert page.texts.index("acme/plain") < page.texts.index("acme/nasty"), "deprecated comes last"
    assert {"deprecated", "calm", NASTY} <= set(page.texts)


def test_a_search_finds_words_and_tags(open_page):
    assert "acme/plain" in open_page("?q=plain").texts
    assert "acme/nasty" not in open_page("?q=plain").texts
    assert "2 environments" in open_page("?tag=calm").texts
    assert "1 environment" in open_page("?tag=%3Cb%3Ebold%3C%2Fb%3E").texts
    assert "No environment matches. Try fewer words." in open_page("?q=nothing-like-it").texts


def test_a_page_says_all_that_is_known(open_page, hub):
    texts = set(open_page("environments/acme/plain").texts)
    assert {
        f"telescope env install acme/plain --registry {hub.address}",
        "0 to 1; solved at 1 or more",
        "train: 1 example",
        "openai/gsm8k at 777777777777, with dataset=gsm8k",
        "passed (policy 1)",
        "telescope-core",
        "MIT",
        "acme",
        "ab" * 32,
        "f" * 40,
        toy_publication(name="plain").release.wheel.sha256,
    } <= texts
    texts = set(open_page("environments/acme/nasty").texts)
    assert {"Deprecated.", "acme/plain", "Advisory.", "yanked", "OPENAI_API_KEY"} <= texts
    assert {"during rollouts", "train: endless", "0.3.0rc1"} <= texts


def test_every_text_is_only_a_text(open_page):
    for path in ("", "environments/acme/nasty", "?q=<script>alert(1)</script>"):
        page = open_page(path)
        assert not {"script", "img", "i", "u", "b", "iframe"} & set(page.elements)
        assert not [link for link in page.links if link.startswith("javascript:")]
    texts = " ".join(page.texts)
    assert "<script>alert(1)</script>" in texts
    nasty = open_page("environments/acme/nasty").texts
    assert {NASTY, "<img src=x onerror=alert(1)>", "<b>bold</b>"} <= set(nasty)


def test_every_link_leads_somewhere(open_page, hub, client):
    targets = {
        urljoin(f"{hub.address}/{path}", link)
        for path in ("", "environments/acme/plain", "environments/acme/nasty", "?q=plain&page=1")
        for link in open_page(path).links
    }
    outside = {target for target in targets if not target.startswith(hub.address)}
    assert outside == {"https://example.org/acme/plain"}
    answers = {target: client.get(target).status_code for target in targets - outside}
    assert {target: code for target, code in answers.items() if code != 200} == {}


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("environments/acme/plian", 404, "did you mean 'acme/plain'"),
        ("?quary=x", 400, "unknown parameter 'quary'; known: page, q, tag"),
        ("?page=0", 400, "query.page: Input should be greater than or equal to 1"),
        ("no/such/thing", 404, "there is nothing at 'no/such/thing'"),
    ],
)
def test_what_goes_wrong_is_a_page_as_well(open_page, hub, client, path, status, text):
    page = open_page(path, status)
    assert any(text in shown for shown in page.texts)
    home = [urljoin(f"{hub.address}/{path}", link) for link in page.links]
    assert f"{hub.address}/" in home
    assert client.get(path).json().keys() == {"error", "what_to_do"}


def test_long_lists_have_pages(tmp_path):
    with served(tmp_path / "hub") as hub, httpx.Client(base_url=f"{hub.address}/") as client:
        assert "Nothing is published yet." in client.get("").text
        for number in range(PER_PAGE + 1):
            hub.store.publish(toy_publication(name=f"env-{number:02}"))
        first = Page(client.get("").text)
        assert f"{PER_PAGE + 1} environments" in first.texts
        assert "acme/env-24" in first.texts
        assert "acme/env-25" not in first.texts
        (later,) = [link for link in first.links if "page=2" in link]
        second = Page(client.get(later).text)
        assert "acme/env-25" in second.texts
        assert [link for link in second.links if "page=1" in link]


def test_a_search_for_programs(client):
    def search(**parameters) -> httpx.Response:
        return client.get("api/search", params=parameters)

    found = search(q="plain").json()
    assert (found["total"], found["results"][0]["id"]) == (1, "acme/plain")
    assert search(tag=["calm", "<b>bold</b>"]).json()["total"] == 1
    both = search().json()["results"]
    assert [search(limit=1, offset=n).json()["results"] for n in (0, 1, 2)] == [
        both[:1],
        both[1:],
        [],
    ]
    etag = search(q="plain").headers["etag"]
    again = client.get("api/search", params={"q": "plain"}, headers={"If-None-Match": etag})
    assert again.status_code == 304
    assert "unknown parameter 'query'" in search(query="plain").json()["error"]
    assert "query.limit" in search(limit=1000).json()["error"]
    assert search(q="x" * 201).status_code == 400


def test_the_style_sheet_loads_nothing(client):
    answer = client.get("static/hub.css")
    assert answer.headers["content-type"].startswith("text/css")
    assert "url(" not in answer.text
    assert "@import" not in answer.text
    assert len(answer.content) < 8192
