"""What people come for, in a real Chromium: each in at most three clicks, by words on the page."""

from dataclasses import replace

import pytest
from tests.chromium import Browser, browser
from tests.ui.browsing import SETTLED, enter, show
from tests.ui.recorded import BEGAN_S, STEP_S, row, write_run, write_standalone
from tests.ui.served import served

from telescope_core.records.blocks import BlockLog
from telescope_core.records.timeline import TimelineSpan
from telescope_core.types import Message

pytestmark = pytest.mark.nightly

MOST_CLICKS = 3
CUT = range(4, 34)
"""Steps in which every answer is cut, and every group has the lowest reward."""
SEEN = "[...document.querySelectorAll({0!r})].find(one => one.innerText.trim().startsWith({1!r}))"
PRESSED = "main a, main button, main summary, nav.pages a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    for name in ("first", "second"):
        run = write_run(folder / name)
        for step in CUT:
            one = replace(
                row(step, 0, 0),
                **{"reward": 0.0, "rewards": {"correct": 0.0}, "is_truncated": True},
                **{"num_turns": 1, "finish_reasons": ("length",)},
                messages=(
                    Message(role="user", content="What is 6 times 7?"),
                    Message(role="assistant", content="Let me think about it, and"),
                ),
            )
            # Equal rewards have no advantage.
            run.write_rollouts(
                step, [replace(one, index=index, advantage=0.0) for index in range(4)]
            )
            run.log_metrics(
                {
                    **{"step": step, "version": step, "time_s": BEGAN_S + STEP_S * step},
                    **{"task_reward/mean": 0.0, "reward/math/mean": 0.0, "entropy": 0.5},
                    **{"groups/total": 1, "groups/discarded": 1, "groups/all_at_minimum": 1},
                    **{"groups/all_equal": 0, "groups/all_at_maximum": 0},
                    **{"truncated/fraction": 1.0, "time/step_s": 10.0, "time/generate_s": 6.0},
                    **{"time/train_s": 2.0, "time/sync_s": 1.0, "time/wait_s": 1.0},
                }
            )
    with BlockLog(folder / "first" / "timeline", TimelineSpan) as log:
        for name, start_s in (("wait for rollouts", 0.0), ("train", 4.0)):
            about = {"name": name, "source": "driver", "step": 1}
            log.add(TimelineSpan(time_s=BEGAN_S + start_s, duration_s=4.0, **about))
    write_standalone(folder / "alone", solved=5)
    return folder


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("browser")
    with served([folder], place / "cache") as ui, browser(place / "profile") as page:
        page.resize(1440, 900)
        enter(page, ui)
        for run in ("first", "second"):
            ui.get(f"/runs/{run}/rollouts")
        page.show = lambda address: show(page, ui, address)
        yield page


def act(page: Browser, what: str) -> int:
    """Do one thing, and return how many clicks it takes: typing takes none.

    A word is pressed where something begins with it; `css:` names what has no word.
    """
    kind, _, rest = what.partition(":")
    if kind == "type":
        page.key("/")
        page.until("document.activeElement.type === 'search'")
        page.type(rest)
        clicks = 0
    elif kind == "choose":
        option = f"[...document.querySelectorAll('main option')].find(one => one.text === {rest!r})"
        page.until(f"!!{option}")
        page.evaluate(
            f"(() => {{ const o = {option}; const s = o.closest('select'); s.value = o.value;"
            " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        clicks = 1
    else:
        found = f"document.querySelector({rest!r})" if kind == "css" else SEEN.format(PRESSED, what)
        page.until(f"!!{found}")
        page.evaluate(
            "document.querySelectorAll('[data-job]').forEach(one => delete one.dataset.job);"
            f"{found}.dataset.job = ''"
        )
        page.click("[data-job]")
        clicks = 1
    page.until(SETTLED)
    return clicks


RUN = "/runs/first"
FIRST_ROLLOUT = "css:a.name"
JOBS = {
    "did it learn": ("/", ["first"], ".run-verdict b"),
    "what went wrong, and since when": ("/", ["first"], "section.findings a"),
    "why did the reward fall": ("/", ["first", "css:section.findings a"], "a.name"),
    "reward without noise": ("/", ["first"], "path.curve.is-smooth"),
    "reward of each environment": ("/", ["first"], ".charts.is-small figure"),
    "evals on the curve": ("/", ["first"], ".whiskers"),
    "where did the time go": ("/", ["first"], "section[aria-label^='Where the time'] .stacked"),
    "another metric": ("/", ["first", "policy"], "details[open] figure"),
    "rollouts of a step": ("/", ["first", "css:.plot.can-pick"], "a.name"),
    "worst rollouts": ("/", ["first", "Rollouts", "worst"], "a.name"),
    "which got 0, and why": ("/", ["first", "Rollouts", "css:rect.bar"], "a.name"),
    "where was it cut": ("/", ["first", "Truncated", FIRST_ROLLOUT], "p.cut"),
    "groups without a signal": ("/", ["first", "Groups without"], "a.name"),
    "tokens by entropy": (
        f"{RUN}?from=2&to=4",
        ["css:.plot.can-pick", "tokens", "choose:entropy"],
        ".token[class*=shade]",
    ),
    "most surprising token": (RUN, ["Rollouts", "tokens", "css:.surprising button"], ".is-at"),
    "why was this call slow": (
        f"{RUN}?from=2&to=4",
        ["css:.plot.can-pick", FIRST_ROLLOUT, "on the timeline"],
        "section.card",
    ),
    "what did the rank wait for": ("/", ["first", "Timeline"], ".stacked"),
    "how do two of a group differ": (RUN, ["Rollouts", FIRST_ROLLOUT, "difference"], ".diff-left"),
    "one example over all steps": (RUN, ["Rollouts", FIRST_ROLLOUT, "css:.crumbs a"], ".chart"),
    "a text in all rollouts": ("/", ["first", "Rollouts", "type:Step 2 says"], ".excerpt"),
    "what is set differently in two runs": (
        "/",
        ["css:[aria-label='compare first']", "css:[aria-label='compare second']", "Compare 2"],
        "[aria-label='Names, folders and ports that differ']",
    ),
    "two runs beside each other": (
        "/",
        ["css:[aria-label='compare first']", "css:[aria-label='compare second']", "Compare 2"],
        ".chart",
    ),
    "warnings that matter": ("/", ["first", "Logs", "choose:warning"], ".logs .line"),
    "give the run away": ("/", ["first", "Export"], "details[open] code"),
    "is this eval better": ("/", ["first", "Evals"], "p.verdict"),
    "which examples got worse": ("/", ["first", "Evals", "after"], "[aria-label$='that flipped']"),
    "a standalone eval": ("/", ["alone"], "[aria-label='All examples of the eval']"),
    "the best of many runs": ("/", ["Reward"], "th[aria-sort=descending]"),
    "why it ended": ("/", [], ".state-interrupted"),
    "memory and cache of servers": ("/", ["first", "Infra"], ".chart"),
    "settings of the run": ("/", ["first", "Config"], "[aria-label='Settings of the run']"),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_takes_three_clicks(page, job):
    start, actions, seen = JOBS[job]
    page.show(start)
    clicks = sum(act(page, one) for one in actions)
    page.until(f"!!document.querySelector({seen!r})")
    assert clicks <= MOST_CLICKS
