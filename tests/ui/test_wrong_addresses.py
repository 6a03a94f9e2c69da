"""What a misspelt address gets: what is near, and never an empty page without a word."""

from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_ui.files.database import Database
from telescope_ui.index.runs import Runs

RUN = "/runs/first"


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("/runs/frist", 404, "unknown run 'frist'; did you mean 'first'?"),
        (f"{RUN}/timline", 404, "unknown page 'timline'; did you mean 'timeline'?"),
        ("/comapre", 404, "unknown page 'comapre'; did you mean 'compare'?"),
        ("/runs", 404, "there is no page at /runs; / lists the runs"),
        (f"{RUN}/rollouts?step_form=3", 400, "did you mean 'step_from' or 'step_to'?"),
        (f"{RUN}/rollouts?sort=rewrd", 400, "unknown column 'rewrd'; did you mean 'reward'"),
        (
            f"{RUN}/examples/maths/math%2F0x",
            404,
            "unknown environment 'maths'; did you mean 'math'?",
        ),
        (f"{RUN}/evals/math-aftr", 404, "did you mean 'math-after'"),
        (f"{RUN}/timeline?form=9", 400, "unknown parameter 'form'; did you mean 'from'?"),
        (f"{RUN}?metric=entrpy", 404, "unknown metric 'entrpy'; did you mean 'entropy'?"),
        ("/compare", 400, "the parameter 'run' is missing, as in: run=..."),
        ("/difference?left=a/b/0/1", 400, "the parameter 'right' is missing"),
    ],
)
def test_an_address_that_is_misspelt_is_answered_with_what_is_near(ui, address, status, message):
    assert message in ui.get(address, status)["error"]["message"]


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("rollouts?environment=mth", "unknown environment 'mth'; did you mean 'math'?"),
        ("rollouts?status=keptt", "unknown status 'keptt'; did you mean 'kept'?"),
        ("rollouts?step_from=900", "steps 1 to 3 have ended, so none of those that were asked for"),
        ("rollouts?step_to=0", "steps 1 to 3 have ended"),
        ("logs?component=drver", "unknown component 'drver'; did you mean 'driver'"),
        ("infra?name=gpu/utilisation", "did you mean 'gpu/utilization'?"),
    ],
)
def test_a_filter_that_nothing_can_fit_is_told(ui, address, hint):
    (told,) = ui.get(f"{RUN}/{address}")["hints"]
    assert hint in told


def test_filters_that_fit_something_have_no_hints(ui):
    for address in ("rollouts?environment=math&step_from=2", "logs?component=driver", "infra"):
        assert ui.get(f"{RUN}/{address}")["hints"] == []


@pytest.mark.slow
def test_a_folder_that_is_not_there_is_named_with_what_is_near(tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    database = Database(tmp_path / "cache")
    for given, meant in (("runs/quikstart", "runs/quickstart"), ("quickstart", "runs/quickstart")):
        with pytest.raises(ConfigError, match=rf"^{given}: .* {meant}\?"):
            Runs([Path(given)], database)
    nothing = tmp_path / "nothing" / "like" / "it"
    with pytest.raises(ConfigError, match=rf"^{nothing}: .*telescope ui"):
        Runs([nothing], database)
    database.close()
    assert not nothing.parent.parent.exists()
