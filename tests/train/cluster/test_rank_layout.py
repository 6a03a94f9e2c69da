"""Rank layouts against the slow definition: ranks dealt one by one, in nested loops."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.config.trainer_section import TrainerSection

SIZE = st.integers(1, 4)


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def layouts(draw) -> RankLayout:
    tensor, context, data, pipeline = (draw(SIZE) for _ in range(4))
    stage = tensor * context * data
    expert = draw(st.sampled_from(divisors(stage)))
    return RankLayout(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        weight_shards=draw(st.sampled_from(divisors(context * data))),
        expert=expert,
        expert_tensor=draw(st.sampled_from(divisors(stage // expert))),
    )


def dealt(layout) -> dict[int, tuple[int, int, int, int]]:
    """Rank -> (tensor, context, data, pipeline), as the order tp-cp-ep-dp-pp says."""
    places = [
        (tensor, context, data, pipeline)
        for pipeline in range(layout.pipeline)
        for data in range(layout.data)
        for context in range(layout.context)
        for tensor in range(layout.tensor)
    ]
    return dict(enumerate(places))


def dealt_to_experts(layout) -> dict[int, tuple[int, int, int, int]]:
    """Rank -> (matrix part, experts, copy of the experts, stage), the second dealing of a stage."""
    stage = layout.num_ranks // layout.pipeline
    places = [
        (part, expert, copy, pipeline)
        for pipeline in range(layout.pipeline)
        for copy in range(stage // (layout.expert * layout.expert_tensor))
        for expert in range(layout.expert)
        for part in range(layout.expert_tensor)
    ]
    return dict(enumerate(places))


@given(layouts())
def test_places_and_rows_are_those_of_the_nested_loops(layout):
    slow, experts = dealt(layout), dealt_to_experts(layout)
    assert layout.num_ranks == len(slow) == len(experts)
    for rank, place in slow.items():
        found = layout.coordinates(rank)
        assert (found.tensor, found.context, found.data, found.pipeline) == place
        assert layout.shard_of(rank) == place[2]
        assert found.expert == experts[rank][1]
    for shard in range(layout.num_shards):
        sharing = [rank for rank, place in slow.items() if place[2] == shard]
        assert len(sharing) == layout.ranks_per_shard
        (speaker,) = [r for r in sharing if slow[r] == (0, 0, shard, layout.pipeline - 1)]
        assert layout.speakers[shard] == speaker
    assert len(layout.speakers) == layout.num_shards


@given(layouts())
def test_groups_are_ranks_that_differ_in_one_thing(layout):
    slow, experts = dealt(layout), dealt_to_experts(layout)
    for index, name in enumerate(("tensor", "context", "data", "pipeline")):
        expected = {}
        for rank, place in slow.items():
            expected.setdefault(place[:index] + place[index + 1 :], []).append(rank)
        assert sorted(layout.groups(name)) == sorted(expected.values())
    expected = {}
    for rank, (part, _, copy, pipeline) in experts.items():
        expected.setdefault((part, copy, pipeline), []).append(rank)
    assert sorted(layout.groups("expert")) == sorted(expected.values())


def test_data_context_and_copies_of_fsdp():
    trainer = TrainerSection(fsdp_context_parallel_size=2, fsdp_replicate_size=2)
    layout = fsdp_layout(trainer, 8)
    assert [layout.shard_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.num_copies == 2
    assert layout.speakers == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fsdp_context_parallel_size": 4}, r"\b6\b.*fsdp_context_parallel_size.*\b4\b"),
        ({"fsdp_replicate_size": 4}, r"fsdp_replicate_size.*\b4\b.*\b6 groups"),
        (
            {"fsdp_context_parallel_size": 2, "fsdp_replicate_size": 2},
            r"fsdp_replicate_size.*\b2\b.*\b3 groups",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(settings, expected):
    with pytest.raises(ConfigError, match=expected):
        fsdp_layout(TrainerSection(**settings), 6)
    assert fsdp_layout(TrainerSection(**settings), 8).num_ranks == 8


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 0}, "data.*1"),
        ({"data": 4, "weight_shards": 3}, "weight_shards .3."),
        ({"data": 4, "expert": 3}, r"expert.*\b4 ranks"),
    ],
)
def test_layouts_that_cannot_be_are_refused(sizes, expected):
    with pytest.raises(ValueError, match=expected):
        RankLayout(**sizes)
    assert RankLayout(**dict.fromkeys(sizes, 2)).num_ranks == 2


def test_layouts_are_known_without_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['ray'] = None\n"
        "from telescope_train.backends.fsdp.layout import fsdp_layout\n"
        "from telescope_train.config.trainer_section import TrainerSection\n"
        "assert fsdp_layout(TrainerSection(), 3).num_shards == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
