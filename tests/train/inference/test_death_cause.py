"""The first error in what a server prints is why it died, and not the many that follow from it."""

import pytest

from telescope_train.inference.death_cause import MAX_CHARACTERS, DeathCause, is_same_cause

CAUSE = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


def logged(who: str, *lines: str) -> list[str]:
    return [f"({who}) ERROR 11-26 17:07:03 [core.py:1512] {line}" for line in lines]


def traceback(exception: str) -> list[str]:
    return [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in b',
        "    c()",
        exception,
    ]


def cause_of(*lines: str, has_ended_itself: bool = True) -> str:
    cause = DeathCause()
    for line in lines:
        cause.hear(line)
    return cause.found(has_ended_itself=has_ended_itself)


ENGINE, SERVER = "EngineCore pid=8091", "APIServer pid=7867"
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace"
REFUSED = logged(SERVER, *traceback("ValueError: a request that was refused long ago"))
OF_ENGINE = logged(ENGINE, "EngineCore encountered a fatal error.", *traceback(CAUSE))
AFTERMATH = [
    *logged(SERVER, "AsyncLLM output_handler failed.", *traceback(DEAD)),
    "INFO:     Shutting down",
    *traceback("RuntimeError: Engine core initialization failed. See root cause above."),
]


def test_of_an_engine_in_a_process_of_its_own():
    assert cause_of(*REFUSED, *OF_ENGINE, *AFTERMATH) == CAUSE
    assert cause_of(*REFUSED, *OF_ENGINE, *AFTERMATH, has_ended_itself=False) == CAUSE


def test_of_an_engine_in_a_thread_whose_error_became_another():
    chain = [*traceback(CAUSE), "", "The above exception was the direct cause of the following", ""]
    lines = logged(SERVER, "the engine failed", *chain, *traceback(DEAD))
    assert cause_of(*lines, *AFTERMATH) == CAUSE


def test_of_a_worker_of_several_whose_lines_are_mixed_with_others():
    worker = logged("Worker_TP0 pid=9", "WorkerProc failed to start.", *traceback(CAUSE))
    mixed = [*worker[:2], "(APIServer pid=1) INFO 11-26 17:07:03 [a.py:1] waiting", *worker[2:]]
    failed = traceback("Exception: WorkerProc initialization failed due to an exception")
    assert cause_of(*mixed, *logged(ENGINE, "EngineCore failed to start.", *failed)) == CAUSE


def test_of_a_server_that_ends_before_there_is_an_engine():
    lines = traceback("pydantic_core.ValidationError: 1 validation error for ModelConfig")
    found = cause_of(*lines, "  Value error, max_model_len (9) is too long [type=value_error]")
    assert found.startswith("pydantic_core.ValidationError: 1 validation error")
    assert "max_model_len (9) is too long" in found


def test_one_that_was_killed_did_not_die_of_what_it_printed_before():
    assert cause_of(*REFUSED, has_ended_itself=False) == ""
    assert cause_of("INFO all is well", "line 2") == ""


def test_it_is_cut():
    assert len(cause_of(*traceback(f"ValueError: {'x' * 10_000}"))) == MAX_CHARACTERS


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("A: at 0x7f00 of 12 GiB", "A: at 0x7e11 of 11.5 GiB", True),
        ("A: a", "A: b", False),
        ("", "", False),
    ],
)
def test_numbers_do_not_make_another_cause(one, other, expected):
    assert is_same_cause(one, other) is expected
