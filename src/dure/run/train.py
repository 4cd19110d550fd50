"""One run, from its configuration to its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.packages import import_extra
from dure.core.regular_file import CHECKPOINTS
from dure.core.text import log
from dure.core.user_code import explain_user_errors
from dure.errors import CheckpointError, DivergedError, UsageError
from dure.job.job import Job
from dure.job.validation import try_to_count, validate_job
from dure.report.files import replacing
from dure.report.labels import as_written
from dure.report.progress import Progress
from dure.report.record import TRACE, RunFolder, versions
from dure.report.run import Run
from dure.report.sinks import Sinks, made_by
from dure.report.trace import write_trace
from dure.run import checkpoint
from dure.run.break_even import break_even_summary
from dure.run.config import TrainConfig
from dure.run.devices import notice
from dure.run.leases import reached
from dure.run.outcome import Outcome, check_applied, machines_of, summary
from dure.run.places import is_here, is_real, is_started_outside, launcher_of, takes_address
from dure.run.prebuilt import Callbacks, Prebuilt, named, placed
from dure.run.resolve import ENDLESS, resolve
from dure.run.resume import CLUSTER, cluster_of, fingerprints, resumed
from dure.run.setup import Setup
from dure.run.split_again import is_split_otherwise, split_again
from dure.run.strategy import AXES, Strategy, check_named, checked, member_text
from dure.run.virtual import VirtualRun
from dure.runtime.memory import check_memory, usable_memory
from dure.runtime.virtual.cluster import Cluster

if TYPE_CHECKING:
    from dure.run.checkpoint import Parts


def train(job: str | Job, *, sync: Any = None, on: str | Cluster = "", **options: Any) -> Run:
    """Train `job` under a strategy; return its record. Arguments and errors are those of `dure.train`."""
    name, given = named(job)
    place, cluster = placed(on)
    options |= {"sync": sync, "on": place}
    objects = {axis: options[axis] for axis in AXES if not isinstance(options.get(axis), str | None)}
    options |= {axis: member_text(axis, checked(axis, choice)) for axis, choice in objects.items()}
    config = TrainConfig.of({**options, "job": name})
    if is_real(config.on):
        check_named(objects)
    prebuilt = Prebuilt(given, cluster)
    if not objects:
        return run(config, prebuilt)
    if config.resume is None:
        return run(config, replace(prebuilt, strategy=config.chosen(objects)))
    config = resumed(config, prebuilt.cluster)
    return _carry_out(config, replace(prebuilt, strategy=config.chosen(objects)))


def run(config: TrainConfig, prebuilt: Prebuilt = Prebuilt()) -> Run:
    """Carry out the run that `config` asks for. Under torchrun every rank calls this, and all get the same record."""
    launcher = launcher_of(config.on)
    if config.resume is None and launcher is not None:
        config = launcher.load().after_restart(config)
    if config.resume is not None:
        config = resumed(config, prebuilt.cluster)
    return _carry_out(config, prebuilt)


def _carry_out(config: TrainConfig, prebuilt: Prebuilt) -> Run:
    if config.tensorboard:
        import_extra("tensorboard", "--tensorboard")
    for name in config.sinks:
        made_by(name)
    launcher = launcher_of(config.on)
    if launcher is None:
        return _run_here(config, prebuilt, None)
    if prebuilt.job is not None:
        raise UsageError(
            "a Job object cannot be handed to other processes. Put its function into a file and name it "
            '("train.py:make_job"), or run in virtual time (on="virtual").'
        )
    done: Run = launcher.load().run_real(config, prebuilt, lambda config, launch: _run_here(config, prebuilt, launch))
    return done


def _run_here(config: TrainConfig, prebuilt: Prebuilt, launch: Callable[..., Outcome] | None) -> Run:
    """Resolve the run and lead it from this process. `launch` starts a real run; None stands for a virtual one."""
    if config.resume is not None and prebuilt.cluster is None:
        cluster = cluster_of(config.resume)
        if cluster is not None and cluster.workers == (config.workers or cluster.workers):
            prebuilt = replace(prebuilt, cluster=cluster)  # another split has another number of workers
    name = config.job or "the job"
    with explain_user_errors(f"{name} raised", only=True):
        setup, cluster = resolve(config, prebuilt)
    if config.timing_only:
        try_to_count(setup.job, name)
    else:
        sizes = setup.batch_sizes
        validate_job(setup.job, name, rows=max(sizes), fewest=min(sizes), seed=config.seeded)
    if setup.stages is not None:
        setup.stages.measure()
    if is_here(config.on):
        memory = usable_memory()
        check_memory(len(setup.deployment.nodes), setup.replica.params.nbytes // setup.parts, memory)
    if not (prebuilt.told or is_started_outside(config.on) or takes_address(config.on)):
        _announce(setup)
    with _recording(setup, prebuilt) as (folder, callbacks, progress):
        if folder is not None and cluster is not None:
            with folder.unwritten.tolerated(CLUSTER), replacing(folder.path / CLUSTER) as file:
                file.write(cluster.to_yaml())
        saved = folder.checkpoints if config.resume is not None and folder is not None else None
        if config.virtual:
            assert cluster is not None
            outcome = VirtualRun(setup, cluster, callbacks).run(
                checkpoint.load(saved).parts if saved is not None else None
            )
        else:
            place = folder.checkpoints if folder is not None else None
            assert launch is not None
            outcome = launch(setup, callbacks, saved, place)
        outcome.notes["evaluation_seconds"] = progress.evaluation_seconds
        return _finish(setup, outcome, folder, cluster)


def _announce(setup: Setup) -> None:
    """Say which devices a run uses."""
    said = "" if setup.config.timing_only else notice(setup.config.device, setup.devices)
    if said:
        log.warning("%s", said)


@contextmanager
def _recording(setup: Setup, prebuilt: Prebuilt) -> Iterator[tuple[RunFolder | None, Callbacks, Progress]]:
    config = setup.config
    with ExitStack() as stack:
        folder = _folder(setup)
        if folder is not None:
            stack.enter_context(folder)
            plain, steps = config.plain(), setup.steps if setup.steps < ENDLESS else None
            folder.write_config(plain, config.written(), config.seeded, fingerprints(plain), steps)
            sinks = Sinks(folder.path, _sinks(config), plain, folder.unwritten)
            stack.callback(sinks.close)
        place = " (virtual)" if config.virtual else ""
        name = _short(setup)
        progress = stack.enter_context(Progress(name, place, others=prebuilt.others, clock=time.monotonic))
        rows: list[dict[str, Any]] = []
        stack.enter_context(_with_history(rows))

        def row(values: dict[str, Any]) -> None:
            rows.append(values)
            progress.returned(values.get("mean_return"))
            if folder is not None:
                folder.append(values)
                sinks.write(values)

        def save(step: int, parts: Parts) -> None:
            assert folder is not None
            _save(folder.checkpoints, step, parts)

        def advance(step: int, steps: int, loss: float, samples: int) -> None:
            progress.update(step, steps if steps < ENDLESS else None, loss, samples)
            if config.virtual:
                prebuilt.interruption.check()

        def rewind(left: int) -> None:
            del rows[left:]
            if folder is not None:
                folder.rewind(left)

        yield folder, Callbacks(row, advance, progress.evaluating, save, rewind, progress.notice), progress


@contextmanager
def _with_history(rows: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Give `rows` to the error of a run that diverges."""
    try:
        yield
    except DivergedError as error:
        error.history = rows
        raise


def _sinks(config: TrainConfig) -> tuple[str, ...]:
    """The names of the sinks of a run."""
    return (*["tensorboard"] * config.tensorboard, *config.sinks)


def _short(setup: Setup) -> str:
    """The name of a run in its progress line: the members that its options name.

    A job with companions is named itself: its strategy says little of the run.
    """
    if setup.job.companions is not None:
        return setup.job.name
    return short_name(setup.strategy, setup.config)


def short_name(strategy: Strategy, config: TrainConfig) -> str:
    """The members of `strategy` that the options of a run name, as they are written."""
    texts = as_written(strategy.text(), config.plain())
    return " ".join(text for text in texts.values() if text not in ("", "fp32", "none"))


def _folder(setup: Setup) -> RunFolder | None:
    config = setup.config
    if config.resume is not None:
        newest = checkpoint.load(config.resume / CHECKPOINTS)
        damaged = [each for each in newest.passed_over if not each.endswith(": not finished")]
        if damaged:
            log.warning("the run goes on from step %d; damaged checkpoints: %s.", newest.step, "; ".join(damaged))
        if is_split_otherwise(newest, setup.origin):
            split_again(newest, setup, config.resume / CHECKPOINTS)
            newest = checkpoint.load(config.resume / CHECKPOINTS)
        checkpoint.check_origin(newest, setup.origin)
        step = _reached(newest, config)
        if setup.steps < step:
            raise UsageError(
                f"the run would end at steps={setup.steps}, and the last checkpoint of {config.resume} is of step "
                f"{step}. Give at least {step} steps, and more epochs if they end the run earlier, or "
                "start another run with another --out."
            )
        return RunFolder.resume(config.resume, rows=checkpoint.rows(newest))
    return None if config.out is None else RunFolder.create(config.out)


def _reached(newest: checkpoint.Checkpoint, config: TrainConfig) -> int:
    """The step that the run of a checkpoint has reached."""
    if config.elastic is None:
        return newest.step
    with checkpoint.fitting("run"):
        return -(-reached(newest.parts["run"].plain["leases"]) // config.elastic.least)


def _save(place: Path, step: int, parts: Parts) -> None:
    """Write a checkpoint. If the disk is full, this checkpoint is left out and the run continues."""
    try:
        draft = checkpoint.begin(place, step)
        for name, part in parts.items():
            checkpoint.write_part(draft, name, part)
        checkpoint.commit(place, step)
    except CheckpointError as error:
        checkpoint.discard(place, step)
        log.warning("checkpoint %d was not written: %s", step, error)
    else:
        checkpoint.prune(place)


def _finish(setup: Setup, outcome: Outcome, folder: RunFolder | None, cluster: Cluster | None) -> Run:
    config = setup.config
    kind = "virtual" if config.virtual else "real"
    figures = machines_of(setup, cluster) | summary(setup, outcome, kind)
    if setup.codec is not None:
        figures["payoff"] = break_even_summary(setup, outcome.totals, cluster)
    figures["unwritten"] = {} if folder is None else folder.unwritten.causes
    if folder is not None:
        folder.look_for_removed()
        if config.trace:
            with folder.unwritten.tolerated(TRACE):
                write_trace(folder.trace, outcome.spans, time=kind)  # type: ignore[arg-type]
        folder.write_summary(figures)
    check_applied(outcome.totals)
    path = folder.path if folder is not None else None
    return Run(config.plain(), outcome.history, figures, path, versions(), config.seeded, written=config.written())
