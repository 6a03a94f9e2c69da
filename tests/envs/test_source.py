"""Where a release comes from, without the secrets of whoever published it."""

import pytest

from telescope_envs.publish.source import public_address


@pytest.mark.parametrize(
    ("remote", "public"),
    [
        ("https://git.example/acme/envs.git", "https://git.example/acme/envs"),
        ("https://me:token@git.example:8443/acme/envs", "https://git.example/acme/envs"),
        ("https://token@git.example/acme/envs?key=1#x", "https://git.example/acme/envs"),
        ("git@git.example:acme/envs.git", "https://git.example/acme/envs"),
        ("ssh://git@git.example:22/acme/envs.git", "https://git.example/acme/envs"),
        ("/srv/envs", ""),
        ("../envs", ""),
        ("file:" + "///srv/envs", ""),
        ("C:\\envs", ""),
        ("", ""),
    ],
)
def test_a_repository_is_recorded_without_credentials(remote, public):
    assert public_address(remote) == public
