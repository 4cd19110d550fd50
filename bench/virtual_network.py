"""How well virtual time predicts a real slow network: seconds per step, predicted against measured.

    sudo python bench/virtual_network.py                    all groups, and the table
    sudo python bench/virtual_network.py --group 0          one group; its rows are added to --rows
    sudo python bench/virtual_network.py --held-out         the settings that nothing was fitted to or chosen by
    python bench/virtual_network.py --table                 the table of the rows there are

Hosts are network namespaces of this machine with limited cards (`dure.reproduce.namespaces`). For each group of
settings `dure probe` measures the hosts, and what it writes is the cluster that the predictions are made for; the
time of a step's compute, asleep but for the filling of its gradient, is measured alone. Then each setting is trained
for real and in virtual time. Both are looked at in the same way: the mean time between the beginnings of a worker's
steps, in the traces of the runs, the first WARM steps left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dure.reproduce import namespaces
from dure.runtime.cluster import Cluster
from dure.runtime.compute import Constant
from dure.runtime.sounding import step_seconds
from dure.runtime.stand_in import job_file, stand_in
from dure.train import train

ROOT = Path(__file__).parents[1]
WARM = 2
STEPS = 12
MIB = 1 << 18
"""Parameters of four bytes in 2^20 bytes."""

RUN_SECONDS = 200.0
PROBE_SECONDS = 900.0


@dataclass(frozen=True)
class Setting:
    """`layers` in units of 2^20 bytes, `compute` in seconds."""

    strategy: str
    layers: tuple[float, ...]
    compute: float = 0.3
    steps: int = STEPS

    @property
    def sizes(self) -> list[int]:
        return [round(layer * MIB) for layer in self.layers]


@dataclass(frozen=True)
class Group:
    """Settings on the same hosts; `bandwidth` in Mbit/s."""

    workers: int
    bandwidth: float
    settings: tuple[Setting, ...]


GROUPS = (
    Group(2, 100, (
        Setting("bsp ps:colocated=true", (2, 2, 2, 2)),
        Setting("bsp ps:shards=2,colocated=true", (1, 1, 1, 1), 0.1),
        Setting("bsp", (4, 4, 4, 4)),
        Setting("averaging:period=4", (8,)),
        Setting("averaging:period=2 ps:shards=2,colocated=true", (4, 4)),
    )),
    Group(4, 100, (
        Setting("bsp ps:shards=2,colocated=true", (1, 1, 1, 1)),
        Setting("bsp", (4, 4, 4, 4), steps=8),
        Setting("downpour ps:colocated=true", (2,), 0.1),
        Setting("averaging:period=4", (8,)),
    )),
    Group(4, 50, (
        Setting("bsp ps:shards=4,colocated=true", (1, 1, 1, 1)),
        Setting("downpour ps:shards=2,colocated=true", (1, 1), 0.1),
        Setting("averaging:period=4 ps:shards=2,colocated=true", (4,)),
    )),
)  # fmt: skip

HELD_OUT = (
    Group(2, 200, (
        Setting("bsp ps:shards=2,colocated=true", (2, 2, 2, 2)),
        Setting("downpour ps:colocated=true", (4,), 0.2),
        Setting("bsp", (4, 4, 4, 4), 0.1),
        Setting("averaging:period=3 ps:colocated=true", (4, 2)),
    )),
    Group(3, 150, (
        Setting("bsp ps:shards=3,colocated=true", (1, 2, 3)),
        Setting("downpour ps:shards=3,colocated=true", (1, 1, 1), 0.2),
        Setting("bsp", (6, 6)),
        Setting("averaging:period=3", (6,), 0.1),
    )),
    Group(8, 50, (
        Setting("bsp ps:shards=2,colocated=true", (1, 1), steps=8),
        Setting("downpour ps:shards=4,colocated=true", (0.5, 0.5, 0.5, 0.5)),
        Setting("bsp", (8,), steps=8),
        Setting("averaging:period=4", (8,)),
    )),
)  # fmt: skip
"""Written down before any of them was run, and not changed since."""


def seconds_per_step(trace: Path) -> float:
    """The mean time between the beginnings of a worker's steps, of all workers, the first WARM steps left out."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    starts: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event["name"] == "compute" and names[event["pid"]].startswith("worker"):
            starts.setdefault(names[event["pid"]], []).append(event["ts"] / 1e6)
    times = []
    for begun in starts.values():
        begun.sort()
        times.append((begun[-1] - begun[WARM]) / (len(begun) - 1 - WARM))
    return statistics.mean(times)


def probed(hosts: namespaces.Hosts, folder: Path) -> tuple[Cluster, float]:
    """The cluster that `dure probe` describes, and the worst residual of its links."""
    path = folder / "cluster.yaml"
    command = [sys.executable, "-m", "dure", "probe", "--json", "--out", str(path)]
    done = hosts.run(command, seconds=PROBE_SECONDS, environ=ENVIRON)
    return Cluster.from_yaml(path), json.loads(done[0].out.splitlines()[-1])["residual"]


ENVIRON = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def measured(hosts: namespaces.Hosts, setting: Setting, job: str, folder: Path) -> float:
    options = ["--strategy", setting.strategy, "--steps", str(setting.steps), "--eval-every", "1000000"]
    command = [sys.executable, "-m", "dure", "train", job, *options, "--on", "torchrun", "--trace"]
    hosts.run([*command, "--out", str(folder / "real"), "--json"], seconds=RUN_SECONDS, environ=ENVIRON)
    return seconds_per_step(folder / "real" / "trace.json")


def predicted(cluster: Cluster, setting: Setting, job: str, folder: Path) -> tuple[float, float]:
    compute = statistics.median(step_seconds(stand_in(setting.sizes, setting.compute)))
    machines = [kind.model_copy(update={"compute": Constant(seconds=compute)}) for kind in cluster.machines]
    here = cluster.model_copy(update={"machines": tuple(machines)})
    out = folder / "virtual"
    train(job, strategy=setting.strategy, on=here, steps=setting.steps, timing_only=True, trace=True, out=out)
    return seconds_per_step(out / "trace.json"), compute


def run(group: Group, rows: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        namespaces.hosts(group.workers, bandwidth=group.bandwidth * 125e3) as hosts,
    ):
        cluster, residual = probed(hosts, Path(place))
        print(cluster.to_yaml(), f"residual {residual:.4f}, congestion control {hosts.congestion}", file=sys.stderr)
        for number, setting in enumerate(group.settings):
            folder = Path(place) / str(number)
            folder.mkdir()
            (folder / "job.py").write_text(job_file(setting.sizes, setting.compute))
            job = f"{folder / 'job.py'}:job"
            real = measured(hosts, setting, job, folder)
            virtual, compute = predicted(cluster, setting, job, folder)
            row = {
                "strategy": setting.strategy,
                "workers": group.workers,
                "mbit_per_second": group.bandwidth,
                "model_mib": sum(setting.layers),
                "compute": compute,
                "measured": real,
                "predicted": virtual,
                "error": virtual / real - 1,
                "congestion": hosts.congestion,
                "residual": residual,
            }
            print(json.dumps(row), file=sys.stderr, flush=True)
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")


def table(rows: Path) -> str:
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    lines = [
        "| strategy | workers | Mbit/s | model, MiB | measured, s | predicted, s | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        figures = f"{row['measured']:.3f} | {row['predicted']:.3f} | {row['error']:+.1%}"
        what = f"| `{row['strategy']}` | {row['workers']} | {row['mbit_per_second']:g} | {row['model_mib']:g}"
        lines.append(f"{what} | {figures} |")
    errors = sorted(abs(row["error"]) for row in found)
    worst, middle = max(errors), statistics.median(errors)
    used = ", ".join(sorted({row["congestion"] for row in found}))
    lines += ["", f"{len(found)} settings: median error {middle:.1%}, worst {worst:.1%}. Congestion control: {used}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--group", type=int, choices=range(len(GROUPS)), help="one group of settings; all if left out")
    parser.add_argument("--held-out", action="store_true", help="the settings that nothing was chosen by")
    parser.add_argument("--rows", type=Path, default=Path("runs/virtual_network.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the rows there are")
    given = parser.parse_args()
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    if not given.table:
        reason = namespaces.missing()
        if reason:
            print(f"skipped: {reason}")
            return
        if given.group is None:
            given.rows.unlink(missing_ok=True)
        groups = HELD_OUT if given.held_out else GROUPS
        for group in groups if given.group is None else [groups[given.group]]:
            run(group, given.rows)
    print(table(given.rows))


if __name__ == "__main__":
    main()
