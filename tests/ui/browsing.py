"""Opens pages of `telescope ui` in a real Chromium, and waits until they show their data."""

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tests.chromium import Browser, browser
from tests.ui.served import Served, served

from telescope_core.records import RunFolder
from telescope_core.records.timeline import ModelCall

SETTLED = """
!!document.querySelector('main h1') && !document.querySelector('[aria-busy=true]')
  && !document.querySelector('p.empty[role=status]')
"""
"""No part of the page waits for data."""
IS_WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth > innerWidth"
FIRST_ROLLOUT = "td a.name"
WEB = Path(__file__).parents[2] / "packages/telescope-ui/web"
AXE = WEB / "node_modules/axe-core/axe.min.js"
"""axe-core, which is there where the packages of the front end are."""


def enter(page: Browser, ui: Served) -> None:
    """Go to the first page with the token, which leaves a cookie."""
    page.open(f"http://127.0.0.1:{ui.port}/?token={quote(ui.token)}")
    page.until(SETTLED)


def show(page: Browser, ui: Served, address: str) -> None:
    """Open a page and wait until it shows its data."""
    page.open(f"http://127.0.0.1:{ui.port}{address}")
    page.until(SETTLED)


def all_pages(ui: Served, run: str) -> Sequence[str]:
    """Return addresses of every kind of page that a run has."""
    rollouts = ui.get(f"/runs/{run}/rollouts?limit=2")["columns"]
    first, second = rollouts["address"][:2]
    around = ui.get(first)["addresses"]
    points = [one for found in ui.get(f"/runs/{run}/evals")["evals"] for one in found["points"]]
    evals = [point["address"] for point in points if point["address"]][-1:]
    of_evals = [ui.get(address)["tasks"]["columns"]["address"][0] for address in evals]
    sides = [quote(side_of(address), safe="") for address in (first, second)]
    below = ("rollouts", "timeline", "infra", "evals", "logs", "config")
    return [
        f"/runs/{run}",
        *(f"/runs/{run}/{name}" for name in below),
        f"/runs/{run}/rollouts?q=step",
        first,
        f"{first}?ui.view=tokens",
        f"{first}?ui.view=calls",
        f"{first}?ui.view=record",
        *(around[name] for name in ("group", "example", "timeline") if around[name]),
        f"/difference?left={sides[0]}&right={sides[1]}",
        *evals,
        *of_evals,
    ]


def side_of(address: str) -> str:
    """Return the address of a rollout as a side of a difference."""
    _, _, run, _, *rest = address.split("/")
    return "/".join([run, *rest])


def faults(page: Browser, axe: str) -> list[str]:
    """Return what is wrong with the page that is open."""
    page.evaluate(f"{axe}; 0")
    asked = "axe.run().then(found => JSON.stringify(found.violations))"
    return [
        f"{one['impact']}: {one['help']}: {node['html'][:160]}"
        for one in json.loads(page.evaluate(asked))
        for node in one["nodes"][:3]
    ]


def follow_a_metric(page: Browser, ui: Served, run: str) -> str:
    """Go from a curve to a rollout, its tokens, and the moment of its call, in four clicks.

    Returns what the timeline then says of the call.
    """
    show(page, ui, f"/runs/{run}")
    page.click(".plot.can-pick")
    page.until("location.pathname.endsWith('/rollouts') && location.search.includes('step_from=')")
    page.until(f"{SETTLED} && !!document.querySelector('{FIRST_ROLLOUT}')")
    page.click(FIRST_ROLLOUT)
    page.until(f"!location.pathname.endsWith('/rollouts') && {SETTLED}")
    page.click("button[aria-pressed]:nth-of-type(2)")
    page.until("document.querySelectorAll('.token.is-sampled').length > 0")
    page.click(".head a[href*='/timeline']")
    page.until(f"location.pathname.endsWith('/timeline') && {SETTLED}")
    page.until("!!document.querySelector('section.card')")
    return page.evaluate("document.querySelector('section.card').innerText")


def require_shown(folder: Path, run: str, place: Path) -> None:
    """Assert that a browser shows every page of a run that was really made, without complaints.

    Also on a phone in the dark, without a fault that axe-core finds where the packages of
    the front end are installed, and from a metric down to the server and the moment of a call.
    """
    axe = AXE.read_text() if AXE.is_file() else ""
    with served([folder], place / "ui-cache") as ui, browser(place / "profile") as page:
        page.resize(1280, 900)
        enter(page, ui)
        for scheme, width in (("light", 1280), ("dark", 360)):
            page.prefer(scheme)
            page.resize(width, 900)
            for address in ["/", *all_pages(ui, run)]:
                show(page, ui, address)
                assert not page.complaints, (address, page.complaints)
                assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), (
                    page.text()
                )
                assert not page.evaluate(IS_WIDER_THAN_THE_WINDOW), (address, width)
                assert not axe or not faults(page, axe), (address, scheme, faults(page, axe))
        page.prefer("light")
        page.resize(1280, 900)
        told = follow_a_metric(page, ui, run)
        calls = RunFolder.open(folder / run).calls()
        assert any(is_told(call, told) for call in calls), told
        assert "Open the rollout" in told
        assert not page.complaints


def is_told(call: ModelCall, told: str) -> bool:
    """Whether the timeline's text is of a call by that server, for that step, of that version."""
    server = f"call\nOf\n{call.server}\nBegan\n"
    return told.startswith(server) and f"Step\n{call.step}\nVersion\n{call.version}\n" in told
