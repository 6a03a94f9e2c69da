"""Which attempts are final, for training and evals alike."""

import decimal
import errno
import http.client
import io
import re
import zlib
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.core.one_rollout import One, play

from telescope_core import reward, runs_in
from telescope_core.base.retries import (
    MAX_FAILED,
    MAX_LOST,
    as_failed,
    is_of_answer,
    is_transient,
    play_with_attempts,
    reached_limit,
    require_others,
    says_too_long,
)
from telescope_core.chat import http as chat_http
from telescope_core.errors import (
    ContextLengthError,
    EndpointAccessError,
    EndpointError,
    JudgeError,
    RewardError,
    RewardRaisedError,
    TemplateLossError,
    UnplayableError,
)
from telescope_core.sandboxes.protocol import SandboxError, SandboxFileError
from telescope_core.types import Rollout, RolloutStatus, StopReason


def ended(error: str | None = None, stop_reason: StopReason = StopReason.ERROR) -> Rollout:
    if error is None:
        return Rollout(environment="e", example_id="x", group_id="g", index=0, reward=1.0)
    return Rollout(
        environment="e",
        example_id="x",
        group_id="g",
        index=0,
        status=RolloutStatus.FAILED,
        status_reason=error.partition(":")[0],
        stop_reason=stop_reason,
        error=error,
    )


def script(*outcomes: Rollout):
    """Return a `play` that gives `outcomes` in order, the last one for ever, and the attempts."""
    asked: list[int] = []

    async def play(attempt: int) -> Rollout:
        asked.append(attempt)
        return outcomes[min(attempt, len(outcomes)) - 1]

    return play, asked


LOST = ended("EnvironmentProcessError: gone")
BROKEN = ended("EndpointError: connection refused")
SCORED = ended()
LIMITS = [
    ended("TimeoutError: rollout exceeded its deadline of 5 s", StopReason.TIMEOUT),
    ended("ContextLengthError: the conversation has 90 tokens"),
    ended("EndpointError: 400: This model's maximum context length is 128 tokens"),
    ended("EndpointError: 400: code context_length_exceeded"),
]


TOO_LONG = [
    "This model's maximum context length is 128000 tokens. However, your messages resulted in",
    "Your input exceeds the context window of this model. Please adjust your input",
    '{"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 139, "n_ctx": 128}',
    "request (139 tokens) exceeds the available context size (128 tokens), try increasing it",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "prompt is too long: 209353 tokens > 199999 maximum",
    "Prompt too long: 5152 tokens exceeds max_seq_len 2048",
    "ValidationException: Input is too long for requested model.",
    "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575).",
    "prompt token count of 80000 exceeds the limit of 64000",
    "Input length 131393 exceeds the maximum allowed input length of 131040 tokens.",
    "Prompt length (5000) exceeds maximum input length (4096)",
    '{"code": "1261", "message": "Prompt exceeds max length"}',
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "Please reduce the length of the messages or completion.",
    "Invalid request: Your request exceeded model token limit: 262144",
    "InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "Input validation error: `inputs` must have less than 1023 tokens. Given: 1500",
    "too many tokens: total number of tokens in the prompt cannot exceed 4081",
]
"""Of OpenAI, llama.cpp, SGLang, Anthropic, Atlas, Bedrock, Gemini, GitHub, Poolside, NIM, Z.ai,
xAI, Groq, Moonshot, DashScope, Text Generation Inference and Cohere."""
NOT_TOO_LONG = [
    "Request too large for gpt-4 on tokens per min (TPM): Limit 10000, Requested 12000.",
    "Rate limit reached on tokens per minute (TPM): reduce your message size and try again",
    "Too many tokens, please wait before trying again.",
    "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
    "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
    "top_logprobs exceeds the maximum of 20",
    *(f"http://x/v1 answered {code}: no; {text}" for code, text in chat_http._ADVICE.items()),
]


@pytest.mark.parametrize("text", TOO_LONG)
def test_servers_say_in_many_ways_that_a_prompt_is_too_long(text):
    assert says_too_long(f"http://x/v1/chat/completions answered 400: {text}")


@pytest.mark.parametrize("text", NOT_TOO_LONG)
def test_other_limits_and_our_own_advice_say_nothing_of_prompts(text):
    assert not says_too_long(text)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda rollout: rollout.error)
async def test_a_limit_is_an_outcome_and_never_played_again(limit):
    play, asked = script(limit, SCORED)
    failures: list[Rollout] = []
    assert await play_with_attempts(play, on_failure=failures.append) == limit
    assert asked == [1]
    assert failures == [limit]


async def test_a_limit_after_a_failure_is_final_too():
    play, asked = script(BROKEN, LIMITS[0], SCORED)
    final = await play_with_attempts(play)
    assert (final.error, final.tags) == (LIMITS[0].error, {"attempts": "2"})
    assert asked == [1, 2]


async def test_a_score_that_breaks_its_contract_is_not_bought_a_second_time():
    play, asked = script(ended(f"{RewardError.__name__}: -1 is out of range"), SCORED)
    assert (await play_with_attempts(play)).reward is None
    assert asked == [1]
    play, asked = script(ended(f"{RewardRaisedError.__name__}: the judge is away"), SCORED)
    assert (await play_with_attempts(play)).reward == 1.0


@pytest.mark.parametrize(
    ("error", "failed_in", "num_attempts"),
    [
        ("ValueError: no box (in reward R.right (r.py:3))", "reward", 1),
        ("RewardRaisedError: R.right raised KeyError: 'x' (in reward", "reward", 1),
        ("KeyError: 'move' (in env_response)", "play", 1),
        ("ValueError: no such level", "setup", MAX_FAILED),
        ("ConnectionError: refused (in reward R.right (r.py:3))", "reward", MAX_FAILED),
        ("RewardRaisedError: R.right raised OSError: refused", "reward", MAX_FAILED),
        # Of a worker of before the tag, names that are not known here are all that tells.
        ("InvalidOperation: [ConversionSyntax] (in reward)", "reward", 1),
        ("MyError: odd (in reward)", "reward", 1),
        ("ClientConnectorError: refused (in reward)", "reward", MAX_FAILED),
        # Python makes none of these without arguments.
        ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff (in reward)", "reward", 1),
        ("RewardRaisedError: R.right raised UnicodeEncodeError: surrogates", "reward", 1),
        ("ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)", "play", 1),
        ("JudgeError: judge: no usable answer in 3 attempts", "reward", 1),
        ("JudgeError: judge answered 500", "reward", MAX_FAILED),
    ],
)
async def test_an_answer_at_which_code_fails_is_not_replaced_by_another(
    error, failed_in, num_attempts
):
    turns = (await play(One())).turns
    answered = replace(ended(error), turns=turns, tags={"failed_in": failed_in})
    again, asked = script(answered)
    assert (await play_with_attempts(again)).error == error
    assert len(asked) == num_attempts
    again, asked = script(replace(answered, turns=()))
    await play_with_attempts(again)
    assert len(asked) == MAX_FAILED


class OddError(Exception):
    """One of an author."""


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class HttpStatusError(Exception):
    """One of a client for HTTP, such as httpx."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.response = SimpleNamespace(status_code=status)


OF_CODE = [
    *(ValueError("no box"), decimal.InvalidOperation(), OddError(), zlib.error(), re.error("x")),
    *(RuntimeError(), SystemExit(3), FileNotFoundError("none"), io.UnsupportedOperation()),
    *(OSError(errno.ENAMETOOLONG, "too long"), HttpStatusError(400), SandboxFileError("none")),
    chained(OddError(), ValueError()),
    JudgeError("no usable answer"),
    ExceptionGroup("both", [OddError()]),
]
OUTSIDE = [
    *(ConnectionError("refused"), OSError("away"), MemoryError(), BrokenProcessPool()),
    *(http.client.IncompleteRead(b""), HttpStatusError(429), HttpStatusError(503)),
    *(EndpointError("away"), SandboxError("away"), chained(OddError(), ConnectionError())),
    chained(JudgeError("away"), EndpointError("busy", status=503)),
    ExceptionGroup("both", [ConnectionResetError()]),
]


class Raises(One):
    error: BaseException = OddError()

    @reward
    def right(self, rollout, example):
        raise self.error


@pytest.mark.parametrize("error", [*OF_CODE, *OUTSIDE], ids=repr)
async def test_a_reward_that_raises_for_some_wrong_answers_does_not_replace_them(error):
    environment = Raises()
    environment.error = error
    rollout = await play(environment)
    assert rollout.status is RolloutStatus.FAILED
    assert is_of_answer(rollout) == (error in OF_CODE)


def test_a_chain_of_errors_that_leads_back_to_its_beginning_has_an_end():
    one, other = OddError(), ValueError()
    one.__cause__, other.__context__ = other, one
    assert not is_transient(one)


async def test_an_error_that_takes_the_place_of_one_of_code_is_judged_anew():
    failed = await play(Raises())
    assert is_of_answer(failed)
    assert not is_of_answer(as_failed(failed, "EndpointError: away"))


class Apart(One):
    @reward
    @runs_in("process")
    def right(self, rollout, example):
        if rollout.completion_text == "odd":
            raise OddError
        raise ConnectionError("refused")


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["odd", "yes"])
async def test_a_reward_in_a_process_of_its_own_is_judged_there(answer):
    rollout = await play(Apart(), [answer])
    assert "Apart.right raised" in rollout.error
    assert is_of_answer(rollout) == (answer == "odd")


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (EndpointAccessError, "here"),
        (TemplateLossError, "here"),
        # It may be of one example alone, such as one task of a folder.
        (UnplayableError, "here, example 'x'"),
    ],
)
async def test_a_failure_of_all_is_final_at_once_and_raised_with_its_cause(kind, where):
    play, asked = script(ended(f"{kind.__name__}: no: never"), SCORED)
    final = await play_with_attempts(play)
    assert asked == [1]
    with pytest.raises(kind, match=rf"^{where}: no: never$"):
        require_others(final, "here")
    require_others(BROKEN, "here")
    require_others(SCORED, "here")


async def test_a_failure_is_played_again_up_to_its_limit():
    play, asked = script(BROKEN)
    final = await play_with_attempts(play)
    assert asked == [*range(1, MAX_FAILED + 1)]
    assert final.reward is None
    play, asked = script(BROKEN, SCORED)
    assert (await play_with_attempts(play)).tags == {"attempts": "2"}
    play, asked = script(BROKEN, SCORED)
    assert (await play_with_attempts(play, max_failed=1)).error == BROKEN.error
    assert asked == [1]


async def test_every_attempt_is_numbered_and_handed_on_once():
    play, _ = script(BROKEN, LOST, SCORED)
    replaced: list[Rollout] = []
    final = await play_with_attempts(play, on_replaced=replaced.append)
    assert [(one.attempt, one.error) for one in (*replaced, final)] == [
        (1, BROKEN.error),
        (2, LOST.error),
        (3, None),
    ]
    play, _ = script(BROKEN)
    replaced.clear()
    final = await play_with_attempts(play, on_replaced=replaced.append)
    assert [one.attempt for one in (*replaced, final)] == [*range(1, MAX_FAILED + 1)]


async def test_lost_attempts_are_counted_apart():
    play, asked = script(*[LOST] * MAX_LOST, *[BROKEN] * (MAX_FAILED - 1), SCORED)
    assert (await play_with_attempts(play)).reward == 1.0
    assert len(asked) == MAX_LOST + MAX_FAILED
    play, asked = script(LOST)
    assert (await play_with_attempts(play)).is_lost
    assert len(asked) == MAX_LOST + 1


async def test_what_scores_at_once_carries_no_tag():
    play, _ = script(SCORED)
    assert (await play_with_attempts(play)).tags == {}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContextLengthError("no room for a turn"), True),
        (EndpointError("maximum context length is 128"), True),
        (EndpointError("connection reset"), False),
        (RuntimeError("maximum context length is 128"), False),
    ],
)
async def test_limits_are_seen_in_rollouts_that_were_really_played(error, expected):
    rollout = await play(One(), [error])
    assert rollout.status is RolloutStatus.FAILED
    assert reached_limit(rollout) is expected
