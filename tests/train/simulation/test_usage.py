"""How busy a simulated run is over time: readings add up to what was done, and so do pictures."""

from dataclasses import replace

import pytest
from tests.train.simulation.test_simulated_runs import scenario

from telescope_train.inference.servers import call_servers
from telescope_train.simulation.estimate import Course, Estimate, Expected, Hardware
from telescope_train.simulation.picture import lines_of, write_page
from telescope_train.simulation.run import Simulated, simulate


@pytest.fixture(scope="module")
def found() -> Simulated:
    return simulate(scenario(steps=15, groups=16, num_servers=3))


@pytest.mark.slow
def test_readings_add_up_to_what_was_done(found: Simulated) -> None:
    assert found.usage[0].from_s == 0.0
    assert found.usage[-1].to_s == found.duration_s
    spans = [(one, one.to_s - one.from_s) for one in found.usage]
    servers = sum(one.servers_busy * seconds for one, seconds in spans) / found.duration_s
    ranks = sum(one.ranks_busy * seconds for one, seconds in spans) / found.duration_s
    assert servers == pytest.approx(found.server_busy)
    assert ranks == pytest.approx(found.trainer_busy)
    assert all(0.0 <= one.servers_busy <= 1.0 + 1e-9 for one in found.usage)
    assert all(0.0 <= one.ranks_busy <= 1.0 + 1e-9 for one in found.usage)
    assert max(one.groups_ready for one in found.usage) > 0


@pytest.mark.slow
def test_a_long_run_has_no_more_readings_than_a_short_one(found: Simulated) -> None:
    assert found.duration_s > 600
    assert len(found.usage) <= 240


@pytest.mark.slow
def test_queues_are_seen_where_there_are_fewer_slots_than_rollouts() -> None:
    roomy = scenario(steps=3, groups=32, num_servers=1)
    update = {"max_concurrent_prompts_per_server": 2}
    section = roomy.config.scheduling.model_copy(update=update)
    config = roomy.config.model_copy(update={"scheduling": section})
    found = simulate(replace(roomy, config=config))
    assert max(one.rollouts_waiting for one in found.usage) > 50


def test_each_step_is_told_and_has_its_time() -> None:
    told: list[int] = []
    found = simulate(scenario(steps=5, on_step=told.append))
    assert told == [1, 2, 3, 4, 5]
    assert list(found.ended_s) == sorted(found.ended_s)
    assert found.ended_s[-1] == found.duration_s


def test_servers_in_step_give_the_run_that_servers_one_by_one_give() -> None:
    in_step = simulate(scenario(steps=5, num_servers=5))
    alone = simulate(scenario(steps=5, num_servers=5, call=call_servers))
    assert in_step.rows == alone.rows
    busy = [one.servers_busy for one in in_step.usage]
    assert busy == pytest.approx([one.servers_busy for one in alone.usage])


def test_the_picture_has_every_curve_in_80_columns(found: Simulated) -> None:
    lines = lines_of(Course.from_simulated(found))
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for name in ("servers busy", "ranks busy", "server queue", "groups ready", "staleness"):
        assert name in text
    assert f"mean {found.server_busy:.0%}" in text
    assert "server queue       0 at all times" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_whatever_its_numbers_are(found: Simulated, width: int) -> None:
    course = Course.from_simulated(found)
    usage = tuple(replace(one, rollouts_waiting=1_234_567.0) for one in course.usage)
    lines = lines_of(replace(course, usage=usage), width)
    assert "slot queue    1,234,567 " in "\n".join(lines)
    assert 40 <= max(map(len, lines)) <= max(44, min(width, 80))


def test_the_page_stands_alone(found: Simulated, tmp_path) -> None:
    expected = Expected.from_simulated(found, Hardware(num_gpus=5, num_servers=3))
    estimate = Estimate(
        chosen=expected, course=Course.from_simulated(found), others=(), limit="training"
    )
    write_page(tmp_path / "plan.html", estimate, title="a <plan>")
    text = (tmp_path / "plan.html").read_text()
    assert text.count('<svg class="chart"') == 4
    assert "a &lt;plan&gt;" in text
    assert "http" not in text
