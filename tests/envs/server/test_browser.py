"""The pages in a real Chromium: as people find, read and copy, on small screens and in the dark."""

import pytest
from tests.chromium import browser
from tests.envs.server.showing import NASTY, fill_with_everything
from tests.envs.serving import served

pytestmark = pytest.mark.slow

WIDER_THAN_THE_WINDOW = """
[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest('.unseen'))
  .map(e => e.outerHTML.slice(0, 80))
"""
CONTRASTS = """
(() => {
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    const c = getComputedStyle(e).backgroundColor;
    return c === 'rgba(0, 0, 0, 0)' && e.parentElement ? behind(e.parentElement) : c;
  };
  return [...document.querySelectorAll('body *')].filter(e => e.innerText).map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.innerText.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
})()
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with served(tmp_path_factory.mktemp("browser") / "hub") as hub:
        fill_with_everything(hub.store)
        yield hub


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_a_person_searches_reads_and_copies(page, hub):
    page.complaints.clear()
    page.resize(1100)
    page.open(f"{hub.address}/")
    assert "2 environments" in page.text()
    page.evaluate("document.querySelector('#q').focus()")
    page.type("plain")
    page.wait_for_load()
    assert "1 environment" in page.text()
    assert page.evaluate("location.search") == "?q=plain"
    page.click("a.name")
    page.wait_for_load()
    assert page.evaluate("document.title").startswith("acme/plain - ")
    page.click("pre code")
    copied = page.evaluate("getSelection().toString().trim()")
    assert copied == f"telescope env install acme/plain --registry {hub.address}"
    assert page.complaints == []


@pytest.mark.parametrize("path", ["", "environments/acme/nasty", "environments/acme/plain", "none"])
def test_pages_fit_small_screens_and_can_be_read_in_the_dark(page, hub, path):
    for width in (320, 1100):
        page.resize(width)
        page.open(f"{hub.address}/{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(WIDER_THAN_THE_WINDOW) == []
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    backgrounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        assert page.evaluate(CONTRASTS) == [], scheme
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] == "rgb(255, 255, 255)"
    assert backgrounds[1] != backgrounds[0]


def test_no_text_of_a_publisher_runs(page, hub):
    page.complaints.clear()
    for path in ("", "environments/acme/nasty", "?q=<script>document.title='owned'</script>"):
        page.open(f"{hub.address}/{path}")
        assert page.evaluate("document.scripts.length + document.images.length") == 0
        assert "owned" not in page.evaluate("document.title").replace("document.title='owned'", "")
    page.open(f"{hub.address}/environments/acme/nasty")
    assert NASTY in page.text()
    assert page.complaints == []


def test_a_script_that_slipped_in_would_be_refused(page, hub):
    page.open(f"{hub.address}/")
    page.complaints.clear()
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.body.append(s); })()"
    )
    assert page.evaluate("window.ran === undefined")
    policy = "Content Security Policy"
    assert any(policy in text for text in page.complaints)
