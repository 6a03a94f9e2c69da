"""What the tests of the pages, with and without a browser, look at: a hub that has everything."""

from tests.envs.projects import toy_publication

from telescope_envs.records.release import (
    Dataset,
    Deprecation,
    Source,
    Status,
    Validation,
)
from telescope_envs.server.hub import HubStore

NASTY = "<script>document.title = 'owned'</script> & \"quotes\""


def fill_with_everything(store: HubStore) -> None:
    """Publish a plain environment, and one whose texts try to be more than text."""
    store.add_namespace("acme", [])
    store.publish(
        toy_publication(
            name="plain",
            tags=("calm",),
            datasets=(Dataset(repo="openai/gsm8k", revision="7" * 40, when="dataset=gsm8k"),),
            validation=Validation(policy="1", verdict="pass", report_sha256="ab" * 32),
            source=Source(repository="https://example.org/acme/plain", commit="f" * 40),
        )
    )
    for version in ("0.1.0", "0.2.0", "0.3.0rc1"):
        store.publish(
            toy_publication(
                version,
                name="nasty",
                summary=NASTY,
                tags=("<b>bold</b>", "calm"),
                secrets=("OPENAI_API_KEY",),
                network="always",
                splits={"train": None, "eval": 1},
                publisher="<img src=x onerror=alert(1)>",
                source=Source(repository="javascript:alert(1)"),
            )
        )
    store.change_status(
        "acme/nasty",
        lambda _: Status(
            yanked={"0.2.0": "paid for <i>nothing</i>"},
            deprecated=Deprecation(reason="too <i>easy</i>", replacement="acme/plain"),
            advisories=("<u>Scores</u> differ.",),
        ),
    )
