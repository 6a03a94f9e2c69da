"""One of ours that is served to others: say the number, then say it doubled."""

from telescope_core import (
    Example,
    ListSource,
    Message,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    StopReason,
    metric,
    reward,
)


class Echo(MultiTurnEnvironment):
    """The last answer is twice the number."""

    def examples(self, split):
        start = 0 if split == "train" else 100
        return ListSource(
            [
                Example(id=str(n), prompt=f"Say {n}", answer=str(2 * n))
                for n in range(start, start + 8)
            ]
        )

    def env_response(self, messages, episode):
        if messages[-1].content == "break":
            raise RuntimeError("it broke")
        return "Now doubled." if len(episode.turns) == 1 else None

    @reward
    def right(self, completion, answer):
        return float(completion == answer)

    @metric
    def letters(self, completion):
        return float(len(completion))


class Rewrites(SingleTurnEnvironment):
    """Its second question replaces the conversation, and its third one goes on from there."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-0", prompt="A long story.", answer="3")])

    async def play(self, episode):
        await episode.generate()
        episode.messages[:] = [Message(role="user", content="In short: two.")]
        await episode.generate()
        episode.messages.append(Message(role="user", content="And three?"))
        await episode.generate()
        return StopReason.COMPLETED

    @reward
    def right(self, completion, answer):
        return float(completion == answer)
