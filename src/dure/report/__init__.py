"""Writes, reads and shows the records of runs.

| module        | holds |
|---------------|-------|
| `canvas`      | settings, ticks and SVG of a figure |
| `comparison`  | runs side by side, as values, as text and in the terminal |
| `figures`     | the figures of the report, as SVG |
| `files`       | JSON that any reader can parse; files that are complete or absent; destinations of a history |
| `gantt`       | activities over time, as SVG and as text |
| `html`        | the report: one HTML file that opens offline |
| `labels`      | names of runs in a comparison, and figures as text |
| `metrics`     | staleness, version skew, time shares, time to a target |
| `plan_page`   | the page of a plan: one HTML file that opens offline |
| `plan_sweeps` | a plan's strategies along an axis: values, winners and ranking |
| `progress`    | a progress bar on standard error |
| `record`      | a run's folder, written, read and checked |
| `run`         | a run's record that writes its own report |
| `trace`       | the activities of all nodes over time, for Perfetto; pipelines in it |

Nothing here reads a clock, and nothing imports a runtime or a method.
"""

from dure.core.meter import Span
from dure.core.target import Target
from dure.report.comparison import FittedComparison
from dure.report.files import JsonLines, Sink
from dure.report.html import write_report
from dure.report.metrics import TimeShare, VersionCounts, time_to
from dure.report.progress import Progress
from dure.report.record import RunFolder
from dure.report.run import Run, read_run
from dure.report.sinks import MLflow, TensorBoard, WandB
from dure.report.trace import write_trace

__all__ = [
    "FittedComparison",
    "JsonLines",
    "MLflow",
    "Progress",
    "Run",
    "RunFolder",
    "Sink",
    "Span",
    "Target",
    "TensorBoard",
    "TimeShare",
    "VersionCounts",
    "WandB",
    "read_run",
    "time_to",
    "write_report",
    "write_trace",
]
