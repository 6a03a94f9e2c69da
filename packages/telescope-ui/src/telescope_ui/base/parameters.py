"""The parameters of addresses, checked: everything after the `?` of each page."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from telescope_ui.base.curves import Drawn

MAX_TEXT = 1000
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
CursorText = Annotated[str, StringConstraints(max_length=100_000)]
Texts = Annotated[list[Text], Field(max_length=100)]
Points = Annotated[int, Field(ge=10, le=5000)]
Step = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)]


class Parameters(BaseModel):
    """Common to all pages: unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class CurveParameters(Parameters):
    """Parameters of pages with curves over steps."""

    metric: Texts = []
    section: Texts = []
    points: Points = 1000
    first: Step | None = Field(default=None, alias="from")
    last: Step | None = Field(default=None, alias="to")
    smooth: Annotated[int, Field(ge=1, le=200)] | None = None

    @property
    def drawn(self) -> Drawn:
        """The part of curves to draw, and the settings for it."""
        return Drawn(self.points, self.first, self.last, self.smooth)


class OverviewParameters(CurveParameters):
    """Parameters of `/runs/{run}`."""


class CompareParameters(CurveParameters):
    """Parameters of `/compare`."""

    run: Annotated[list[Text], Field(min_length=1, max_length=12)]


class CompareExamplesParameters(Parameters):
    """Parameters of `/compare/examples`."""

    run: Annotated[list[Text], Field(min_length=1, max_length=12)]
    environment: Texts = []
    limit: Annotated[int, Field(ge=1, le=500)] = 50


class RolloutsParameters(Parameters):
    """Parameters of `/runs/{run}/rollouts`."""

    step_from: Step | None = None
    step_to: Step | None = None
    environment: Texts = []
    status: Texts = []
    status_reason: Texts = []
    stop_reason: Texts = []
    error: Texts = []
    example_id: Texts = []
    group_id: Texts = []
    server: Texts = []
    reward_from: float | None = None
    reward_to: float | None = None
    truncated: bool | None = None
    version: Step | None = None
    attempts: Literal["last", "replaced", "all"] = "last"
    where: Texts = []
    """`COLUMN>=NUMBER`."""
    tag: Texts = []
    """`NAME=VALUE` or `NAME`."""
    group: Literal["", "mixed", "equal", "signal", "no_signal"] = ""
    sort: Text = "-step"
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    offset: Annotated[int, Field(ge=0, lt=2**31)] = 0
    q: Text = ""
    cursor: Text = ""
    distribution: Text = ""
    bins: Annotated[int, Field(ge=2, le=200)] = 40


class RolloutParameters(Parameters):
    """Parameters of one rollout, of training or of an eval."""

    tokens: bool = True


class DifferenceParameters(Parameters):
    """Parameters of `/difference`."""

    left: Text
    right: Text


class WindowParameters(Parameters):
    """Parameters of pages over a window of time."""

    first_s: Seconds | None = Field(default=None, alias="from")
    last_s: Seconds | None = Field(default=None, alias="to")


class TimelineParameters(WindowParameters):
    """Parameters of `/runs/{run}/timeline`."""

    width: Annotated[int, Field(ge=100, le=4000)] = 1200


class InfraParameters(WindowParameters):
    """Parameters of `/runs/{run}/infra`."""

    points: Points = 300
    source: Texts = []
    name: Texts = []


class EvalParameters(Parameters):
    """Parameters of `/runs/{run}/evals/{folder}`."""

    against: Text = ""


class EvalRolloutsParameters(Parameters):
    """Parameters of `/runs/{run}/evals/{folder}/rollouts`."""

    q: Text = ""
    cursor: Annotated[int, Field(ge=0, lt=2**31)] = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 50


class LogsParameters(Parameters):
    """Parameters of `/runs/{run}/logs`."""

    component: Texts = []
    source: Texts = []
    life: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=100)] = []
    level: Literal["", "debug", "info", "warning", "error"] = ""
    q: Text = ""
    limit: Annotated[int, Field(ge=1, le=5000)] = 500
    cursor: CursorText = ""
    direction: Literal["older", "newer"] = "older"


class LiveParameters(Parameters):
    """Parameters of `/live`."""

    run: Texts = []


class NoParameters(Parameters):
    """For pages without parameters."""
