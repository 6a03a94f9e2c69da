"""Every page in a real Chromium: without errors, by keys and clicks, small, dark and exported."""

import threading
from dataclasses import replace
from urllib.parse import quote

import pytest
from tests.chromium import browser
from tests.core.diagnosis.test_rules import healthy, rising
from tests.ui.browsing import (
    FIRST_ROLLOUT,
    IS_WIDER_THAN_THE_WINDOW,
    SETTLED,
    all_pages,
    enter,
    follow_a_metric,
    show,
)
from tests.ui.recorded import (
    GROUP_SIZE,
    MARKUP,
    SERVERS,
    row,
    write_eval,
    write_run,
    write_standalone,
    write_steps,
)
from tests.ui.served import LIMIT_S, served
from tests.ui.test_first_page import write_kind
from tests.ui.test_live import Events

from telescope_core.records import RunFolder
from telescope_core.reports import write_train_report
from telescope_core.types import Message
from telescope_ui.index.search import Search
from telescope_ui.web.export import export_one_file, export_runs
from telescope_ui.web.live import Watcher

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory, ui):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.resize(1280, 900)
        enter(page, ui)
        yield page


def test_every_page_is_shown_without_errors(page, ui):
    for address in ["/", "/compare?run=first&run=second", *all_pages(ui, "first")]:
        page.complaints.clear()
        show(page, ui, address)
        assert not page.complaints, (address, page.complaints)
        assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), page.text()


def test_every_page_fits_a_phone_in_the_dark(page, ui):
    page.resize(360, 780)
    page.prefer("dark")
    try:
        for address in ["/", "/compare?run=first&run=second", *all_pages(ui, "first")]:
            show(page, ui, address)
            assert page.evaluate("document.documentElement.dataset.theme") == "dark"
            assert not page.evaluate(IS_WIDER_THAN_THE_WINDOW), address
    finally:
        page.resize(1280, 900)
        page.prefer("light")


def test_from_a_metric_to_the_server_and_the_moment_in_four_clicks(page, ui):
    chosen = follow_a_metric(page, ui, "first")
    assert "call" in chosen
    assert "http://127.0.0.1:8000" in chosen
    assert "Version" in chosen
    assert "Open the rollout" in chosen
    page.evaluate("history.back()")
    page.until("document.querySelectorAll('.token.is-sampled').length > 0")


def test_shares_under_a_curve_say_what_was_counted_and_link_to_just_that(page, ui):
    show(page, ui, "/runs/first")
    told = page.evaluate("document.querySelector('.under-chart').innerText")
    assert "In the newest 3 steps, " in told
    assert "of groups have a signal, and " in told
    assert told.endswith("of rollouts were cut.")
    links = page.evaluate("[...document.querySelectorAll('.under-chart a')].map(one => one.search)")
    assert "group=signal" in links[0]
    assert "truncated=true" in links[1]
    assert all("step_from=1" in link for link in links)


def test_answers_tags_and_refusals_keep_their_lines_and_long_words_stay_within_the_page(
    tmp_path, page
):
    run = RunFolder.create(tmp_path / "runs" / "lines", config={})
    lines, long = "one\n  two\nthree", "x" * 3000
    said = Message(role="assistant", content="no", refusal=lines)
    whole = replace(
        row(1, 0, 0),
        messages=(said,),
        golden_answers={"text": lines, "long": long},
        tags={"text": lines, "long": long},
    )
    run.write_rollouts(1, [whole])
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        ui.get("/runs/lines/rollouts")
        for address in ("/runs/lines/rollouts/1.0/0/1", "/runs/lines/groups/1.0"):
            show(page, ui, address)
            assert not page.evaluate(IS_WIDER_THAN_THE_WINDOW), address
            assert lines in page.text()
        show(page, ui, "/runs/lines/rollouts/1.0/0/1")
        assert f"Refused: {lines}" in page.text()
        assert f"Tags: text={lines}, long=" in page.text()
        assert f"text: {lines}\n" in page.text()
        page.open("about:blank")


def test_a_long_word_as_the_reason_of_a_failure_stays_within_the_page(tmp_path, page):
    write_run(tmp_path / "runs" / "failed", steps=1)
    RunFolder.open(tmp_path / "runs" / "failed").fail("x" * 3000)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/failed")
        assert "x" * 3000 in page.text()
        assert not page.evaluate(IS_WIDER_THAN_THE_WINDOW)
        page.open("about:blank")


def test_on_paper_colors_stay_and_tables_and_charts_fit_the_sheet(tmp_path, page, ui):
    write_run(tmp_path / "first")
    report = write_train_report(RunFolder.open(tmp_path / "first"))
    exact = "getComputedStyle(document.querySelector('{}')).printColorAdjust === 'exact'"
    # The sheet is narrower than the window, and no script runs before it is printed.
    fitted = (
        "(() => {{ document.body.style.width = '500px'; const scrolled = [...document"
        ".querySelectorAll('{}')].some(one => getComputedStyle(one).overflowX !== 'visible');"
        " const wide = [...document.querySelectorAll('main svg')].some(one => one.clientWidth"
        " / one.clientHeight < one.viewBox.baseVal.width / one.viewBox.baseVal.height - 0.1);"
        " return [scrolled, wide]; }})()"
    )
    try:
        show(page, ui, "/runs/first")
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.evaluate(exact.format(".swatch"))
        assert page.evaluate(fitted.format(".table")) == [False, False]
        page.open(report.as_uri())
        assert page.evaluate(exact.format(".fact"))
        assert page.evaluate(fitted.format(".scroll")) == [False, False]
    finally:
        page.call("Emulation.setEmulatedMedia", media="")
        page.open("about:blank")


def test_hidden_characters_of_names_are_shown_wherever_a_name_stands(tmp_path, page):
    run = RunFolder.create(tmp_path / "runs" / "hidden", config={})
    odd, shown = "a\u202eb\x1bc", "a<U+202E>b<U+001B>c"
    whole = replace(
        row(1, 0, 0),
        environment=odd,
        rewards={odd: 1.0},
        metrics={odd: 1.0},
        tags={odd: odd},
        golden_answers={odd: odd},
    )
    run.write_rollouts(1, [whole])
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        address = ui.get("/runs/hidden/rollouts?limit=1")["columns"]["address"][0]
        asked = "?ui.distribution=" + quote(f"tags/{odd}")
        for one in (address, f"/runs/hidden/rollouts{asked}", "/runs/hidden/groups/1.0"):
            show(page, ui, one)
            assert shown in page.text()
            assert not page.evaluate("/[\\u202e\\x1b]/.test(document.body.innerText)"), one
        show(page, ui, f"/runs/hidden/rollouts{asked}")
        assert page.evaluate("document.querySelector('.tools select').value") == f"tags/{odd}"
        page.open("about:blank")


def test_back_and_forward_come_to_where_a_page_was_left(page, ui):
    page.resize(1280, 500)
    try:
        show(page, ui, "/runs/first/rollouts")
        page.evaluate("scrollTo(0, 700)")
        page.evaluate(f"[...document.querySelectorAll('{FIRST_ROLLOUT}')].at(-1).click()")
        page.until(f"!location.pathname.endsWith('/rollouts') && {SETTLED}")
        assert page.evaluate("scrollY") == 0
        page.evaluate("scrollTo(0, 60)")
        page.evaluate("history.back()")
        page.until(f"location.pathname.endsWith('/rollouts') && {SETTLED} && scrollY >= 700")
        page.evaluate("history.forward()")
        page.until(f"!location.pathname.endsWith('/rollouts') && {SETTLED} && scrollY === 60")
        page.evaluate("history.back()")
        page.until(f"location.pathname.endsWith('/rollouts') && {SETTLED} && scrollY >= 700")
        page.reload()
        page.until(f"{SETTLED} && scrollY >= 700")
        # A reader who scrolls meanwhile is not taken back.
        page.evaluate("history.forward()")
        page.until(f"!location.pathname.endsWith('/rollouts') && {SETTLED} && scrollY === 60")
        page.evaluate(
            "addEventListener('popstate', () => { scrollTo(0, 0); "
            "dispatchEvent(new WheelEvent('wheel')); }, { once: true }); history.back()"
        )
        page.until(f"location.pathname.endsWith('/rollouts') && {SETTLED}")
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        page.evaluate(frames)
        assert page.evaluate("scrollY") == 0
    finally:
        page.resize(1280, 900)


def test_what_a_model_wrote_stays_text(page, ui):
    address = ui.get("/runs/first/rollouts?limit=1")["columns"]["address"][0]
    for view in ("conversation", "tokens", "record"):
        page.complaints.clear()
        show(page, ui, f"{address}?ui.view={view}")
        assert not page.complaints
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    show(page, ui, address)
    shown = MARKUP.replace("\x00", "<U+0000>").replace("\x1b", "<U+001B>")
    assert shown in page.text()


def test_the_tools_that_a_model_was_offered_are_told(page, ui):
    address = ui.get("/runs/first/rollouts?limit=1")["columns"]["address"][0]
    show(page, ui, address)
    assert "The model was offered 1 tool" in page.text()
    page.evaluate("document.querySelectorAll('.split details').forEach(one => one.open = true)")
    assert "look" in page.text()
    assert page.text().count(MARKUP[:20]) == 2


HOSTILE = r"""[a](javascript:alert(1)) ![x](http://evil.example/x.png) <a href=x>y</a>
<svg onload=alert(1)> $\href{javascript:alert(1)}{x}$ and $\text{<img src=x onerror=alert(1)>}$
and \(\htmlClass{a}{b}\)

$$\sum_{i=1}^n \frac{1}{i} \includegraphics{http://evil.example/x.png}$$

| <script>alert(2)</script> | b |
|---|---|
| `<i onclick=alert(1)>` | **<b>** |

- <iframe src=//evil.example></iframe>

```html
<script>alert(3)</script>
```
"""


def test_hostile_markdown_and_formulas_become_text_and_nothing_else(tmp_path, page):
    run = RunFolder.create(tmp_path / "runs" / "hostile", config={})
    said = Message(role="assistant", content=HOSTILE, reasoning=HOSTILE)
    run.write_rollouts(1, [replace(row(1, 0, 0), messages=(said,))])
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        ui.get("/runs/hostile/rollouts")
        for address in ("/runs/hostile/rollouts/1.0/0/1", "/runs/hostile/groups/1.0"):
            page.complaints.clear()
            show(page, ui, address)
            page.evaluate(
                "document.querySelectorAll('details').forEach(one => { one.open = true; })"
            )
            inside = "[...document.querySelectorAll('.rendered, .rendered *')]"
            tags = page.evaluate(f"[...new Set({inside}.map(one => one.localName))]")
            assert not {"a", "img", "script", "svg", "iframe", "i", "b", "link"} & set(tags)
            assert {"math", "mfrac", "munderover", "table", "strong", "code"} <= set(tags)
            names = page.evaluate(f"[...new Set({inside}.flatMap(one => one.getAttributeNames()))]")
            assert not [one for one in names if one.startswith("on") or one in ("href", "src")]
            assert page.evaluate("document.querySelector('mfrac').namespaceURI").endswith("MathML")
            assert not page.complaints
            assert "[a](javascript:alert(1))" in page.text()
        page.open("about:blank")


def test_filters_are_in_the_address_and_can_be_taken_back(page, ui):
    show(page, ui, "/runs/first/rollouts")
    total = ui.get("/runs/first/rollouts?reward_from=1")["total"]
    page.evaluate("document.querySelectorAll('.filters input[type=number]')[2].focus()")
    page.type("1")
    page.until("location.search.includes('reward_from=1')")
    page.until(f"{SETTLED} && document.querySelector('main').innerText.includes('of {total}')")
    page.evaluate("history.back()")
    page.until(f"location.search === '' && {SETTLED}")
    page.click("rect.bar")
    page.until(f"location.search.includes('reward_to=') && {SETTLED}")
    show(page, ui, "/runs/first/rollouts?reward_from=nothing")
    told = page.evaluate("document.querySelector('.trouble').innerText")
    assert "reward_from" in told


def test_a_preset_of_rollouts_keeps_the_filters_and_begins_at_the_first_page(page, ui):
    kept = "step_from=1&environment=math&status=kept"
    show(page, ui, f"/runs/first/rollouts?{kept}&limit=2&offset=2")
    found = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('main p.tools a')]"
        ".map(one => [one.innerText, one.getAttribute('href').split('?')[1] ?? '']))"
    )
    assert found["worst first"] == f"{kept}&limit=2&sort=reward"
    assert found["newest first"] == f"{kept}&limit=2"
    assert found["truncated only"] == f"{kept}&limit=2&truncated=true"
    assert found["without filters"] == ""


def test_search_shows_what_it_found(page, ui):
    show(page, ui, "/runs/first/rollouts")
    page.key("/")
    page.until("document.activeElement.type === 'search'")
    text = "Step 2 says"
    page.type(text)
    page.until(f"location.search.includes('q=') && {SETTLED}")
    page.until("!!document.querySelector('.excerpt')")
    shown = page.evaluate("[...document.querySelectorAll('.excerpt')].map(one => one.innerText)")
    assert shown
    assert all(text in one for one in shown)


def test_a_search_goes_on_by_itself_and_can_be_stopped(tmp_path, page, monkeypatch):
    run = RunFolder.create(tmp_path / "runs" / "long", config={})
    steps = range(1, 31)
    for step in steps:
        said = "a needle in it" if step == 1 else "nothing of note"
        one = replace(row(step, 0, 0), messages=(Message(role="assistant", content=said),))
        run.write_rollouts(step, [one])
    asked = []
    real = Search.page

    def short(self, **options):
        asked.append(options["cursor"])
        return real(self, **options, limit_s=0.0)

    monkeypatch.setattr(Search, "page", short)
    monkeypatch.setattr("telescope_ui.index.search._MOST_FILES", 4)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        ui.get("/runs/long/rollouts")
        show(page, ui, "/runs/long/rollouts?q=needle")
        page.until("document.querySelectorAll('.excerpt').length === 1")
        page.until("document.querySelector('main').innerText.includes('all are searched')")
        assert len(asked) == len(set(asked)) > 5
        assert "1 rollout found in steps 1 to 30" in page.text()
        page.evaluate(
            "new MutationObserver(() => [...document.querySelectorAll('main button')]"
            ".find(one => one.innerText === 'Stop')?.click())"
            ".observe(document.body, {childList: true, subtree: true})"
        )
        page.evaluate("document.querySelector('main input[type=search]').focus()")
        page.evaluate("document.querySelector('main input[type=search]').select()")
        page.type("needles")
        page.until(
            "[...document.querySelectorAll('main button')].some(b => b.innerText === 'Search on')"
        )
        assert "0 rollouts found" in page.text()
        page.open("about:blank")


def test_keys_lead_to_pages_and_are_listed(page, ui):
    show(page, ui, "/runs/first")
    page.key("g")
    page.key("t")
    page.until(f"location.pathname === '/runs/first/timeline' && {SETTLED}")
    page.key("?")
    page.until("document.querySelector('dialog').open")
    page.key("?")
    page.until("!document.querySelector('dialog').open")
    address = ui.get("/runs/first/rollouts?limit=1&sort=step")["columns"]["address"][0]
    show(page, ui, address)
    page.key("j")
    page.until(f"location.pathname !== {address!r} && {SETTLED}")


def test_the_timeline_is_zoomed_by_keys_and_asks_for_its_window_only(page, ui):
    show(page, ui, "/runs/first/timeline")
    page.evaluate("document.querySelector('canvas').focus()")
    for _ in range(6):
        page.key("w")
    page.until(f"location.search.includes('from=') && {SETTLED}")
    first, last = page.evaluate(
        "['from', 'to'].map(name => Number(new URLSearchParams(location.search).get(name)))"
    )
    whole = ui.get("/runs/first/timeline")["extent"]
    assert 0 < last - first < (whole["to"] - whole["from"]) / 2
    page.key("0")
    page.until(f"location.search.includes('from={whole['from']:.4f}') && {SETTLED}")
    page.click("details summary")
    assert page.evaluate("document.querySelectorAll('details table tbody tr').length") > 0


def test_the_tokens_can_be_read_by_keys(page, ui):
    address = ui.get("/runs/first/rollouts?limit=1")["columns"]["address"][0]
    show(page, ui, f"{address}?ui.view=tokens")
    page.evaluate("document.querySelector('.tokens').focus()")
    page.key("ArrowRight")
    page.key("End")
    page.until("!!document.querySelector('.token.is-at')")
    assert "Log-prob" in page.text()
    page.evaluate(
        "(() => { const s = document.querySelector('main select'); s.value = 'advantage';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.until("location.search.includes('ui.by=advantage')")


def test_a_chart_is_read_from_its_first_to_its_last_value_by_keys(page, ui):
    show(page, ui, "/runs/first")
    page.evaluate("document.querySelector('.plot').focus()")
    for key, step in (("Home", 1), ("ArrowRight", 2), ("End", 3), ("ArrowLeft", 2)):
        page.key(key)
        page.until(f"document.activeElement.getAttribute('aria-valuenow') === '{step}'")


def test_a_chart_can_be_saved_with_its_styles(page, ui):
    show(page, ui, "/runs/first")
    page.evaluate(
        "(() => { URL.createObjectURL = blob => { blob.text().then(t => { window.saved = t; });"
        " return '#'; }; })()"
    )
    page.click("figure button.quiet")
    page.until("!!window.saved")
    saved = page.evaluate("window.saved")
    assert saved.startswith("<svg")
    assert "var(" not in saved
    assert 'class="' not in saved


def test_a_new_step_is_on_the_page_by_itself(tmp_path, page):
    write_run(tmp_path / "runs" / "live")
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/live")
        page.until("document.querySelector('.live').innerText === 'live'")
        assert "3 of 10" in page.text()
        write_steps(RunFolder.open(tmp_path / "runs" / "live"), range(4, 5))
        page.until("document.querySelector('main').innerText.includes('4 of 10')")


def test_a_page_follows_its_run_when_it_appears_and_says_when_it_is_gone(tmp_path, page):
    write_run(tmp_path / "runs" / "other", steps=1)
    write_run(tmp_path / "late", steps=1)
    told = "document.querySelector('main').innerText"
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        page.open(f"http://127.0.0.1:{ui.port}/runs/late")
        page.until(f"{told}.includes('unknown run') && !document.querySelector('main h1')")
        page.until("document.querySelector('.live').innerText === 'live'")
        page.evaluate("window.wasNotLoadedAgain = true")
        (tmp_path / "late").rename(tmp_path / "runs" / "late")
        page.until(f"{SETTLED} && {told}.includes('1 of 10') && !{told}.includes('unknown run')")
        (tmp_path / "runs" / "late").rename(tmp_path / "late")
        page.until(f"{told}.includes('this run is gone')")
        assert page.evaluate("window.wasNotLoadedAgain")
    page.complaints.clear()


def test_what_goes_wrong_is_on_the_page_by_itself_while_the_run_goes_on(tmp_path, page):
    rows = healthy(60, **{"task_reward/mean": rising(0.4, 0.0, at=10)})
    run = RunFolder.create(tmp_path / "runs" / "live", config={"run": {"number_of_steps": 60}})
    for one in rows[:8]:
        run.log_metrics(one)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/live")
        page.until("document.querySelector('.live').innerText === 'live'")
        assert "collapse" not in page.text().lower()
        page.evaluate("window.wasNotLoadedAgain = true")
        for one in rows[8:40]:
            run.log_metrics(one)
        page.until("document.querySelector('main').innerText.includes('Collapsed since step')")
        assert "Go on from a checkpoint before it" in page.text()
        assert page.evaluate("window.wasNotLoadedAgain")


def test_ten_pages_are_live_at_once(tmp_path, page):
    """A browser allows six connections to a server; a seventh page would wait for ever."""
    write_run(tmp_path / "runs" / "live")
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        pages = [page.another() for _ in range(10)]
        for one in pages:
            show(one, ui, "/runs/live")
            one.until("document.querySelector('.live').innerText === 'live'")
        write_steps(RunFolder.open(tmp_path / "runs" / "live"), range(4, 5))
        for one in pages:
            one.until("document.querySelector('main').innerText.includes('4 of 10')")
        # The page that listens for all is closed, and another one takes its place.
        pages[0].call("Page.close")
        write_steps(RunFolder.open(tmp_path / "runs" / "live"), range(5, 6))
        for one in pages[1:]:
            one.until("document.querySelector('main').innerText.includes('5 of 10')")
            one.call("Page.close")


def test_an_exported_folder_opens_without_a_server(tmp_path, page, recorded_folder):
    exported = export_runs([recorded_folder], tmp_path / "still", num_rollouts=12)
    # The page before may complain that its server is gone.
    page.open("about:blank")
    page.complaints.clear()
    page.open(exported.page.as_uri())
    page.until(SETTLED)
    for address in (
        *("/runs/first", "/runs/first/rollouts", "/runs/first/timeline", "/runs/first/infra"),
        *("/runs/first/evals", "/runs/first/logs", "/runs/first/config"),
        "/compare?run=first&run=second",
    ):
        page.evaluate(f"location.hash = {'#' + address!r}")
        page.until(f"document.title !== '' && {SETTLED}")
        assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), page.text()
    # A click on a curve opens rollouts of its step, of which an export has some, whichever it is.
    for step in (1, 2, 3):
        page.evaluate(f"location.hash = '#/runs/first/rollouts?step_from={step}&step_to={step}'")
        page.until(f"{SETTLED} && document.querySelectorAll('main tbody tr').length > 0")
        column = (
            "[...document.querySelectorAll('main tbody tr')].map(one => one.cells[2].innerText)"
        )
        page.until(f"{column}.every(one => one === '{step}')")
    page.evaluate("location.hash = '#/runs/first/rollouts?q=says'")
    page.until("document.querySelector('.trouble')?.innerText.includes('without q')")
    page.evaluate("location.hash = '#/runs/first/rollouts'")
    page.until(f"{SETTLED} && !!document.querySelector('{FIRST_ROLLOUT}')")
    page.click("a.name")
    page.until(f"{SETTLED} && document.querySelector('main h1').innerText.startsWith('Rollout ')")
    page.click("aside a[href*='difference']")
    page.until(f"{SETTLED} && document.querySelector('main h1').innerText === 'Two rollouts'")
    assert "left: first, step 3" in page.text()
    page.evaluate("location.hash = '#/runs/first/evals/math-after'")
    page.until(f"{SETTLED} && !!document.querySelector(\"a[href*='rollouts/eval-2/0']\")")
    page.click("a[href*='rollouts/eval-2/0']")
    page.until(f"{SETTLED} && document.querySelector('main h1').innerText.startsWith('Rollout ')")
    assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), page.text()
    assert not page.complaints


def test_one_file_opens_with_scripts_and_without(tmp_path, page, recorded_folder):
    target = tmp_path / "first.html"
    export_one_file([recorded_folder / "first"], target, num_rollouts=12)
    page.open("about:blank")
    page.complaints.clear()
    page.open(target.as_uri())
    page.until(f"document.title !== '' && {SETTLED} && !!document.querySelector('.run-verdict')")
    for address in ("", "/timeline", "/infra", "/evals", "/logs", "/config", "/rollouts"):
        page.evaluate(f"location.hash = '#/runs/first{address}'")
        page.until(SETTLED)
        assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), page.text()
    page.until(f"{SETTLED} && document.body.innerText.includes('12 of the 36 rollouts')")
    page.click("a.name")
    page.until(f"{SETTLED} && document.querySelector('main h1').innerText.startsWith('Rollout ')")
    assert not page.complaints
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(target.as_uri())
        page.call("Emulation.setScriptExecutionDisabled", value=False)
        assert "Held-out" in page.text()
        assert page.evaluate("document.querySelectorAll('noscript svg').length") > 0
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_two_runs_are_compared_down_to_a_rollout_of_the_same_example(page, ui):
    show(page, ui, "/compare?run=first&run=second")
    page.until("!!document.querySelector(\"td a[href*='/difference']\")")
    page.click("td a[href*='/difference']")
    page.until(f"location.pathname === '/difference' && {SETTLED}")
    assert "left: first" in page.text()
    assert "right: second" in page.text()
    example = ui.get("/compare/examples?run=first&run=second")["examples"][0]
    show(page, ui, example["runs"]["first"]["address"])
    page.until("!!document.querySelector('main select')")
    page.evaluate(
        "(() => { const s = document.querySelector('main select'); s.value = 'second';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.until("document.querySelectorAll(\"main .tools a[href*='/difference']\").length === 1")
    page.click("main .tools a[href*='/difference']")
    page.until(f"location.pathname === '/difference' && {SETTLED}")
    assert "right: second" in page.text()


def test_a_rollout_of_an_eval_is_marked_on_the_timeline(page, ui):
    show(page, ui, "/runs/first/evals/math-after/rollouts/eval-2/0")
    page.click(".head a[href*='/timeline']")
    page.until(f"location.pathname.endsWith('/timeline') && {SETTLED}")
    page.until("!!document.querySelector('section.card')")
    chosen = page.evaluate("document.querySelector('section.card').innerText")
    assert SERVERS[1] in chosen


def test_what_cannot_be_read_is_told_on_the_page(tmp_path, page):
    run = write_run(tmp_path / "runs" / "torn")
    (run.path / "events" / "step-000002.jsonl").unlink()
    torn = run.path / "events" / "step-000002.parquet"
    torn.write_bytes(b"PAR1 and no more")
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/torn/timeline")
        told = page.evaluate("document.querySelector('.trouble[role=alert]').innerText")
        assert told.partition(" ")[0] == str(torn.relative_to(run.path))
        assert page.evaluate("!!document.querySelector('canvas')")
        page.open("about:blank")


def test_a_long_list_of_runs_is_sorted_filtered_and_paged_in_its_address(tmp_path, page):
    for at in range(70):
        name = f"sweep-seed{at}" if at < 4 else f"run-{at}"
        run = RunFolder.create(tmp_path / "runs" / name, config={"model": {"model": f"m{at % 2}"}})
        run.log_metrics({"step": 1, "task_reward/mean": at / 100})
    rows = "[...document.querySelectorAll('tbody tr')]"
    names = f"{rows}.map(row => row.cells[1].innerText.trim())"
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        # Four seeds are one line, so that 67 lines are left.
        assert page.evaluate(f"{rows}.length") == 50
        assert "1 to 50 of 67" in page.text()
        # The whole cell of a head sorts, and not its word alone.
        assert page.evaluate(
            "(() => { const b = document.querySelector('thead th:nth-child(5)')"
            ".getBoundingClientRect();"
            " return [[b.left + 2, b.top + 2], [b.right - 2, b.bottom - 2]]"
            ".every(at => document.elementFromPoint(...at).closest('button')); })()"
        )
        page.click("thead th:nth-child(5) button")
        page.until("location.search.includes('ui.sort=-Reward')")
        assert page.evaluate(f"{names}[0]") == "run-69"
        page.click(".pager button:last-child")
        page.until("location.search.includes('ui.page=2')")
        # Back undoes what was chosen, one after the other, and leaves the list last.
        page.evaluate("history.back()")
        page.until("location.search === '?ui.sort=-Reward'")
        page.evaluate("history.back()")
        page.until("location.search === '' && location.pathname === '/'")
        page.evaluate("history.go(2)")
        page.until("location.search.includes('ui.page=2')")
        assert page.evaluate(f"{rows}.length") == 17
        assert "sweep-seed*" in page.evaluate(f"{names}.at(-1)")
        page.click("button[aria-expanded]")
        page.until(f"{names}.includes('sweep-seed3')")
        show(page, ui, "/?ui.model=m1&ui.text=run-6")
        assert page.evaluate(names) == [f"run-{at}" for at in (69, 67, 65, 63, 61)]
        assert "5 runs of 70" in page.text()
        page.open(f"http://127.0.0.1:{ui.port}/?q=run-6")
        page.until("document.querySelector('.trouble')?.innerText.includes('parameter')")
        assert not page.evaluate(f"{rows}.length")


def test_a_page_whose_server_has_ended_says_so_and_goes_on_with_the_next_one(tmp_path, page):
    write_run(tmp_path / "runs" / "live")
    banner = "!!document.querySelector('.ended')"
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        port = ui.port
        enter(page, ui)
        show(page, ui, "/runs/live")
        page.until("document.querySelector('.live').innerText === 'live'")
        assert not page.evaluate(banner)
    page.until(banner)
    assert "This page shows an old state" in page.text()
    with served([tmp_path / "runs"], tmp_path / "cache", port=port):
        page.click(".ended button")
        page.until(f"!({banner}) && document.querySelector('.live').innerText === 'live'")
    with served([tmp_path / "runs"], tmp_path / "cache", port=port, token="x" * 40):
        page.until(f"{banner} && document.querySelector('.ended').innerText.includes('token')")
        page.open(f"http://127.0.0.1:{port}/runs/live")
        page.until("document.body.innerText.includes('This page needs its token')")
    page.complaints.clear()


def test_an_eval_without_a_run_is_read_down_to_a_rollout(tmp_path, page):
    for name, solved in (("early", 6), ("late", 4)):
        write_standalone(tmp_path / "runs" / "evals" / name, solved=solved)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        assert "Evals without a run" in page.text()
        page.click("a[href='/evals/late']")
        page.until(f"location.pathname === '/evals/late' && {SETTLED}")
        assert "What it was started with" in page.text()
        page.click("td a[href*='/evals/late/rollouts/']")
        page.until(f"location.pathname.startsWith('/evals/late/rollouts/') && {SETTLED}")
        page.click(".head a[href='/evals/late']")
        page.until(f"location.pathname === '/evals/late' && {SETTLED}")
        page.complaints.clear()


def drag(page, first, last):
    """Draw over a part of the first chart, from one share of its width to another."""
    left, top, width, height = page.place(".plot")
    middle = top + height / 2
    places = [left + width * (first + (last - first) * part / 4) for part in range(5)]
    at = {"button": "left", "clickCount": 1, "y": middle}
    page.call("Input.dispatchMouseEvent", type="mousePressed", x=places[0], **at)
    for x in places[1:]:
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=middle, button="left")
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=places[-1], **at)
    return places[2], middle


STEPS = "['from', 'to'].map(name => Number(new URLSearchParams(location.search).get(name)))"
ENDS = (
    "[...new Set([...document.querySelectorAll('.plot')].map(one =>"
    " one.getAttribute('aria-valuemin') + ' ' + one.getAttribute('aria-valuemax')))]"
)


def test_runs_and_evals_have_their_names_where_a_key_has_other_letters(tmp_path, page):
    write_run(tmp_path / "runs" / "my run", steps=1)
    for name, solved in (("eval a", 2), ("eval b", 4)):
        write_standalone(tmp_path / "runs" / name, solved=solved)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/my-run/config")
        page.until("document.title === 'my run - config - Telescope'")
        show(page, ui, "/evals/eval-b?against=eval-a")
        page.until("document.title === 'eval b - Telescope'")
        chosen = "document.querySelector('.tools select').selectedOptions[0]"
        assert page.evaluate(f"[{chosen}.value, {chosen}.innerText]") == [
            "eval-a",
            "eval a (eval-a)",
        ]
        assert "than in eval a (eval-a)" in page.text()
        assert "Search example ids" in page.text()
        show(page, ui, "/evals/eval-b?ui.q=ALERT")
        page.until("document.querySelectorAll('td .excerpt').length === 8")
        assert "8 rollouts found; all are searched." in page.text()
        page.open("about:blank")


def test_what_is_drawn_over_is_shown_in_all_charts_and_in_the_address(tmp_path, page):
    write_kind(tmp_path / "runs", "learns")
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        page.complaints.clear()
        show(page, ui, "/runs/learns")
        assert page.evaluate("document.querySelector('.run-verdict').innerText").startswith(
            "Learned:"
        )
        whole = page.evaluate(ENDS)
        middle = drag(page, 0.4, 0.7)
        page.until(f"location.search.includes('from=') && {SETTLED}")
        assert page.evaluate("location.pathname") == "/runs/learns", "a drag is not a click"
        first, last = page.evaluate(STEPS)
        assert 1 < first < last < 60
        page.until(f"JSON.stringify({ENDS}) === '[\"{first} {last}\"]'")
        # The place under the pointer is shown in all of them.
        at = {"x": middle[0], "y": middle[1]}
        page.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        page.until(
            "document.querySelectorAll('.cursor').length === "
            "document.querySelectorAll('.plot').length"
        )
        show(page, ui, f"/runs/learns?from={first}&to={last}&ui.y=log&smooth=1")
        assert page.evaluate(ENDS) == [f"{first} {last}"]
        assert not page.evaluate("!!document.querySelector('.is-smooth')")
        show(page, ui, f"/runs/learns?from={first}&to={last}")
        page.click(".plot")
        page.until(f"location.pathname.endsWith('/rollouts') && {SETTLED}")
        step = page.evaluate("Number(new URLSearchParams(location.search).get('step_from'))")
        assert first <= step <= last, "a click stays a click"
        page.evaluate("history.back()")
        page.until(f"location.pathname === '/runs/learns' && {SETTLED}")
        page.click(".plot", times=2)
        page.until(f"location.pathname === '/runs/learns' && location.search === '' && {SETTLED}")
        assert page.evaluate(ENDS) == whole
        page.evaluate("[...document.querySelectorAll('.sections summary')].at(-2).click()")
        page.until(f"location.search.includes('section=') && {SETTLED}")
        page.until("document.querySelectorAll('.sections .plot').length > 0")
        assert not page.complaints
        page.open("about:blank")


def test_a_log_is_followed_to_its_end_and_no_line_comes_twice(tmp_path, page):
    """An answer has 500 lines at most, and a run that crashed writes no more."""
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    log = run.logs_path / "a.log"
    log.write_text("line 0\n")
    lines = "[...document.querySelectorAll('.logs .line')].map(one => one.lastChild.textContent)"
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/r/logs")
        page.until("!!document.querySelector('.live.is-on')")
        # What another one is told of now, the page is told of, too.
        Events(ui).close()
        with log.open("a") as stream:
            stream.write("".join(f"line {number}\n" for number in range(1, 1200)))
        page.until(f"{lines}.at(-1) === 'line 1199'")
        assert page.evaluate(lines) == [f"line {number}" for number in range(1200)]
        more = (
            "[...document.querySelectorAll('button')].find(one => one.innerText === 'Older lines')"
        )
        log.write_text("".join(f"line {number}\n" for number in range(2000)))
        show(page, ui, "/runs/r/config")
        show(page, ui, "/runs/r/logs")
        page.until(f"{lines}.length === 500")
        page.evaluate(f"(() => {{ const one = {more}; one.click(); one.click(); }})()")
        page.until(f"{lines}.length === 1000")
        page.evaluate(f"{more}.click()")
        page.until(f"{lines}.length === 1500")
        assert page.evaluate(lines) == [f"line {number}" for number in range(500, 2000)]
        page.open("about:blank")


@pytest.mark.parametrize("name", ["logs", "rollouts"])
def test_what_is_written_before_changes_are_watched_is_shown(name, tmp_path, page, monkeypatch):
    """A page has its data before the server has had its first look; a run may write between."""
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 2), groups=1)
    log = run.logs_path / "a.log"
    log.write_text("line 0\n")
    may_look = threading.Event()
    real = Watcher._look

    def late(self, *all):
        assert may_look.wait(LIMIT_S)
        return real(self, *all)

    monkeypatch.setattr(Watcher, "_look", late)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        try:
            enter(page, ui)
            show(page, ui, f"/runs/r/{name}")
            wanted = {"logs": "line 1", "rollouts": f"of {2 * GROUP_SIZE}"}[name]
            assert wanted not in page.text()
            with log.open("a") as stream:
                stream.write("line 1\n")
            write_steps(run, range(2, 3), groups=1)
            may_look.set()
            page.until(f"document.querySelector('main').innerText.includes('{wanted}')")
            page.open("about:blank")
        finally:
            may_look.set()


def test_what_a_distribution_shows_is_what_a_click_leads_to(tmp_path, page):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    rewards = [number / 10 for number in range(-10, 11)]
    run.write_rollouts(1, [replace(row(1, 0, at), reward=one) for at, one in enumerate(rewards)])
    shown = f"!!document.querySelector('.trouble') || document.querySelectorAll('{FIRST_ROLLOUT}')"
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        for at in range(len(rewards)):
            show(page, ui, "/runs/r/rollouts")
            page.until(f"document.querySelectorAll('rect.bar').length === {len(rewards)}")
            click = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
            page.evaluate(f"document.querySelectorAll('rect.bar')[{at}].{click}")
            page.until(f"location.search.includes('reward_from') && {SETTLED}")
            page.until(f"{shown}.length === 1")
        for name in ("is_truncated", "is_refused", "is_replaced", "error", "stop_reason"):
            show(page, ui, f"/runs/r/rollouts?ui.distribution={name}&attempts=all")
            page.until("!!document.querySelector('ul.values button')")
            before = page.evaluate("location.search")
            page.click("ul.values button")
            page.until(f"location.search !== {before!r} && {SETTLED}")
            assert not page.evaluate("!!document.querySelector('.trouble')"), (name, page.text())
            assert page.evaluate(f"document.querySelectorAll('{FIRST_ROLLOUT}').length > 0"), name
        page.open("about:blank")


def test_values_that_no_axis_can_hold_do_not_stop_a_page(tmp_path, page):
    run = write_run(tmp_path / "runs" / "r", steps=2)
    for step, value in ((3, 0.3), (4, 0.1 + 0.2)):
        run.log_metrics({"step": step, "own": value})
    write_eval(run, "step-2", version=2, solved=0)
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        for scale in ("range", "fit", "log"):
            page.complaints.clear()
            show(page, ui, f"/runs/r?metric=own&ui.y={scale}")
            page.until("document.querySelectorAll('.plot').length > 2")
            assert not page.complaints
        page.open("about:blank")


def test_settings_have_all_their_digits(tmp_path, page):
    seeds = {"seed": 2**53 + 1, "large": 2**80 + 1, "near": -(2**53) - 1}
    RunFolder.create(tmp_path / "runs" / "r", config={"own": seeds})
    with served([tmp_path / "runs"], tmp_path / "cache") as ui:
        enter(page, ui)
        show(page, ui, "/runs/r/config")
        shown = page.evaluate("[...document.querySelectorAll('td pre')].map(one => one.innerText)")
        assert {str(seed) for seed in seeds.values()} <= set(shown)
        page.open("about:blank")
