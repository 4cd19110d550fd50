"""How well virtual time predicts a real slow network: seconds per step, predicted against measured.

    sudo python bench/virtual_network.py                    all groups, and the table
    sudo python bench/virtual_network.py --group 0          one group
    sudo python bench/virtual_network.py --held-out         the settings that nothing was fitted to or chosen by
    sudo python bench/virtual_network.py --per-host         settings with two workers on each host
    python bench/virtual_network.py --table                 the table of the kept measurements

Hosts are network namespaces of this machine with limited cards (`dure_studies.namespaces`); servers live beside
workers, or on hosts of their own. For each group of settings three of the hosts are probed as by `dure probe`, and the
cluster found is the one that the predictions are made for. Then each setting is trained RUNS times for real, and
RUNS_VIRTUAL times in virtual time, with as many seeds; medians are compared. A step's compute is asleep but for the
filling of its gradient. Before the runs of a setting all hosts time it, at once as for `dure probe JOB`; mean and
spread make the distribution that the predictions draw from.
Both are looked at in the same way: the mean time between the beginnings of a worker's steps, in the traces of the
runs, the first WARM steps left out.

Measurements are kept in --rows (a cluster or a run on each line), and a kept setting is not measured again. So an
interrupted bench continues, and a changed model is compared with earlier measurements: remove the file to
measure anew.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _script import PATH, parse, told

from dure.planner.probe.measure import step_seconds
from dure.planner.probe.probe import probe
from dure.planner.probe.short_runs import job_file, synthetic_job
from dure.run.launchers import torchrun
from dure.run.setup import Setup
from dure.run.train import train
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.launch.rendezvous import Rendezvous, place
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import LogNormal
from dure_studies import namespaces

WARM = 2
STEPS = 12
RUNS = 3
RUNS_VIRTUAL = 5
MIB = 1 << 18
"""Parameters of four bytes in 2^20 bytes."""

PROBED = 3
"""Hosts that are probed: all are alike, and pairs grow faster than hosts."""

GROUP_SECONDS = 900.0
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET of sched.h


@dataclass(frozen=True)
class Setting:
    """`layers` in units of 2^20 bytes, `compute` in seconds. `apart`: servers have hosts of their own."""

    strategy: str
    layers: tuple[float, ...]
    compute: float = 0.1
    steps: int = STEPS

    @property
    def sizes(self) -> list[int]:
        return [round(layer * MIB) for layer in self.layers]

    @property
    def apart(self) -> bool:
        return " ps" in self.strategy and "colocated=true" not in self.strategy

    @property
    def engine(self) -> bool:
        """Whether the engine's collectives are used: they take one run of a process."""
        return " ps" not in self.strategy and self.strategy != "ad-psgd"


@dataclass(frozen=True)
class Group:
    """Settings on the same hosts; `bandwidth` in Mbit/s; `servers` is the number of hosts besides the workers'."""

    workers: int
    bandwidth: float
    settings: tuple[Setting, ...]
    servers: int = 0
    per_host: int = 1

    @property
    def name(self) -> str:
        shared = f", {self.per_host} per host" if self.per_host > 1 else ""
        return f"{self.workers} at {self.bandwidth:g}{shared}"

    @property
    def hosts(self) -> int:
        """Hosts with workers."""
        return self.workers // self.per_host


GROUPS = (
    Group(2, 100, (
        Setting("ssp ps:colocated=true", (2,)),
        Setting("bsp ps:shards=2,colocated=true", (1, 1, 1, 1)),
        Setting("averaging:period=4", (6,)),
        Setting("downpour ps:shards=2,colocated=true", (1, 1)),
    )),
    Group(3, 80, (
        Setting("ssp ps:colocated=true", (2,), 0.15),
        Setting("easgd ps:colocated=true", (2,), steps=16),
        Setting("downpour ps:shards=3,colocated=true", (1, 1, 1)),
        Setting("k-async:k=2 ps:shards=2,colocated=true", (1, 1)),
        Setting("ssp:bound=2 ps", (1.5,)),
        Setting("bmuf:period=4", (6,), steps=16),
    ), servers=1),
    Group(4, 100, (
        Setting("k-sync:k=3 ps:colocated=true", (1,)),
        Setting("ad-psgd", (2,)),
        Setting("bsp ps:shards=4,colocated=true", (1, 1, 1, 1)),
        Setting("backup:backups=1 ps:shards=2,colocated=true", (1, 1)),
    )),
    Group(8, 60, (
        Setting("bsp ps:shards=2,colocated=true", (0.5, 0.5), steps=8),
        Setting("diloco:period=6", (4,), steps=18),
    )),
)  # fmt: skip

HELD_OUT = (
    Group(4, 120, (
        Setting("ssp:bound=1 ps:shards=2,colocated=true", (1, 0.5)),
        Setting("easgd:period=2 ps:shards=2,colocated=true", (0.75, 0.75)),
        Setting("k-async:k=2 ps:colocated=true", (1,)),
        Setting("k-sync:k=2 ps:shards=2", (1, 1)),
        Setting("backup:backups=1 ps:shards=2", (1, 1)),
        Setting("ad-psgd", (1.5,)),
        Setting("downpour ps:shards=2", (1, 1)),
        Setting("diloco:period=4", (3,), steps=16),
    ), servers=2),
    Group(6, 70, (
        Setting("bsp ps:shards=3,colocated=true", (0.5, 0.5, 0.5)),
        Setting("ssp ps:colocated=true", (0.5,)),
        Setting("easgd ps:colocated=true", (0.75,), steps=16),
        Setting("downpour ps:shards=2,colocated=true", (0.5, 0.5)),
        Setting("averaging:period=3 ps:shards=2,colocated=true", (0.5, 0.5)),
        Setting("ad-psgd", (1,)),
        Setting("bmuf:period=5", (3,), steps=15),
        Setting("bsp", (2, 2), steps=8),
    )),
)  # fmt: skip
"""Written down after the model was last changed, before any of them was run."""

REHEARSAL = (
    Group(2, 1000, (
        Setting("ssp:bound=1 ps", (0.05,), 0.01, steps=4),
    ), servers=1),
)  # fmt: skip
"""That of `--smoke`, without a probe: a server on a host of its own."""

PER_HOST = (
    Group(4, 100, (
        Setting("bsp collective", (2, 2)),
        Setting("bsp collective:algorithm=hierarchical", (2, 2)),
        Setting("bsp collective:algorithm=torus", (2, 2)),
        Setting("bsp ps:colocated=true", (1, 1)),
        Setting("bsp ps:shards=4,colocated=true", (1, 1, 1, 1)),
        Setting("averaging:period=2 ps:colocated=true", (2,)),
        Setting("downpour ps:shards=4,colocated=true", (0.5, 0.5, 0.5, 0.5)),
        Setting("ad-psgd", (2,)),
    ), per_host=2),
)  # fmt: skip


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


# ---- on a host, in a process that measures one setting after another


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run this thread's calls, and the processes that they start, on the host of another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") as home, open(f"/var/run/netns/{namespace}", "rb") as there:
        for where, back in ((there, False), (home, True)):
            if libc.setns(where.fileno(), NETWORK_NAMESPACE):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            if not back:
                yield


@contextmanager
def servers_apart(hosts: list[str], addresses: list[str]) -> Iterator[None]:
    """Servers start on `hosts` that have no worker, and not beside the worker that starts them."""

    def rank_of(name: str, rendezvous: Rendezvous) -> int:
        kind, number = name.split()
        rest = rendezvous.place.world_size - 1
        return int(number) if kind == "worker" else 1 + int(number) % rest  # rank 0 starts its servers otherwise

    def start(setup: Setup, rendezvous: Rendezvous, stack: ExitStack, mine: Mapping[str, Any]) -> None:
        for number in range(setup.topology.servers):
            name = f"server {number}"
            if rank_of(name, rendezvous) != rendezvous.place.rank:
                continue
            with inside(hosts[number]):
                fork_server = stack.enter_context(ForkServer())
            fork_server.load(setup.plain())
            given = rendezvous.get(f"start {name}")
            fork_server.start(name, **{**mine, "interface": addresses[number]}, **given)

    beside = torchrun.start_others, torchrun.rank_of
    torchrun.start_others, torchrun.rank_of = start, rank_of
    try:
        yield
    finally:
        torchrun.start_others, torchrun.rank_of = beside


def on_host(plan: dict[str, Any]) -> None:
    """Measure what `plan` asks for, together with the other hosts; the first one writes to `rows`."""
    here = place()
    assert here is not None

    def write(row: dict[str, Any]) -> None:
        if here.rank == 0:
            with open(plan["rows"], "a") as file:
                file.write(json.dumps({"group": plan["group"], **row}) + "\n")

    if plan["probe"]:
        found = probe()
        if found is not None:
            cluster = found.pop("cluster")
            write({"cluster": cluster.to_yaml(), "congestion": plan["congestion"], **found})
    for number, (given, runs) in enumerate(plan["settings"]):
        setting = Setting(**given)
        path = Path(plan["folder"]) / f"job{number}.py"
        path.write_text(job_file(setting.sizes, setting.compute))
        rendezvous = Rendezvous(here, f"setting {number}")
        rendezvous.exchange("ready", True)
        compute = step_seconds(synthetic_job(setting.sizes, setting.compute))
        for run in range(runs):
            rendezvous.exchange(f"run {run}", True)
            out = Path(plan["folder"]) / f"{plan['batch']} {number} {run}"
            how: dict[str, Any] = {"strategy": setting.strategy, "steps": setting.steps, "eval_every": 1_000_000}
            apart = servers_apart(plan["server_hosts"], plan["server_addresses"])
            with apart if setting.apart else nullcontext():
                train(f"{path}:job", on="torchrun", trace=True, out=out, **how)
            if here.rank == 0:
                write({"setting": given, "compute": compute, "measured": seconds_per_step(out / "trace.json")})


# ---- all hosts of a group


def assume(group: Group, rows: Path) -> None:
    """Begin `rows` anew with a cluster that is not probed: a probe takes most of a minute."""
    cluster = Cluster.uniform(group.workers).to_yaml()
    rows.write_text(json.dumps({"group": group.name, "congestion": "not asked for", "cluster": cluster}) + "\n")


def measure(group: Group, rows: Path, runs: int) -> None:
    """Measure what of `group` is not in `rows`."""
    there = read(rows).get(group.name, [])
    settings = [json.loads(json.dumps(asdict(setting))) for setting in group.settings]
    left = [(each, runs - sum(row.get("setting") == each for row in there)) for each in settings]
    left = [(each, missing) for each, missing in left if missing > 0]
    unprobed = not any("cluster" in row for row in there)
    if not left and not unprobed:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces.hosts(group.hosts + group.servers, bandwidth=group.bandwidth * 125e3) as hosts,
    ):
        plan: dict[str, Any] = {"rows": str(rows.absolute()), "group": group.name, "folder": folder}
        plan |= {"congestion": hosts.congestion, "probe": False, "batch": 0, "settings": []}
        plan |= {"server_hosts": hosts.names[group.hosts :], "server_addresses": hosts.addresses[group.hosts :]}
        if unprobed:
            run(hosts, min(PROBED, group.hosts), group.per_host, plan | {"probe": True})
        batches = [[each for each in left if not Setting(**each[0]).engine]]
        batches += [[(each, 1)] for each, missing in left if Setting(**each).engine for _ in range(missing)]
        for number, batch in enumerate(batches):
            if batch:
                run(hosts, group.hosts, group.per_host, plan | {"settings": batch, "batch": number})


def run(hosts: namespaces.Hosts, count: int, per_host: int, plan: dict[str, Any]) -> None:
    some = namespaces.Hosts(hosts.names[:count], hosts.addresses[:count], hosts.bandwidth, hosts.congestion)
    environ = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--host", json.dumps(plan)]
    some.run(command, seconds=GROUP_SECONDS, environ=environ, per_host=per_host)


def read(rows: Path) -> dict[str, list[dict[str, Any]]]:
    """The kept measurements, by group."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in rows.read_text().splitlines() if rows.exists() else ():
        row = json.loads(line)
        found.setdefault(row["group"], []).append(row)
    return found


# ---- the predictions


def predicted(cluster: Cluster, setting: Setting, compute: list[float], hosts: int) -> list[float]:
    """Seconds per step of `setting` in virtual time, with several seeds; `compute` is what steps have taken."""
    steps = LogNormal(seconds=statistics.mean(compute), sigma=float(np.std(np.log(compute))))
    machines = cluster.machines[0].changed(compute=steps, count=hosts)
    here = cluster.changed(machines=(machines,))
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(RUNS_VIRTUAL):
            out = Path(folder) / str(seed)
            how: dict[str, Any] = {"strategy": setting.strategy, "steps": setting.steps, "timing_only": True}
            train(synthetic_job(setting.sizes, setting.compute), on=here, out=out, seed=seed, trace=True, **how)
            times.append(seconds_per_step(out / "trace.json"))
    return times


def table(groups: tuple[Group, ...], rows: Path) -> str:
    """The settings of `groups` that are in `rows`, and how good the predictions are."""
    lines = [
        "| strategy | workers | Mbit/s | model, MiB | measured, s | least to most | predicted, s | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, used = [], set()
    found = read(rows)
    for group in groups:
        probed = next((row for row in found.get(group.name, []) if "cluster" in row), None)
        if probed is None:
            continue
        used.add(probed["congestion"])
        cluster = Cluster(**yaml.safe_load(probed["cluster"]))
        for setting in group.settings:
            runs = [row for row in found[group.name] if row.get("setting") == json.loads(json.dumps(asdict(setting)))]
            if not runs:
                continue
            times = sorted(row["measured"] for row in runs)
            real, spread = statistics.median(times), f"{times[0]:.3f} to {times[-1]:.3f}"
            compute = [seconds for row in runs for seconds in row["compute"]]
            virtual = statistics.median(predicted(cluster, setting, compute, group.hosts))
            errors.append(virtual / real - 1)
            what = f"| `{setting.strategy}` | {group.workers} | {group.bandwidth:g} | {sum(setting.layers):g}"
            lines.append(f"{what} | {real:.3f} | {spread} | {virtual:.3f} | {errors[-1]:+.1%} |")
    if errors:
        lines += ["", f"{judged(errors)} Congestion control: {', '.join(sorted(used))}."]
    return "\n".join(lines)


def judged(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return (
        f"{len(sizes)} settings: median error {statistics.median(sizes):.1%}, 90th percentile {ninth:.1%}, "
        f"worst {sizes[-1]:.1%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--group", type=int, help="one group of settings, counted from 0; all if left out")
    parser.add_argument("--held-out", action="store_true", help="the settings that nothing was chosen by")
    parser.add_argument("--per-host", action="store_true", help="the settings with two workers on each host")
    parser.add_argument("--runs", type=int, default=RUNS, help="real runs of each setting")
    parser.add_argument("--rows", type=Path, default=Path("runs/virtual_network.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the kept measurements")
    parser.add_argument("--measure-only", action="store_true", help="leave the predictions, and the table, for later")
    parser.add_argument("--host", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parse(parser, runs=1, rows=Path("runs/virtual-network-smoke.jsonl"))
    if given.host is not None:
        on_host(given.host)
        return
    groups: tuple[Group, ...] = PER_HOST if given.per_host else HELD_OUT if given.held_out else GROUPS
    if given.smoke:
        groups = REHEARSAL
    if given.group is not None:
        groups = groups[given.group : given.group + 1]
    if not given.table:
        reason = namespaces.missing()
        if reason:
            print(f"skipped: {reason}")
            return
        given.rows.parent.mkdir(parents=True, exist_ok=True)
        if given.smoke:
            assume(REHEARSAL[0], given.rows)
        for group in groups:
            measure(group, given.rows, given.runs)
    if not given.measure_only:
        with told("virtual_network", given) as facts:
            print(table(groups, given.rows))
            facts["rows"] = [row for row in itertools.chain(*read(given.rows).values()) if "measured" in row]


if __name__ == "__main__":
    main()
