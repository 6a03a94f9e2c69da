"""Opens pages of `telescope ui` in a real Chromium, and waits until they show their data."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tests.chromium import Browser, browser
from tests.ui.served import Served, served

SETTLED = """
!!document.querySelector('main h1') && !document.querySelector('[aria-busy=true]')
  && !document.querySelector('p.empty[role=status]')
"""
"""No part of the page waits for data."""


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


def require_shown(folder: Path, run: str, place: Path) -> None:
    """Assert that a browser shows every page of a run that was really made, without complaints."""
    with served([folder], place / "ui-cache") as ui, browser(place / "profile") as page:
        page.resize(1280, 900)
        enter(page, ui)
        for address in ["/", *all_pages(ui, run)]:
            show(page, ui, address)
            assert not page.complaints, (address, page.complaints)
            assert not page.evaluate("!!document.querySelector('.trouble[role=alert]')"), (
                page.text()
            )
