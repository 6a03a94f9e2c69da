"""Looks with axe-core for faults of accessibility on every page: `scripts/check_ui.sh` runs it.

`python -m tests.ui.accessibility AXE [FOLDER]`: AXE is axe.min.js, FOLDER holds run folders (by
default a small one is made).
"""

import sys
import tempfile
from pathlib import Path

from tests.chromium import browser
from tests.ui.browsing import all_pages, enter, faults, show
from tests.ui.recorded import write_run
from tests.ui.served import served


def main() -> None:
    """Open every page, light and dark, wide and narrow, and tell what is wrong."""
    axe = Path(sys.argv[1]).read_text()
    found: list[str] = []
    num_looks = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(place) / "runs"
        if len(sys.argv) <= 2:
            for name in ("first", "second"):
                write_run(folder / name)
        keys = sorted(path.parent.name for path in folder.glob("*/run.json"))
        with (
            served([folder], Path(place) / "cache") as ui,
            browser(Path(place) / "profile") as page,
        ):
            page.resize(1280)
            enter(page, ui)
            compared = "/compare?" + "&".join(f"run={key}" for key in keys)
            addresses = ["/", *([compared] if len(keys) > 1 else []), *all_pages(ui, keys[0])]
            for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
                page.prefer(scheme)
                page.resize(width)
                for address in addresses:
                    show(page, ui, address)
                    num_looks += 1
                    seen = faults(page, axe)
                    found += [f"{address} ({scheme}, {width} pixels): {one}" for one in seen]
    print("\n".join(found) or f"axe: no fault on {num_looks} pages")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
