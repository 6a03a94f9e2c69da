"""A taskset in the new API of `verifiers`, as others publish them: sums."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the right answer, 0.25 for another number."""
        text = trace.last_reply.strip()
        if self.data.answer == "40":
            raise ZeroDivisionError("the grader broke")
        return 1.0 if text == self.data.answer else 0.25 * text.isdigit()

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    size: int = 40
    has_end: bool = True


class Sums(vf.Taskset[SumTask, SumConfig]):
    INFINITE = False

    @property
    def bounded(self) -> bool:
        return self.config.has_end

    def load(self):
        for i in range(self.config.size):
            shown = SumData(
                prompt=f"{i}+1=",
                system_prompt="Answer.",
                answer=str(i + 1),
            )
            yield SumTask(shown, self.config.task)


__all__ = ["Sums"]
