"""`Episode.endpoint`: where a program with a client of its own reaches the policy."""

import pytest

from telescope_core import ChatEndpoint, Episode, Example, Sampling
from telescope_core.chat.client import ApiKey, ChatClient
from telescope_core.errors import ConfigError, EndpointError
from telescope_core.scripted import ScriptedClient


def episode_of(policy) -> Episode:
    return Episode(Example(id="e", prompt=""), [], policy=policy, sampling=Sampling(max_tokens=4))


async def test_an_eval_hands_out_the_endpoint_that_was_named():
    client = ChatClient("http://127.0.0.1:9/v1/", "tiny", api_key="secret")
    endpoint = episode_of(client.policy("r")).endpoint
    await client.close()
    assert endpoint == ChatEndpoint(
        base_url="http://127.0.0.1:9/v1", api_key="secret", model="tiny"
    )
    assert "secret" not in repr(endpoint)


def test_a_user_in_the_address_and_a_key_are_refused_together():
    with pytest.raises(ConfigError, match=r"http://h/v1 .*API key .*MY_KEY") as refused:
        ChatClient("http://me:hunter2@h/v1", "m", api_key=ApiKey("sk-abc123", "MY_KEY"))
    assert "hunter2" not in str(refused.value)
    assert "sk-abc" not in str(refused.value)


async def test_a_model_that_is_not_known_yet_is_no_endpoint():
    client = ChatClient("http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1.*check"):
        _ = client.policy("r").endpoint
    await client.close()


def test_a_policy_behind_no_server_says_what_to_use():
    with pytest.raises(EndpointError, match=r"episode\.generate"):
        _ = episode_of(ScriptedClient(["hi"]).policy("r")).endpoint
