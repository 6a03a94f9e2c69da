"""The agents of two how-tos, as a reader copies them."""

import re
from pathlib import Path

HOW_TOS = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = {"sums.py": "bring-an-agent.md", "mend.py": "train-an-agent.md"}
AGENTS = {"sums:Sums": 2, "mend:Mend": 1}
"""Name -> turns of a rollout. Random weights begin no command, so the agent in the sandbox ends
with the first answer."""


def write_agents(folder: Path) -> None:
    """Write the files of the pages to `folder`."""
    for name, page in PAGES.items():
        text = (HOW_TOS / page).read_text()
        source = re.search(rf'title="{name}"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
        assert source is not None
        (folder / name).write_text(source[1])
