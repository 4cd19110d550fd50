"""Files of published rows.

    source: PyTorch, benchmarks/distributed/ddp/README.md
    stated: 2 DGX-1 with 8 V100 each, ...                   # what the source says
    assumed: 88 % of a card for data                        # what the cluster adds to that
    cluster: {machines: [{count: 2, gpus: 8}], ...}         # as in a cluster file
    open:                                                   # facts that the source leaves open, and other values
      share: {at: machines.card.share, values: [0.82, 0.92]}
    rows:
    - id: D1
      what: ResNet-50
      class: A                                              # A: nearly all is stated, B: a fact is missing, C: an order
      cluster: {...}                                        # another one than that of the file
      set: {machines.count: 2}                              # values of this row in the cluster
      counted: samples                                      # or operations: of a sample, by its job
      figures:
      - name: 16 GPUs
        job: resnet50:batch=32
        one: 329.9                                          # samples in a second of one worker alone; without it, the
                                                            # cluster names a gpu, and `than` is there
        strategy: bsp                                       # bsp if left out
        set: {}                                             # values of this figure in the cluster
        than: {job: ..., set: ...}                          # another setting, to which the rate is relative
        measured: 0.933                                     # rate of a worker, relative to one alone, or to `than`
        order: slower                                       # in place of that, if only the order of both is known
        class: C                                            # another one than that of the row
        equal: 1                                            # class C: the ratio at which both are equally fast

A place such as `machines.card.share` names the keys from the top of the cluster file; of a list it means the first
element. `job.precision` is a parameter of the job, `strategy.micro` one of the members of the strategy that have it.
`than` may have a `cluster`, and the `one` of its job. With `counted: operations`, a row compares operations in a
second. A row's `open`, `than` and `class` are for figures without their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dure.core.validated import FieldError, Validated, read_described, read_yaml_file

HERE = Path(__file__).parent

SOURCES = (
    *("horovod", "tensorflow", "ddp", "dlperf", "nvidia", "megatron", "users"),
    *("torchgpipe", "torchtitan", "ultrascale", "issues"),
)
"""The files of this package."""


class OpenFact(Validated):
    """A fact that a source leaves open: its place in the cluster or the job, and values beside the assumed one."""

    at: str
    values: tuple[Any, ...] = Field(min_length=1)


class ComparedSetting(Validated):
    """A job with the rate of one worker alone, a strategy, a cluster, and values of it, in place of a figure's.

    Where operations are counted, a figure without a rate takes that of its job in proportion, by the device.
    """

    cluster: dict[str, Any] | None = None
    job: str | None = None
    one: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    strategy: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)


class Figure(Validated):
    """A measured ratio, or its order beside `equal`, and the setting in which it was measured."""

    name: str
    job: str
    one: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    measured: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    order: Literal["faster", "slower"] | None = None
    equal: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    kind: Literal["A", "B", "C"] | None = Field(default=None, alias="class")
    strategy: str = "bsp"
    set: dict[str, Any] = Field(default_factory=dict)
    than: ComparedSetting | None = None
    open: dict[str, OpenFact] | None = None

    def compared(self, row: PublishedRow) -> ComparedSetting | None:
        """The setting to which the rate is relative; None for one worker alone."""
        return row.than if self.than is None else self.than

    def kind_in(self, row: PublishedRow) -> str:
        """Its class: that of the row, if it has none of its own."""
        return self.kind or row.kind

    @property
    def is_faster(self) -> bool:
        """Whether the setting was faster than the one to which it is relative."""
        return self.order == "faster" if self.measured is None else self.measured > self.equal

    @model_validator(mode="after")
    def _has_one_result(self) -> Self:
        if (self.measured is None) == (self.order is None):
            problem = "a figure is a ratio or an order: write one of `measured` and `order`"
            raise FieldError(("measured",), problem)
        return self


class PublishedRow(Validated):
    """A row of a source: figures that share a setting."""

    id: str
    what: str
    kind: Literal["A", "B", "C"] = Field(alias="class")
    figures: tuple[Figure, ...] = Field(min_length=1)
    cluster: dict[str, Any] | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    counted: Literal["samples", "operations"] = "samples"
    than: ComparedSetting | None = None
    open: dict[str, OpenFact] | None = None


class Source(Validated):
    """The rows of a source, and the cluster on which they were measured."""

    source: str
    cluster: dict[str, Any]
    rows: tuple[PublishedRow, ...] = Field(min_length=1)
    stated: str = ""
    assumed: str = ""
    open: dict[str, OpenFact] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _rows_have_names(self) -> Self:
        ids = [row.id for row in self.rows]
        for place, row in enumerate(self.rows):
            if row.id in ids[:place]:
                raise FieldError(("rows", place, "id"), f"{row.id} is there twice: write another id")
            lost = next((n for n, each in enumerate(row.figures) if not (each.one or each.compared(row))), None)
            if lost is not None:
                problem = "it is relative to nothing: write `one`, the rate of one worker, or `than`, another setting"
                raise FieldError(("rows", place, "figures", lost), problem)
            ordered = next((n for n, each in enumerate(row.figures) if each.order and each.kind_in(row) != "C"), None)
            if ordered is not None:
                problem = "only a figure of class C has an order: write `measured`, or class: C"
                raise FieldError(("rows", place, "figures", ordered, "order"), problem)
            names = [figure.name for figure in row.figures]
            if len(set(names)) < len(names):
                problem = f"two figures of {row.id} have one name: write different ones"
                raise FieldError(("rows", place, "figures"), problem)
        return self


def read(path: Path) -> Source:
    """The rows in a file. Raises `UsageError` with the file and the key."""
    return read_described(path, "a file of rows", Source.model_fields, lambda given: Source(**given))


def missing() -> dict[str, str]:
    """The rows of published measurements without a prediction, and the piece that each lacks."""
    found: dict[str, str] = read_yaml_file(HERE / "missing.yaml")
    return {row: piece for rows, piece in found.items() for row in rows.split(", ")}


def published() -> list[Source]:
    """The sources of this package."""
    return [read(HERE / f"{name}.yaml") for name in SOURCES]
