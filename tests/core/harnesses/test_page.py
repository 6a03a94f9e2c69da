"""The environment of `docs/how-to/train-an-agent.md` does what the page says."""

import re
from pathlib import Path

import pytest
from tests.core.harnesses.agents import playing

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "train-an-agent.md"


@pytest.mark.slow
async def test_the_environment_of_the_page_gives_a_reward_for_a_mended_program():
    source = re.search(r'title="mend.py"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert source is not None
    namespace: dict = {"__name__": "mend"}
    exec(compile(source[1], str(PAGE), "exec"), namespace)
    async with playing(namespace["Mend"]()) as play:
        mended, policy = await play("$ sed -i 's/.1:.//' price.py; cat price.py", "Mended.")
        assert mended.reward == 1.0, mended.error
        assert "return sum(prices)\n" in policy.asked[1]
        assert mended.completion_text == "Mended."
        left, _ = await play("I would rather not.")
        assert left.reward == 0.0, left.error
