"""Checks before a release is published; each error says what to do. Nothing is written here.

A store repeats these checks under its lock where it can. They are made here as well to fail early
and to check more than the registry can.
"""

from collections.abc import Iterable

from packaging.version import Version

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.publish.build import BuiltWheel
from telescope_envs.publish.versions import require_above
from telescope_envs.records.release import Release
from telescope_envs.registry.credentials import login_hint, token_for
from telescope_envs.registry.registry import Registry
from telescope_envs.rules.admission import is_published, near_ids
from telescope_envs.validation import LEVELS, Outcome, Report, Verdict


def require_token(address: str) -> None:
    """Raise ConfigError if a server's token is missing, before anything is built or committed."""
    if address.startswith(("http://", "https://")) and token_for(address) is None:
        raise ConfigError(
            f"publishing to {address} needs a token, and none is set; {login_hint(address)}"
        )


def require_own_name(registry: Registry, environment_id: str, *, new_name_ok: bool) -> None:
    """Raise RegistryError for a new name that people may confuse with an existing one."""
    ids = set(registry.ids())
    if environment_id in ids or new_name_ok:
        return
    near = near_ids(environment_id, ids, registry.aliases())
    if near:
        raise RegistryError(
            f"{environment_id} is new and easily confused with {', '.join(near)}; choose another "
            "name, or give --new-name-ok if you want this one"
        )


def published_as(registry: Registry, built: BuiltWheel, environment_id: str) -> Release | None:
    """Return the release if the same bytes are published; None if the version is a new maximum.

    Raises RegistryError for different bytes under a published version, and for a lower version.
    """
    releases = registry.releases(environment_id)
    version = built.contents.version
    if is_published(registry.store.read, environment_id, version, built.sha256):
        return next(one for one in releases if Version(one.version) == Version(version))
    require_above(version, (known.version for known in releases), environment_id)
    return None


def require_publishable(report: Report, wheel_sha256: str) -> None:
    """Raise RegistryError unless `report` is whole, conclusive, of this wheel, without failure.

    The outcomes of the checks are examined too; the report's own verdict is not enough.
    """
    failed = [check for check in report.checks if check.outcome is Outcome.FAIL]
    if failed or report.verdict is Verdict.FAIL:
        raise RegistryError(
            f"{report.environment} {report.version} does not pass validation: "
            f"{_ids(check.id for check in failed) or 'its verdict is fail'}; run telescope env "
            "validate to see what to do. Nothing was published"
        )
    open_ = [check.id for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    if open_ or report.verdict is Verdict.INCONCLUSIVE:
        raise RegistryError(
            f"the validation of {report.environment} {report.version} is not conclusive: too "
            f"little could be tried for {_ids(open_) or 'its verdict'}. Nothing failed, and "
            "nothing was published: push again when the machine is less busy; if that does not "
            "help, make waits in its code shorter and rewards cheaper"
        )
    not_run = [check.id for check in report.checks if check.outcome is Outcome.NOT_RUN]
    if report.level is not LEVELS[-1] or not_run or not report.checks:
        raise RegistryError(
            f"the validation of {report.environment} is not complete: {_ids(not_run) or 'levels'} "
            "were not run; nothing was published"
        )
    if report.wheel_sha256 != wheel_sha256:
        raise RegistryError(
            f"the validation of {report.environment} is of a different wheel: it has sha256 "
            f"{report.wheel_sha256}, this one has {wheel_sha256}; nothing was published"
        )


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(ids)
