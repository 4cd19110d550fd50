"""Options of `dure plan`, as one checked value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dure.core.packages import import_extra
from dure.core.regular_file import check_output
from dure.core.target import Target
from dure.run.config import Count, Seconds, Workers, adapters, checked, goal


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan. Values are checked: a wrong one raises `UsageError`."""

    job: str = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    workers: Workers | None = None
    """Workers; those of the cluster file, else 4."""
    on: str = ""
    """A cluster file, or virtual (a uniform cluster). If left out, this machine, which is measured first."""
    batch_size: Count | None = None
    """Samples per worker in a step; the job's if left out. The samples of all workers are equal for all strategies."""
    data: Path | None = None
    """Folder of data sets; else DURE_DATA, else the user's cache."""
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """Test accuracy: the best strategies are run with real gradients in virtual time until they reach it."""
    target_loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Loss to reach, in place of an accuracy."""
    learn: Count = 3
    """Strategies that are run up to the target."""
    steps: Count | None = None
    """Mini-batches per worker of these runs; the job's if left out."""
    within: Seconds = 60.0
    """Real seconds of the plan, about: candidates for which they do not suffice are not timed."""
    report: Path | None = None
    """File of a page to explore the plan; none if left out."""

    def __post_init__(self) -> None:
        for name, adapter in adapters(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            object.__setattr__(self, name, checked(name, getattr(self, name), adapter))
        if self.target is not None or self.target_loss is not None:
            goal(self.target, self.target_loss)
        if self.report is not None:
            check_output(self.report)
            import_extra("report", "--report")

    @property
    def goal(self) -> Target | None:
        """The target, if there is one."""
        if self.target is None and self.target_loss is None:
            return None
        return goal(self.target, self.target_loss)

    def plain(self) -> dict[str, Any]:
        """The options as values of JSON and YAML."""
        found = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}
