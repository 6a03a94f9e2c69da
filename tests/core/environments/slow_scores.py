"""An environment whose scores run in processes; a module of its own, so that they can import it."""

import os
import signal
import sys
import time

from telescope_core import Example, ListSource, SingleTurnEnvironment, metric, reward, runs_in

WORDS = ("ok", "hang", "die", "bad", "leave")


class SlowScores(SingleTurnEnvironment):
    max_processes = 2

    def examples(self, split):
        return ListSource([Example(id=word, prompt=word) for word in WORDS])

    @reward
    @runs_in("process")
    def judged(self, rollout, example):
        if example.id == "hang":
            time.sleep(600)
        if example.id == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if example.id == "bad":
            raise KeyError("nothing there")
        if example.id == "leave":
            sys.exit("bye")
        return 1.0

    @metric
    @runs_in("process")
    async def process(self, rollout, example):
        return os.getpid()


class Unbuildable(SlowScores):
    def __init__(self, config=None):
        super().__init__(config)
        if os.environ.get("ONLY_HERE") != str(os.getpid()):
            raise ValueError("not in another process")
