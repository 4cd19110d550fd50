"""Sinks beside a run's own record: its history in the tools in which people compare runs, written while it goes on.

| sink          | extra         | writes                         | then                            |
|---------------|---------------|--------------------------------|---------------------------------|
| `TensorBoard` | `tensorboard` | events                         | `tensorboard --logdir DIR`      |
| `WandB`       | `wandb`       | an offline run                 | `wandb sync DIR/wandb/offline*` |
| `MLflow`      | `mlflow`      | a SQLite file, `mlflow.db`     | `mlflow server` with that file  |

A sink of a user's own is a class of `FILE.py:CLASS`. It is made with the folder that it may write to, inside the run's
folder, and the options of the run; then it is a `Sink`. None of the sinks uses the network.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dure.core import user_code
from dure.core.packages import import_extra
from dure.core.spec_text import nearest
from dure.errors import UsageError
from dure.report.files import AppendedFile, Sink, Unwritten

PROJECT = "dure"
"""The project, or experiment, of the runs in tools that group them."""


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that are numbers."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


class TensorBoard:
    """Writes TensorBoard events to `folder`: each number of a row under its name, by step.

    As for `JsonLines`, a kill of this process and a full disk lose no row.

    The time of an event is the `seconds` of the run (virtual or real), so that the axis "relative" of TensorBoard shows
    the time of the report. Values that are no numbers are left out.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        import_extra("tensorboard", f"TensorBoard, asked for in {folder},")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in Path(folder).iterdir())  # a run that is resumed has events already
        self._file = AppendedFile(Path(folder) / f"events.out.tfevents.{number:010d}.{os.getpid()}")
        self._begun = False

    def write(self, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in numbers(row).items()
            if name not in ("step", "seconds")
        ]
        if not self._begun:
            self._begun = True
            self._append(self._event(wall_time=row["seconds"], file_version="brain.Event:2"))
        self._append(self._event(wall_time=row["seconds"], step=row["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        record = io.BytesIO()  # `torch.utils.tensorboard` writes from a thread, where a full disk ends the thread
        self._records(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


class WandB:
    """Writes a run of Weights & Biases to `folder`, offline: `wandb sync` sends it later.

    Its own process writes the file, so a kill of the machine may lose the last rows. The axis of a chart can be
    `seconds`, those of the run.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        (self._wandb,) = import_extra("wandb", f"W&B, asked for in {folder},")
        Path(folder).mkdir(parents=True, exist_ok=True)
        quiet = self._wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        with self._errors():
            self._run = self._wandb.init(
                project=PROJECT,
                name=Path(folder).resolve().parent.name,
                dir=str(folder),
                config=dict(config),
                mode="offline",
                reinit="create_new",
                settings=quiet,
            )
            # W&B's own steps must grow, and rows of a run on processes may have one step
            self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        with self._errors():
            self._run.log(numbers(row))

    def close(self) -> None:
        with self._errors():
            self._run.finish()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._wandb.Error as error:
            raise OSError(f"W&B: {error}") from error


class MLflow:
    """Writes a run of MLflow to `mlflow.db`, a SQLite file in `folder`, from which `mlflow server` shows it.

    The time of a metric is the `seconds` of the run, virtual or real, since 1970. MLflow takes only finite numbers.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._mlflow, *_ = import_extra("mlflow", f"MLflow, asked for in {folder},")
        place = Path(folder).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._client = self._mlflow.MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
            found = self._client.get_experiment_by_name(PROJECT)
            experiment = (
                self._client.create_experiment(PROJECT, artifact_location=(place / "artifacts").as_uri())
                if found is None
                else found.experiment_id
            )
            self._id = self._client.create_run(experiment, run_name=place.parent.name).info.run_id
            options = [self._mlflow.entities.Param(name, str(value)) for name, value in config.items()]
            self._client.log_batch(self._id, params=options)

    def write(self, row: Mapping[str, Any]) -> None:
        milliseconds, step = round(1000 * row["seconds"]), int(row["step"])
        metrics = [
            self._mlflow.entities.Metric(name, value, milliseconds, step)
            for name, value in numbers(row).items()
            if name != "step" and math.isfinite(value)
        ]
        with self._errors():
            self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        with self._errors():
            self._client.set_terminated(self._id)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its own use of SQLAlchemy is deprecated
                yield
        except self._mlflow.MlflowException as error:
            raise OSError(f"MLflow: {error.message.splitlines()[0]}") from error


MadeSink = Callable[[Path, Mapping[str, Any]], Sink]

SINKS: Mapping[str, MadeSink] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The sinks by the names of their extras, which are those of their folders, too."""


def made_by(name: str) -> MadeSink:
    """The maker of the sink `name`: of `SINKS`, or FILE.py:CLASS. Raises `UsageError`, also for a missing package."""
    if name in SINKS:
        import_extra(name, f"--sink {name}")
        return SINKS[name]
    found = user_code.split(name)
    if found is None:
        known = ", ".join(SINKS)
        raise UsageError(f"there is no sink {name}: write {known}, or FILE.py:CLASS.{nearest(name, list(SINKS))}")
    return user_code.kind(*found)


class Sinks:
    """The sinks of a run whose record is `folder`. What a sink cannot write is noted in `unwritten`."""

    def __init__(self, folder: Path, names: Sequence[str], config: Mapping[str, Any], unwritten: Unwritten) -> None:
        self._unwritten = unwritten
        self._sinks: dict[str, Sink] = {}
        for text in dict.fromkeys(names):
            name = text.rpartition(":")[2].lower()
            with unwritten.tolerated(name):
                self._sinks[name] = made_by(text)(folder / name, config)

    def write(self, row: Mapping[str, Any]) -> None:
        """Give a row to all."""
        for name, sink in self._sinks.items():
            with self._unwritten.tolerated(name):
                sink.write(row)

    def close(self) -> None:
        """Close all."""
        for name, sink in self._sinks.items():
            with self._unwritten.tolerated(name):
                sink.close()
