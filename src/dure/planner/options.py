"""Options of `dure plan`, as one checked value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dure.core.packages import import_extra
from dure.core.regular_file import check_output
from dure.core.target import Target
from dure.run.config import Accuracy, Checked, Count, Finite, Positional, Seconds, Workers, goal


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Checked):
    """Options of a plan. Values are checked: a wrong one raises `UsageError`."""

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    workers: Workers | None = None
    """Workers; those of the cluster file, else 4."""
    on: str = ""
    """A cluster file, GPUs such as "2x8 a100-sxm4-80gb @ 100 Gbit/s", or virtual (a uniform cluster). If left out,
    this machine, which is measured first."""
    batch_size: Count | None = None
    """Samples per worker in a step; the job's if left out. The samples of all workers are equal for all strategies."""
    data: Path | None = None
    """Folder of data sets; else DURE_DATA, else the user's cache."""
    target: Accuracy | None = None
    """Test accuracy: the best strategies are run with real gradients in virtual time until they reach it."""
    target_loss: Finite | None = None
    """Loss to reach, in place of an accuracy."""
    learn: Count = 3
    """Strategies that are run up to the target."""
    steps: Count | None = None
    """Mini-batches per worker of a run, also of those to a target; the job's if left out."""
    vary: Count = 3
    """First strategies that are timed over the facts that the cluster file leaves open, beside DDP and one machine."""
    within: Seconds = 60.0
    """Real seconds of the plan, about: candidates for which they do not suffice are not timed."""
    report: Path | None = None
    """File of a page to explore the plan; none if left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.goal
        if self.report is not None:
            check_output(self.report)
            import_extra("report", "--report")

    @property
    def goal(self) -> Target | None:
        """The target, if there is one. Raises `UsageError` if there are two."""
        if self.target is None and self.target_loss is None:
            return None
        return goal(self.target, self.target_loss)
