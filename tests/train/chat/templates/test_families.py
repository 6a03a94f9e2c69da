"""For each family of templates: what is trained was sampled, and the rest is what it renders."""

from functools import partial
from itertools import pairwise

import pytest
from tests.train.chat.templates.families import Family
from tests.train.chat.templates.newer_families import ALL_FAMILIES
from tests.train.chat.templates.play import SCENARIOS, TOOLS, Played, Reply, play
from tests.train.chat.templates.tokenizers_made_here import one_by_one

from telescope_train.batches.samples import samples_from_rollout

CASES = [
    pytest.param(family, scenario, id=f"{family.name}: {scenario}")
    for family in ALL_FAMILIES
    for scenario in family.chains
]


def rendered(family: Family, played: Played, turn: int) -> list[int]:
    """What the tokenizer makes of the template's text, without any code of ours."""
    tokenizer = family.tokenizer()
    messages = played.prompts[turn].messages
    tools = TOOLS if any(message.tool_calls for message in played.messages) else None
    renderer = family.renderer()
    text = tokenizer.apply_chat_template(
        [renderer.plain(message) for message in messages],
        tools=tools,
        add_generation_prompt=True,
        tokenize=False,
        **family.arguments,
    )
    assert text == played.prompts[turn].text
    return tokenizer.encode(text, add_special_tokens=False)


def chains_of(played: Played) -> list[list[int]]:
    """Turn numbers of each chain, told from the ids alone."""
    chains: list[list[int]] = []
    for number, prompt in enumerate(played.prompts):
        for chain in chains:
            last = chain[-1]
            whole = played.prompts[last].token_ids + played.turns[last]
            if prompt.token_ids[: len(whole)] == whole:
                chain.append(number)
                break
        else:
            chains.append([number])
    return chains


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_prompts_are_what_the_template_renders(family, scenario):
    played = play(family, SCENARIOS[scenario])
    bos = family.tokenizer().bos_token_id
    for turn, prompt in enumerate(played.prompts):
        assert bos is None or prompt.token_ids.count(bos) == 1
        if not family.shows_ids or scenario != "tools":
            assert list(prompt.token_ids) == rendered(family, played, turn)
    assert len(chains_of(played)) == family.chains[scenario]


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_what_is_trained_is_what_was_sampled(family, scenario):
    """The model writes other tokens than the tokenizer would, and they stay."""
    split = partial(one_by_one, family.tokenizer())
    played = play(family, SCENARIOS[scenario], tokenize=partial(family.continue_with, encode=split))
    samples = samples_from_rollout(played.rollout, 1.0, 1.0)
    chains = chains_of(played)
    assert len(samples) == len(chains) == family.chains[scenario]
    for sample, chain in zip(samples, chains, strict=True):
        last = chain[-1]
        whole = played.prompts[last].token_ids + played.turns[last]
        sampled = [token for turn in chain for token in played.turns[turn]]
        assert tuple(sample.token_ids) == whole
        assert sample.token_ids[sample.mask].tolist() == sampled
    for chain in chains:
        assert list(played.prompts[chain[0]].token_ids) == rendered(family, played, chain[0])
        for before, turn in pairwise(chain):
            kept = len(played.prompts[before].token_ids) + len(played.turns[before])
            added = list(played.prompts[turn].token_ids[kept:])
            assert added, "a turn that adds nothing"
            assert rendered(family, played, turn)[-len(added) :] == added


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_messages_say_what_was_written(family, scenario):
    script = SCENARIOS[scenario]
    said = [one for one in play(family, script).messages if one.role == "assistant"]
    for reply, message in zip([one for one in script if isinstance(one, Reply)], said, strict=True):
        if not reply.lost:
            assert message.content.strip() == reply.content
            assert message.reasoning == reply.thinking
            assert [call.name for call in message.tool_calls] == [call[0] for call in reply.calls]
