"""Makes the pictures of docs/tutorials/tour-of-a-run.md: `make pictures RUNS=runs RUN=quickstart`.

RUNS is a folder of runs, and RUN the key of the one that is shown.
"""

import io
import os
import sys
import tempfile
from pathlib import Path

from PIL import Image
from tests.chromium import Browser, browser
from tests.ui.browsing import SETTLED, enter, show
from tests.ui.served import Served, served

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
NUM_COLORS = 64
WIDTH = 1100


def keep(page: Browser, name: str, height: int) -> None:
    """Write what is shown, with few colors: text and lines need no more."""
    page.until(f"{SETTLED} && document.getAnimations().every(one => one.playState !== 'running')")
    with Image.open(io.BytesIO(page.picture(height))) as picture:
        few = picture.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        few.save(ASSETS / f"ui-{name}.png", optimize=True)


def take(page: Browser, ui: Served, run: str) -> None:
    """Go the way of the tour, with a picture at each stop."""
    show(page, ui, f"/runs/{run}")
    keep(page, "overview", 900)
    last = ui.get(f"/runs/{run}/rollouts?limit=1")["steps"]["last"]
    show(page, ui, f"/runs/{run}/rollouts?step_from={last}&step_to={last}&group=mixed")
    keep(page, "rollouts", 640)
    page.evaluate("document.querySelector('td a.name').click()")
    page.until(f"!location.pathname.endsWith('/rollouts') && {SETTLED}")
    page.evaluate("document.querySelectorAll('button[aria-pressed]')[1].click()")
    page.until("document.querySelectorAll('.token.is-sampled').length > 0")
    page.evaluate("document.querySelector('.tokens').focus()")
    page.key("End")
    keep(page, "tokens", 520)
    page.evaluate("document.querySelector(\".head a[href*='/timeline']\").click()")
    page.until(f"location.pathname.endsWith('/timeline') && {SETTLED}")
    page.until("!!document.querySelector('section.card')")
    keep(page, "timeline", page.evaluate("Math.min(900, document.documentElement.scrollHeight)"))
    show(page, ui, f"/runs/{run}/evals")
    keep(page, "evals", 460)
    page.prefer("dark")
    show(page, ui, f"/runs/{run}/infra")
    keep(page, "infra", 860)


def main() -> None:
    """Serve the runs, and look at them in a browser."""
    folder, run = Path(sys.argv[1]).resolve(), sys.argv[2]
    # The pages name the folder as it was given: where it lies on this machine is nobody's business.
    os.chdir(folder.parent)
    ASSETS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as place,
        served([Path(folder.name)], Path(place) / "cache") as ui,
        browser(Path(place) / "profile") as page,
    ):
        # Answers before this one may be of a part of the run.
        ui.get(f"/runs/{run}")
        page.resize(WIDTH, 900)
        enter(page, ui)
        take(page, ui, run)


if __name__ == "__main__":
    main()
