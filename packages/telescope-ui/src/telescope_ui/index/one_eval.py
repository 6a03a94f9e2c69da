"""`OneEval`: an eval that belongs to no run, in its own folder."""

from typing import Any, cast

from pydantic import ValidationError

from telescope_core.base.errors import ConfigError
from telescope_core.base.secret_names import without_secrets
from telescope_core.records.files import why_no_object
from telescope_core.records.identity import RunInfo
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.eval_files import EvalPlace
from telescope_ui.files.run_files import object_in, stamp_of
from telescope_ui.index.one_run import OneRun, escaped_part


class OneEval(OneRun):
    """An eval in an opened folder, presented as a run with only the records of the eval."""

    changing = ("eval.json", "results.json", "rollouts.jsonl")

    @property
    def place(self) -> EvalPlace:
        """Location of its files."""
        return EvalPlace(self.path)

    def info(self) -> RunInfo:
        """Return identity and state; raises ConfigError for a file that cannot be read."""
        stamp = stamp_of(self.path / "eval.json")
        if stamp is None:
            raise ConfigError(f"{self.path.name} has no eval.json, so its state is not known")
        if self._info is None or self._info[0] != stamp:
            about = self._about()
            if not about:
                raise ConfigError(
                    f"{self.path.name}: expected the folder of an eval, but "
                    f"{why_no_object(self.path / 'eval.json')}"
                )
            try:
                info = RunInfo.model_validate(about.get("run"))
            except ValidationError as error:
                where = ".".join(str(part) for part in ("run", *error.errors()[0]["loc"]))
                raise ConfigError(
                    f"{self.path.name}/eval.json is damaged: {where}: {error.errors()[0]['msg']}; "
                    "copy it again, or play the eval again"
                ) from None
            self._info = (stamp, info)
        return self._info[1]

    def config(self) -> dict[str, Any]:
        """Return the settings of the eval; empty if they cannot be read."""
        stamp = stamp_of(self.path / "eval.json")
        if self._config is None or self._config[0] != stamp:
            manifest: object = self._about().get("manifest")
            found = cast(dict[str, Any], manifest) if isinstance(manifest, dict) else {}
            self._config = (stamp, without_secrets(found))
        return self._config[1]

    def brief(self) -> JsonObject:
        """Return the facts about the eval for every page; without records, its state is unknown."""
        has_state = stamp_of(self.path / "eval.json") is not None
        state = self.info().observed_state.value if has_state else ""
        return {"key": self.key, "name": self.path.name, "state": state}

    def address(self, *parts: object) -> str:
        """Return the address of a page of this eval."""
        return "/".join(["/evals", self.key, *map(escaped_part, parts)])

    def _about(self) -> JsonObject:
        return object_in(self.path, "eval.json") or {}
