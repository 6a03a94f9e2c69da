"""What a rollout's recorder keeps: which requests failed, and which conversations there were."""

from dataclasses import replace

import pytest

from telescope_core.errors import ContextLengthError, EndpointError
from telescope_core.gateway.policies import Recorder
from telescope_core.types import Completion, Image, Message, ToolCall, Turn

HI = Message(role="user", content="hi")
SAID = Message(
    role="assistant",
    content="so",
    reasoning="hm",
    tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1, "b": 2}'),),
)
NO = Message(role="assistant", content="", refusal="no")
GO_ON = Message(role="tool", content="1", tool_call_id="c")
FULL = ContextLengthError("a prompt of 90 tokens, but max_model_len is 64")
BROKEN = EndpointError("no answer")


def answer(message: Message = SAID) -> Completion:
    return Completion(message=message, finish_reason="stop")


def turn() -> Turn:
    return Turn(completion=answer(), started_s=0.0, ended_s=1.0)


def test_nothing_was_asked_of_a_new_recorder():
    recorder = Recorder()
    assert (recorder.was_asked, recorder.is_out_of_context, recorder.failure) == (
        False,
        False,
        None,
    )
    assert (recorder.turns, recorder.conversations) == ([], ())


def test_a_first_request_that_does_not_fit_is_a_failure_and_a_later_one_a_limit():
    recorder = Recorder()
    recorder.failed((HI,), FULL)
    assert recorder.failure is FULL
    assert not recorder.is_out_of_context
    recorder.answered((HI,), turn())
    assert recorder.failure is None
    recorder.failed((HI, SAID), FULL)
    assert recorder.is_out_of_context
    assert recorder.failure is None


def test_another_error_after_a_turn_is_a_failure_until_the_same_is_answered():
    recorder = Recorder()
    recorder.answered((HI,), turn())
    recorder.failed((HI, SAID), BROKEN)
    assert recorder.failure is BROKEN
    assert not recorder.is_out_of_context
    recorder.answered((HI,), turn())
    assert recorder.failure is BROKEN
    recorder.answered((HI, SAID), turn())
    assert recorder.failure is None
    assert len(recorder.turns) == 3


def test_an_answer_ends_that_the_context_is_full():
    recorder = Recorder()
    recorder.answered((HI,), turn())
    recorder.failed((HI, SAID), FULL)
    recorder.answered((HI,), turn())
    assert not recorder.is_out_of_context


def test_a_conversation_that_goes_on_is_one():
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI, SAID, GO_ON], answer(replace(SAID, content="end")))
    (conversation,) = recorder.conversations
    assert [one.content for one in conversation] == ["hi", "so", "1", "end"]
    assert not recorder.leaves_out_thinking


def test_a_program_may_write_ids_of_its_own_for_calls():
    """agno does so with ids that do not begin as those of OpenAI do."""
    recorder = Recorder()
    other = ToolCall(id="d", name="g", arguments="{}")
    twice = replace(SAID, tool_calls=(*SAID.tool_calls, other))
    theirs = replace(
        twice,
        reasoning="",
        tool_calls=tuple(replace(call, id=f"call_{call.id}") for call in twice.tool_calls),
    )
    results = [Message(role="tool", content=one, tool_call_id=f"call_{one}") for one in "cd"]
    recorder.heard([HI], answer(twice))
    recorder.heard([HI, theirs, *results], answer(GO_ON))
    # Calls in another order, or others, are another conversation.
    recorder.heard([HI, replace(theirs, tool_calls=theirs.tool_calls[::-1])], answer())
    first, second = recorder.conversations
    results = [replace(one, tool_call_id=one.content) for one in results]
    assert first == (HI, twice, *results, GO_ON)
    assert second[1].tool_calls == theirs.tool_calls[::-1]
    assert recorder.leaves_out_thinking


def test_a_history_that_is_as_long_as_what_was_said_goes_on():
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI, SAID], answer(replace(SAID, content="more")))
    assert [one.content for one in recorder.conversations[0]] == ["hi", "so", "more"]


def test_a_shorter_or_other_history_begins_a_conversation():
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI], answer())
    recorder.heard([replace(HI, content="other"), SAID, GO_ON], answer())
    assert [len(one) for one in recorder.conversations] == [2, 2, 4]


def test_a_history_goes_on_from_the_longest_conversation_that_it_has():
    recorder = Recorder()
    other = replace(GO_ON, content="2")
    recorder.heard([HI], answer())
    recorder.heard([HI, SAID, GO_ON], answer())
    recorder.heard([HI], answer())
    recorder.heard([HI, SAID, GO_ON, SAID, other], answer())
    recorder.heard([HI, SAID, other], answer())
    assert [len(one) for one in recorder.conversations] == [6, 4]


IMAGES = [
    replace(HI, images=(Image(media_type="image/png", data=data),)) for data in ("AAAA", "BBBB")
]
CALLS = [
    replace(SAID, tool_calls=(ToolCall(id="c", name="f", arguments=arguments),))
    for arguments in ('{"city": "Paris"}', '{"city": "Rome"}')
]
SPACED = [replace(SAID, content="so "), SAID]
THOUGHTS = [SAID, replace(SAID, reasoning="other")]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "branches",
    [
        [(one, SAID) for one in IMAGES],
        *([(HI, said) for said in two] for two in (CALLS, SPACED, THOUGHTS)),
    ],
)
def test_of_two_branches_the_one_that_was_sent_back_goes_on(branches, place):
    recorder = Recorder()
    for asked, said in branches:
        recorder.heard([asked], answer(said))
    recorder.heard([*branches[place], GO_ON], answer())
    ends = [2, 2]
    ends[place] = 4
    assert [len(one) for one in recorder.conversations] == ends
    assert recorder.conversations[place][:2] == branches[place]


def test_the_tools_of_all_requests_are_kept_each_in_its_last_form():
    recorder = Recorder()
    old, new, other = (
        {"type": "function", "function": {"name": name, "description": text}}
        for name, text in (("look", "old"), ("look", "new"), ("go", ""))
    )
    odd = {"type": "web_search"}
    for offered in ([old], [new, other, odd], []):
        recorder.answered((HI,), turn(), offered)
    assert recorder.tools == (new, other, odd)


def test_of_two_equal_conversations_the_latest_goes_on():
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI], answer())
    recorder.heard([HI, SAID, GO_ON], answer())
    assert [len(one) for one in recorder.conversations] == [2, 4]


IN_ITS_OWN_WORDS = [
    (SAID, replace(SAID, content=" so\n")),
    (SAID, replace(SAID, reasoning="")),
    (
        SAID,
        replace(SAID, tool_calls=(ToolCall(id="c", name="f", arguments='{"b":2,"a":1.0}'),)),
    ),
    (NO, replace(NO, refusal="")),
    (NO, replace(NO, content="no", refusal="")),
]
ANOTHER = [
    replace(SAID, reasoning="other"),
    replace(SAID, tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 2, "b": 2}'),)),
    replace(SAID, images=IMAGES[0].images),
    replace(SAID, role="user"),
    replace(SAID, content="not so"),
    replace(SAID, tool_calls=()),
    replace(SAID, tool_calls=(ToolCall(id="d", name="f", arguments="{}"),)),
    replace(SAID, tool_calls=(ToolCall(id="c", name="g", arguments="{}"),)),
    replace(SAID, tool_call_id="c"),
]


@pytest.mark.parametrize(("said", "sent"), IN_ITS_OWN_WORDS)
def test_a_message_in_the_words_of_a_program_is_the_same(said, sent):
    recorder = Recorder()
    recorder.heard([HI], answer(said))
    recorder.heard([HI, sent, GO_ON], answer())
    assert len(recorder.conversations) == 1
    # What was answered is kept, and not what the program made of it.
    assert recorder.conversations[0][1] == said


@pytest.mark.parametrize("sent", ANOTHER)
def test_another_message_is_another_conversation(sent):
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI, sent, GO_ON], answer())
    assert len(recorder.conversations) == 2


def test_thinking_that_is_left_out_is_noticed_and_stays_noticed():
    recorder = Recorder()
    recorder.heard([HI], answer())
    recorder.heard([HI, replace(SAID, reasoning=""), GO_ON], answer())
    assert recorder.leaves_out_thinking
    recorder.heard([replace(HI, content="again")], answer())
    assert recorder.leaves_out_thinking


def test_agents_are_told_apart_by_their_system_messages():
    recorder = Recorder()
    main, other = (Message(role="system", content=text) for text in ("lead", "look it up"))
    for asked in ((main, HI), (other, HI), (main, HI, SAID, GO_ON), (HI,)):
        recorder.answered(asked, turn())
    first, second, third, without = (one.agent for one in recorder.turns)
    assert first == third != second
    assert "" not in (first, second)
    assert without == ""
