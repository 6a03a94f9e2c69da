"""A run of the real loop that goes wrong while somebody looks at its page."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.chromium import browser
from tests.ui.browsing import enter, show
from tests.ui.served import LIMIT_S, served

from telescope_core.types import Message
from telescope_train.loop import train

sys.path.insert(0, str(Path(__file__).parent))
from toy_run import ToyPolicies, toy_config, toy_parts

HEALTHY_STEPS, FAULTY_STEPS = 6, 8


@pytest.mark.nightly
def test_a_fault_that_comes_while_a_run_goes_on_is_named_on_its_page(tiny, start, tmp_path):
    is_seen_healthy, is_healthy = Event(), Event()

    class Forgetful(ToyPolicies):
        """Answers wrong each time once the page was seen without a finding."""

        def _reply(self, generator, messages):
            found = super()._reply(generator, messages)
            if not is_seen_healthy.is_set():
                return found
            return replace(found, message=Message(role="assistant", content="x"))

    async def play():
        config = toy_config(tiny, steps=HEALTHY_STEPS + FAULTY_STEPS)
        parts = await toy_parts(config, tmp_path / "runs" / "r", start, policies=Forgetful())

        async def after_step(step, row):
            if step == HEALTHY_STEPS:
                is_healthy.set()
                assert await asyncio.to_thread(is_seen_healthy.wait, LIMIT_S)

        await train(parts, after_step=after_step)
        await parts.sampler.close()
        parts.folder.finish()

    (tmp_path / "runs").mkdir()
    playing = Thread(target=lambda: asyncio.run(play()))
    playing.start()
    try:
        assert is_healthy.wait(LIMIT_S)
        with served([tmp_path / "runs"], tmp_path / "cache") as ui, browser(tmp_path / "p") as page:
            enter(page, ui)
            show(page, ui, "/runs/r")
            page.until("document.querySelector('.live').innerText === 'live'")
            # The log-probs of its answers are made up, which is a finding of its own.
            assert "The reward fell" not in page.text()
            page.evaluate("window.isNotLoadedAgain = true")
            is_seen_healthy.set()
            page.until("document.querySelector('.findings')?.innerText.includes('The reward fell')")
            assert page.evaluate("window.isNotLoadedAgain")
            page.until("document.querySelector('.run-verdict').innerText.includes('Collapsed')")
    finally:
        is_seen_healthy.set()
        playing.join(LIMIT_S)
