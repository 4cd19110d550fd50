"""How well a plan predicts real runs: seconds per step, the order of strategies, and time to a target.

    sudo python bench/plan.py                        all scenes and targets, and the table (about 40 minutes)
    sudo python bench/plan.py --scenes cnn-2,gpt-2   these scenes only, without the times to a target
    python bench/plan.py --table                     the table of the kept measurements

A scene is a job, a number of workers and a network: that of one machine, or network namespaces with limited cards
(`dure_studies.namespaces`; root's alone). In each scene

    probe      `dure probe JOB` by these very workers, and the profile of the job: as `dure plan` measures them
    predict    the seconds of a step of each strategy, by `dure.planner.timing`, from the probe alone
    measure    RUNS real runs of each strategy; the median counts

A step is that of all workers together: as many samples for every strategy. Its measured seconds are those from the
beginning of a worker's steps to the beginning of its later ones, the first WARM steps left out, while all workers run.

Measurements are kept in --rows, one on each line, and a kept one is not measured again: an interrupted bench continues,
and a changed planner is compared with earlier measurements. Remove the file to measure anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _script import PATH, parse, told
from torch import nn
from torch.nn.functional import cross_entropy

from dure.core.target import Target
from dure.errors import DureError
from dure.job.data.dataset import Data
from dure.job.data.loaders import data_root
from dure.job.job import Job, load_job
from dure.job.optimizer import OptimizerSpec
from dure.partition.profile import BlockTimes, PassTime
from dure.planner.candidates import Scene
from dure.planner.job_profile import JobProfile, calibrated, profile_job
from dure.planner.learning import crossed
from dure.planner.probe.probe import described, probe
from dure.planner.timing import config_of, timed
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.train import run as train
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.launch.rendezvous import Rendezvous, place
from dure_studies import namespaces

RUNS = 3
WARM = 3
RUN_SECONDS, FEWEST, MOST = 2.5, 8, 150
"""A run has as many steps as are predicted for these seconds, within these limits."""

PERIOD = 4
DIFFERENT = 0.1
"""Strategies whose medians differ by more than this share are ordered; others count as equal."""

HOST_SECONDS = 1500.0
FIRST_PORT = 29500
REVIEWS = 300
"""Reviews of each kind that `imdb-bert` reads, in training and in test: real ones, and few, so that runs start fast."""

# ---- scenes


def wide_mlp() -> Job:
    """A perceptron of 25 million parameters on random data: much to send for little computing."""
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(512, 1024, generator=draw), torch.randint(0, 10, (512,), generator=draw))
    return Job(
        model=wide_model,
        loss=cross_entropy,
        train=data,
        test=data,
        batch_size=16,
        optimizer=OptimizerSpec(lr=0.01),
        name="wide-mlp",
    )


def wide_model() -> nn.Sequential:
    widths = (1024, 3500, 3500, 2500)
    layers = [each for a, b in itertools.pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


JOBS = {
    "cnn": "mnist-cnn",
    "mlp": f"{Path(__file__).resolve()}:wide_mlp",
    "bert": "imdb-bert",
    "gpt": "char-gpt",
    "digits": "digits-mlp",
}

RING, AVERAGING = "bsp", f"averaging:period={PERIOD}"
SERVERS, DOWNPOUR = "bsp ps:shards=2,colocated=true", "downpour ps:shards=2,colocated=true"
SIGN = "bsp ps:colocated=true sign"
CODECS = ("sign",)
"""Codecs whose costs a probe measures, as the probe of a plan does for those that the plan proposes."""
GPIPE, ONE_F_ONE_B, TENSOR = "gpipe:stages=2,micro=4", "1f1b:stages=2,micro=4", "tensor:ways=2"
WITHOUT_TENSOR = (RING, SERVERS, AVERAGING, DOWNPOUR, SIGN, ONE_F_ONE_B)
WITHOUT_GPIPE = (RING, SERVERS, AVERAGING, DOWNPOUR, ONE_F_ONE_B, TENSOR)
WITHOUT_SIGN = (RING, AVERAGING, DOWNPOUR, GPIPE, ONE_F_ONE_B, TENSOR)
WITHOUT_SERVERS = (RING, AVERAGING, DOWNPOUR, SIGN, GPIPE, TENSOR)
PIPELINE_OF_3 = (RING, SERVERS, AVERAGING, DOWNPOUR, "gpipe:stages=3,micro=4", "1f1b:stages=3,micro=4")


@dataclass(frozen=True)
class Setting:
    """A job with so many workers on one machine, or on hosts whose cards have `bandwidth` Mbit/s."""

    job: str
    workers: int
    bandwidth: float | None
    strategies: tuple[str, ...]
    held_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.job}-{self.workers}" + ("" if self.bandwidth is None else f"-{self.bandwidth:g}")


SETTINGS = (
    Setting("cnn", 2, None, WITHOUT_GPIPE),
    Setting("cnn", 4, None, WITHOUT_SIGN),
    Setting("mlp", 2, None, WITHOUT_SERVERS),
    Setting("bert", 2, None, WITHOUT_TENSOR),
    Setting("gpt", 2, None, WITHOUT_SIGN),
    Setting("cnn", 2, 50, WITHOUT_SERVERS),
    Setting("cnn", 4, 200, WITHOUT_TENSOR),
    Setting("mlp", 2, 1000, WITHOUT_GPIPE),
    Setting("bert", 2, 100, WITHOUT_GPIPE),
    Setting("gpt", 3, 100, PIPELINE_OF_3),
    Setting("gpt", 4, None, WITHOUT_SERVERS, held_out=True),
    Setting("bert", 3, None, PIPELINE_OF_3, held_out=True),
    Setting("cnn", 3, 100, PIPELINE_OF_3, held_out=True),
    Setting("gpt", 2, 500, WITHOUT_GPIPE, held_out=True),
)
"""Nothing in the planner was fitted to, or chosen by, the scenes that are held out."""

REHEARSAL = (Setting("digits", 2, None, (RING,)),)
"""The scene of `--smoke`."""


@dataclass(frozen=True)
class Goal:
    """A strategy in a setting, trained to a `loss` of the test set within `steps`."""

    setting: str
    strategy: str
    loss: float
    steps: int
    lr: float | None = None


GOALS = (
    Goal("cnn-2", RING, 0.5, 250),
    Goal("cnn-2", DOWNPOUR, 0.5, 250),
    Goal("gpt-2", AVERAGING, 2.6, 250),
    Goal("cnn-2-50", SIGN, 0.5, 150, lr=0.001),
    Goal("cnn-4-200", SERVERS, 0.5, 250),
    Goal("gpt-2-500", ONE_F_ONE_B, 2.6, 250),
)
EVALUATIONS, EVALUATED = 20, 300

Row = dict[str, Any]


# ---- data


@cache
def data_folder(rows: Path) -> Path:
    """The folder of data sets: the user's, with a small part of the film reviews."""
    folder = rows.absolute().parent / "plan-data"
    reviews, archive = folder / "imdb" / "aclImdb", data_root() / "imdb" / "aclImdb_v1.tar.gz"
    if not reviews.exists() and archive.exists():
        _few_reviews(archive, folder / "imdb")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "mnist").exists() and (data_root() / "mnist").exists():
        (folder / "mnist").symlink_to(data_root() / "mnist")
    return folder


def _few_reviews(source: Path, target: Path) -> None:
    """Unpack REVIEWS reviews of each kind from the published archive."""
    target.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    with tarfile.open(source) as archive:
        for member in archive:
            kind = member.name.rpartition("/")[0]
            if member.isfile() and kind.endswith(("/pos", "/neg")) and counts.setdefault(kind, 0) < REVIEWS:
                counts[kind] += 1
                archive.extract(member, target, filter="data")


def job_of(setting: Setting, rows: Path) -> Job:
    return load_job(JOBS[setting.job], data_folder(rows))


# ---- a run, on one machine or as a rank


def seconds_per_step(trace: Path, steps: int, period: int) -> float:
    """Seconds of a step of all workers: the harmonic mean of theirs, over whole periods, while all run."""
    events = json.loads(trace.read_text())["traceEvents"]
    begun: dict[int, list[float]] = {}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for event in events:
        if event.get("ph") == "X" and event["cat"] == "compute" and names[event["pid"]].startswith("worker"):
            begun.setdefault(event["pid"], []).append(event["ts"] / 1e6)
    starts = [sorted(each)[:: max(1, len(each) // steps)] for each in begun.values()]
    end = min(each[-1] for each in starts)
    speeds = []
    for each in starts:
        counted = [start for start in each if start <= end][WARM:]
        count = (len(counted) - 1) // period * period
        speeds.append(count / (counted[count] - counted[0]))
    return len(speeds) / math.fsum(speeds)


def measured(options: Row, prebuilt: Prebuilt, on: str) -> float:
    """Carry out a run, and return its seconds per step; at a rank other than 0 a number without meaning."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(TrainConfig.of({**options, "on": on, "trace": True, "eval_every": 10**9, "out": out}), prebuilt)
        here = place()
        if here is not None and here.rank:
            return math.nan
        period = PERIOD if "averaging" in options["strategy"] else 1
        return seconds_per_step(out / "trace.json", options["steps"], period)


def to_target(options: Row, prebuilt: Prebuilt, on: str, loss: float) -> float | None:
    """Carry out a run up to its end, and return the seconds at which the loss crosses `loss`."""
    return crossed(train(TrainConfig.of({**options, "on": on}), prebuilt).history, Target(loss, "loss"))


# ---- on a host of a namespace


def on_host(plan: Row) -> None:
    """Do the tasks of `plan` together with the other hosts, each in a process forked from this one."""
    torch.set_num_threads(1)
    for number, task in enumerate(plan["tasks"]):
        child = os.fork()
        if child == 0:
            try:
                os.environ["MASTER_PORT"] = str(FIRST_PORT + number)
                _task(plan, task)
                os._exit(0)
            except BaseException:  # noqa: BLE001  (a forked process must not go on above)
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(f"{task} failed")


def _task(plan: Row, task: Row) -> None:
    here = place()
    assert here is not None
    limit = Rendezvous(here, "limit")
    if limit.exchange("late", time.time() > plan["until"])[0]:
        limit.part()  # rank 0 has the store, which the others still read
        return
    if task["kind"] == "probe":
        job = load_job(task["job"], task["data"])
        found = probe(job, codecs=CODECS)
        if found is not None:
            del found["cluster"]
            write(Path(plan["rows"]), {"setting": plan["setting"], "probe": found})
        return
    value = (
        measured(task["options"], Prebuilt(told=True), "torchrun")
        if task["kind"] == "step"
        else to_target(task["options"], Prebuilt(told=True), "torchrun", task["loss"])
    )
    if here.rank == 0:
        write(Path(plan["rows"]), task["row"] | {"seconds": value})


def write(rows: Path, row: Row) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


# ---- measuring a scene


@dataclass
class Bench:
    """The kept measurements, and the time at which no other one begins."""

    rows: Path
    until: float
    runs: int = RUNS

    @property
    def late(self) -> bool:
        return time.time() > self.until

    def kept(self, **keys: Any) -> list[Row]:
        """The rows that have these keys with these values; a value of None stands for any."""
        lines = self.rows.read_text().splitlines() if self.rows.exists() else []
        found = map(json.loads, lines)
        return [row for row in found if all(k in row and v in (None, row[k]) for k, v in keys.items())]

    def scene(self, setting: Setting) -> Scene | None:
        """The scene that the kept probe of `setting` describes, as `dure plan` makes it."""
        probed, profiled = (self.kept(setting=setting.name, **{kind: None}) for kind in ("probe", "profile"))
        if not probed or not profiled:
            return None
        job, profile = job_of(setting, self.rows), profile_of(profiled[0]["profile"])
        cluster = calibrated(described(probed[0]["probe"], setting.workers), job, profile)
        return Scene(job, cluster, job.batch_size * setting.workers, profile.times)

    def measure(self, setting: Setting, goals: Sequence[Goal]) -> None:
        """Measure the part of `setting` that is not kept."""
        say(f"{setting.name}: probe and profile")
        self._probe(setting)
        scene = self.scene(setting)
        if scene is None:
            return
        tasks = [*self._steps(setting, scene), *self._goals(setting, scene, goals)]
        say(f"{setting.name}: {len(tasks)} runs")
        if setting.bandwidth is not None:
            self._on_hosts(setting, tasks)
        else:
            self._here(setting, tasks)
        for strategy in setting.strategies:
            times = [row["seconds"] for row in self.kept(setting=setting.name, strategy=strategy)]
            if times:
                say(f"{setting.name}: {strategy}: measured {statistics.median(times):.4f} s of {sorted(times)}")

    def _probe(self, setting: Setting) -> None:
        folder = data_folder(self.rows)
        if not self.kept(setting=setting.name, profile=None):
            profile = profile_job(job_of(setting, self.rows))
            write(self.rows, {"setting": setting.name, "profile": asdict(profile)})
        if self.kept(setting=setting.name, probe=None) or self.late:
            return
        if setting.bandwidth is not None:
            self._on_hosts(setting, [{"kind": "probe", "job": JOBS[setting.job], "data": str(folder)}])
            return
        name = JOBS[setting.job]
        found = probe(job_of(setting, self.rows), workers=setting.workers, codecs=CODECS, name=name, data=folder)
        assert found is not None
        del found["cluster"]
        write(self.rows, {"setting": setting.name, "probe": found})

    def _steps(self, setting: Setting, scene: Scene) -> Iterator[Row]:
        """The runs of each strategy that are missing."""
        for strategy in setting.strategies:
            row = {"setting": setting.name, "strategy": strategy}
            missing = self.runs - len(self.kept(**row))
            if missing <= 0:
                continue
            predicted = timed(scene, strategy).seconds
            steps = max(FEWEST, min(MOST, round(RUN_SECONDS / predicted)))
            say(f"{setting.name}: {strategy}: predicted {predicted:.4f} s")
            options = self._options(setting, scene, strategy) | {"steps": -(-steps // PERIOD) * PERIOD + WARM + 1}
            yield from [{"kind": "step", "options": options, "row": row}] * missing

    def _goals(self, setting: Setting, scene: Scene, goals: Sequence[Goal]) -> Iterator[Row]:
        """The runs to a target that are missing."""
        for goal in goals:
            row = {"goal": [setting.name, goal.strategy]}
            options = self._options(setting, scene, goal.strategy) | in_goal(goal)
            missing = self.runs - len(self.kept(**row))
            yield from [{"kind": "goal", "options": options, "row": row, "loss": goal.loss}] * max(0, missing)

    def _options(self, setting: Setting, scene: Scene, strategy: str) -> Row:
        given = config_of(scene, strategy).plain()
        return given | {"job": JOBS[setting.job], "data": str(data_folder(self.rows)), "on": "local"}

    def _here(self, setting: Setting, tasks: Iterable[Row]) -> None:
        with ForkServer() as fork_server:
            prebuilt = Prebuilt(fork_server=fork_server, told=True)
            for task in tasks:
                if self.late:
                    return
                value = (
                    measured(task["options"], prebuilt, "local")
                    if task["kind"] == "step"
                    else to_target(task["options"], prebuilt, "local", task["loss"])
                )
                write(self.rows, task["row"] | {"seconds": value})

    def _on_hosts(self, setting: Setting, tasks: Sequence[Row]) -> None:
        if not tasks:
            return
        assert setting.bandwidth is not None
        plan = {"rows": str(self.rows.absolute()), "setting": setting.name, "tasks": tasks, "until": self.until}
        environ = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
        with (
            tempfile.NamedTemporaryFile("w", suffix=".json") as file,
            namespaces.hosts(setting.workers, bandwidth=setting.bandwidth * 125e3) as hosts,
        ):
            json.dump(plan, file)
            file.flush()
            hosts.run([sys.executable, __file__, "--host", file.name], seconds=HOST_SECONDS, environ=environ)


def in_goal(goal: Goal) -> Row:
    return {
        "steps": goal.steps,
        "lr": goal.lr,
        "eval_every": max(1, goal.steps // EVALUATIONS),
        "eval_samples": EVALUATED,
    }


def profile_of(plain: Row) -> JobProfile:
    """The profile of a row."""
    times = plain["times"]
    if times is not None:
        times = BlockTimes(*([PassTime(*each) for each in way] for way in times))
    return JobProfile(**{**plain, "times": times})


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- the table


@dataclass(frozen=True)
class Prediction:
    """A strategy in a setting: predicted and measured seconds of a step."""

    strategy: str
    predicted: float
    times: tuple[float, ...]

    @property
    def measured(self) -> float:
        return statistics.median(self.times)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predictions(bench: Bench, setting: Setting) -> list[Prediction]:
    """Predictions for the strategies of `setting` that have been measured."""
    scene = bench.scene(setting)
    found = []
    for strategy in setting.strategies if scene is not None else ():
        times = tuple(row["seconds"] for row in bench.kept(setting=setting.name, strategy=strategy))
        if times and scene is not None:
            found.append(Prediction(strategy, timed(scene, strategy).seconds, times))
    return found


def kendall(found: Sequence[Prediction]) -> float | None:
    """Kendall's tau over the pairs whose measured seconds differ by more than DIFFERENT; None without such a pair."""
    signs = [
        math.copysign(1.0, (one.predicted - other.predicted) * (one.measured - other.measured))
        for one, other in itertools.combinations(found, 2)
        if max(one.measured, other.measured) > (1 + DIFFERENT) * min(one.measured, other.measured)
    ]
    return statistics.mean(signs) if signs else None


def in_top_two(found: Sequence[Prediction]) -> bool:
    """Whether the strategy measured as the best is among the two predicted as the best."""
    best = min(found, key=lambda each: each.measured)
    return best in sorted(found, key=lambda each: each.predicted)[:2]


def judged(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return (
        f"{len(sizes)} predictions: median error {statistics.median(sizes):.1%}, 90th percentile {ninth:.1%}, "
        f"worst {sizes[-1]:.1%}"
    )


def table(bench: Bench, settings: Sequence[Setting]) -> Iterator[str]:
    """The lines of the table of `settings`, and of what they show."""
    yield "| scene | strategy | measured, ms | least to most | predicted, ms | error |"
    yield "|---|---|---|---|---|---|"
    results: dict[str, list[Prediction]] = {}
    for setting in settings:
        found = results[setting.name] = predictions(bench, setting)
        for each in found:
            spread = f"{1e3 * min(each.times):.1f} to {1e3 * max(each.times):.1f}"
            what = f"| {setting.name} | `{each.strategy}` | {1e3 * each.measured:.1f} | {spread}"
            yield f"{what} | {1e3 * each.predicted:.1f} | {each.error:+.1%} |"
    results = {name: found for name, found in results.items() if found}
    if not results:
        return
    yield ""
    yield f"{judged([each.error for found in results.values() for each in found])}."
    yield ""
    yield "| scene | Kendall's tau | measured best | predicted best two |"
    yield "|---|---|---|---|"
    for name, found in results.items():
        tau, ordered = kendall(found), sorted(found, key=lambda each: each.predicted)
        best = min(found, key=lambda each: each.measured)
        first = ", ".join(f"`{each.strategy}`" for each in ordered[:2])
        yield f"| {name} | {'none differ' if tau is None else f'{tau:.2f}'} | `{best.strategy}` | {first} |"
    tops = [in_top_two(found) for found in results.values()]
    taus = [tau for found in results.values() if (tau := kendall(found)) is not None]
    yield ""
    yield f"The measured best is among the predicted best two in {sum(tops)} of {len(tops)} scenes."
    if taus:
        yield f"Least tau {min(taus):.2f}, median {statistics.median(taus):.2f}."


def by_strategy(bench: Bench, settings: Sequence[Setting]) -> Iterator[str]:
    """The errors of each strategy, over all settings: their median shows a systematic error."""
    errors: dict[str, list[float]] = {}
    for setting in settings:
        for each in predictions(bench, setting):
            errors.setdefault(each.strategy, []).append(each.error)
    if errors:
        yield "| strategy | predictions | median error | least to most |"
        yield "|---|---|---|---|"
    for strategy, found in errors.items():
        spread = f"{min(found):+.1%} to {max(found):+.1%}"
        yield f"| `{strategy}` | {len(found)} | {statistics.median(found):+.1%} | {spread} |"


def targets(bench: Bench) -> Iterator[str]:
    """Virtual seconds to each goal's loss, with real gradients, against those of the real runs."""
    errors: list[float] = []
    for goal in GOALS:
        setting = next(each for each in SETTINGS if each.name == goal.setting)
        rows, scene = bench.kept(goal=[goal.setting, goal.strategy]), bench.scene(setting)
        if not rows or scene is None:
            continue
        if not errors:
            yield "| scene | strategy | loss | measured, s | predicted, s | error |"
            yield "|---|---|---|---|---|---|"
        options = config_of(scene, goal.strategy).plain() | in_goal(goal)
        made = train(TrainConfig.of(options), Prebuilt(scene.job, scene.cluster, told=True))
        predicted = crossed(made.history, Target(goal.loss, "loss"))
        times = [row["seconds"] for row in rows if row["seconds"] is not None]
        if predicted is None or not times:
            yield f"| {goal.setting} | `{goal.strategy}` | {goal.loss:g} | {times} | {predicted} | not reached |"
            continue
        real = statistics.median(times)
        errors.append(predicted / real - 1)
        what = f"| {goal.setting} | `{goal.strategy}` | {goal.loss:g}"
        yield f"{what} | {real:.2f} | {predicted:.2f} | {errors[-1]:+.1%} |"
    if errors:
        yield ""
        yield f"{judged(errors)}."


def report(bench: Bench, settings: Sequence[Setting]) -> str:
    parts = {
        "Seconds per step": table(bench, [each for each in settings if not each.held_out]),
        "Scenes held out": table(bench, [each for each in settings if each.held_out]),
        "Errors by strategy": by_strategy(bench, settings),
        "Time to a target": targets(bench),
    }
    lines = [HEAD]
    for title, part in parts.items():
        lines += ["", f"## {title}", "", *part]
    return "\n".join(lines) + "\n"


HEAD = f"""# A plan's predictions against real runs

Results of `sudo python bench/plan.py`. Machine: {os.cpu_count()} cores of {os.uname().machine}, Linux {os.uname().release}.
Medians of {RUNS} runs. A scene is named by its job, its workers, and the Mbit/s of its hosts' cards; without that number
all workers are processes of this machine. Hosts are network namespaces, and share the machine's cores."""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenes", type=lambda text: text.split(","), help="names, such as cnn-2,gpt-3-100")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="begin no run after these seconds")
    parser.add_argument("--rows", type=Path, default=Path("runs/plan.jsonl"), help="file of the kept measurements")
    parser.add_argument("--out", type=Path, help="file of the table; standard output if left out")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--host", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=RUNS, help="real runs of each strategy")
    parser.add_argument("--json", type=Path)
    given = parse(parser, runs=1, rows=Path("runs/plan-smoke/rows.jsonl"))
    if given.host is not None:
        on_host(json.loads(given.host.read_text()))
        return
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    if given.smoke:
        given.rows.unlink(missing_ok=True)
    bench = Bench(given.rows, min(time.time() + given.limit_seconds, 1e12), given.runs)
    reason = namespaces.missing()
    settings = REHEARSAL if given.smoke else SETTINGS
    for setting in () if given.table else settings:
        if bench.late or setting.name not in (given.scenes or [setting.name]):
            continue
        if setting.bandwidth is not None and reason:
            say(f"{setting.name} is skipped: {reason}")
            continue
        try:
            bench.measure(setting, [] if given.scenes else [each for each in GOALS if each.setting == setting.name])
        except DureError as error:
            say(f"{setting.name}: {error}")
    with told("plan", given) as facts:
        text = report(bench, settings)
        if given.out is None:
            print(text)
        else:
            given.out.write_text(text, encoding="utf-8")
        facts["rows"] = [
            {"scene": setting.name, "strategy": each.strategy, "seconds": each.measured, "predicted": each.predicted}
            for setting in settings
            for each in predictions(bench, setting)
        ]


if __name__ == "__main__":
    main()
