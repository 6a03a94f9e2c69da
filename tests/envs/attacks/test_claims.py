"""What a publisher claims to be, and names of publishers that a file format could choke on."""

from contextlib import closing

import pytest
from tests.envs.server.sending import Sender, publication_now
from tests.envs.serving import served

from telescope_core.errors import ConfigError
from telescope_envs.records.reading import parse_namespace
from telescope_envs.server.auth import Scope
from telescope_envs.server.hub import HubStore


@pytest.mark.parametrize(
    ("scope", "publisher"), [(Scope.PUBLISH, "acme"), (Scope.ADMIN, "telescope (verified)")]
)
def test_the_publisher_is_whom_the_token_is_for(tmp_path, scope, publisher):
    """An admin runs the registry, and may bring releases that others have published elsewhere."""
    with served(tmp_path / "hub") as hub, Sender(hub.address, hub.token(scope)) as sender:
        publication = publication_now(publisher="telescope (verified)")
        assert sender.publish(publication).status_code == 201
        (release,) = hub.store.releases.all_of("acme/toy")
        assert release.publisher == publisher
        assert sender.publish(publication).status_code == 200


@pytest.mark.parametrize("name", ["\U0001f600", 'a "b" \\ c', "\u00fc", "'''", "#", "a=b"])
def test_any_name_of_a_publisher_can_be_read_back(tmp_path, name):
    with closing(HubStore(tmp_path)) as store:
        store.add_namespace("acme", [{"kind": "user", "id": name}])
        (publisher,) = parse_namespace(store.read("namespaces/acme.toml") or b"", "x").publishers
        assert publisher.id == name


@pytest.mark.parametrize("name", ["a\nb", "\x7f", "\x1b[2J", "\u202e", "\ud83d", "x" * 1001])
def test_a_name_that_no_reader_accepts_is_refused(tmp_path, name):
    with closing(HubStore(tmp_path)) as store:
        with pytest.raises(ConfigError, match=r"publishers\.0\.id"):
            store.add_namespace("acme", [{"kind": "user", "id": name}])
        assert store.read("namespaces/acme.toml") is None
