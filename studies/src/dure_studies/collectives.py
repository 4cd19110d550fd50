"""Compares algorithms of an all-reduce by size, latency and hosts, in virtual time.

A survey of concepts of distributed deep learning (in Korean), section 4.2 and figure 7: where all workers send to all,
the traffic is large; a ring is more efficient.

Workers with links of 10 Gbit/s come together for one all-reduce and do nothing else. On hosts of several workers these
share a card, and have inner links of 12 GB/s and 10 us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study

if TYPE_CHECKING:
    from dure.core.node import Group, Operation

ALONE = ("engine", "ring", "tree", "halving-doubling", "all-to-all", "hierarchical,per_host=4")
HOSTED = ("engine", "ring", "tree", "halving-doubling", "all-to-all", "hierarchical", "torus")
SIZES = {"1 kB": 1_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
LATENCIES = {"1 ms": 1e-3, "20 us": 20e-6}
PLACES = {
    "8 workers": (8, 1, LATENCIES),
    "6 workers": (6, 1, LATENCIES),
    "8 on 4 hosts": (8, 2, {"20 us": 20e-6}),
    "8 on 2 hosts": (8, 4, {"20 us": 20e-6}),
}
"""Workers, those of a host, and latencies."""


def _settings() -> Mapping[str, Setting]:
    found = {}
    for place, (workers, per_host, latencies) in PLACES.items():
        machines = Machines(count=workers // per_host, workers=per_host, cores=4 * per_host)
        for named, latency in latencies.items():
            cluster = Cluster(machines=(machines,), link=Link(bandwidth=1.25e9, latency=latency))
            for algorithm in ALONE if per_host == 1 else HOSTED:
                found[f"{place}, {named}, {algorithm}"] = Setting(algorithm, cluster)
    return found


def _measure(_study: Study, _job: None, setting: Setting, _rounds: int, _seed: int) -> Row:
    found: Row = {}
    for size, nbytes in SIZES.items():
        seconds, sent = one_all_reduce(setting.strategy, nbytes, setting.cluster)
        found |= {f"{size}, ms": seconds * 1e3, f"{size}, MB": sent / 1e6}
    return found


def one_all_reduce(algorithm: str, nbytes: int, cluster: Cluster) -> tuple[float, int]:
    """Seconds of an all-reduce of all workers of `cluster`, and the most bytes that one of them sends."""
    from dure.core.node import Ghost
    from dure.run.strategy import make
    from dure.runtime.virtual.network import Network
    from dure.runtime.virtual.runtime import VirtualRuntime
    from dure.topology.collective.message_group import SentGroup, algorithm_of

    ranks, networks = range(cluster.workers), []

    def network(kernel: Any) -> Network:
        networks.append(Network(cluster, kernel, {f"worker {rank}": rank for rank in ranks}))
        return networks[0]

    runtime = VirtualRuntime(cluster, network, None, seed=0)
    nodes = [runtime.node(f"worker {rank}", rank) for rank in ranks]
    groups: Sequence[Group] = [node.group(ranks) for node in nodes]
    if algorithm != "engine":
        topology, homes = make(f"collective:algorithm={algorithm}"), [cluster.machine_of(rank) for rank in ranks]
        groups = [SentGroup(node, ranks, algorithm_of(topology, homes), node.meter) for node in nodes]
    tensor: Any = Ghost(nbytes // 4)
    ends: list[Operation[Any]] = [group.all_reduce(tensor) for group in groups]
    runtime.kernel.run()
    for end in ends:
        end.result()
    counts = [networks[0].counters(f"worker {rank}") for rank in ranks]
    return runtime.kernel.now, max(each.bytes_sent + each.bytes_local for each in counts)


def _fastest(rows: OfSeed, place: str, size: str) -> str:
    """The fastest of those written from sends."""
    found = {
        name.removeprefix(f"{place}, "): row[f"{size}, ms"] for name, row in rows.items() if name.startswith(place)
    }
    found.pop("engine")
    return min(found, key=lambda name: found[name])


STUDY = Study(
    name="collectives",
    about="All-reduces of workers with links of 10 Gbit/s.",
    nature="Seconds are virtual, without tensors. MB are those that one worker sends for 100 MB.",
    job="",
    settings=_settings,
    measure=_measure,
    rounds=1,
    seeds=1,
    columns=(
        FigureColumn("1 kB, ms", "1 kB, ms", "{:.3f}"),
        FigureColumn("1 MB, ms", "1 MB, ms", "{:.3f}"),
        FigureColumn("100 MB, ms", "100 MB, ms", "{:.1f}"),
        FigureColumn("100 MB, MB", "MB sent", "{:.1f}"),
    ),
    statements=(
        Statement(
            "8 workers: all to all sends 4 times the ring's bytes, and takes at least 4 times as long for 100 MB",
            lambda rows: (
                abs(
                    rows["8 workers, 20 us, all-to-all"]["100 MB, MB"] / rows["8 workers, 20 us, ring"]["100 MB, MB"]
                    - 4
                )
                < 0.01
                and rows["8 workers, 20 us, all-to-all"]["100 MB, ms"]
                >= 4 * rows["8 workers, 20 us, ring"]["100 MB, ms"]
            ),
        ),
        Statement(
            "All to all is the fastest for 1 kB, for 8 and for 6 workers and each latency",
            lambda rows: all(
                _fastest(rows, f"{workers} workers, {latency}", "1 kB") == "all-to-all"
                for workers in (6, 8)
                for latency in LATENCIES
            ),
        ),
        Statement(
            "100 MB: halving-doubling is the fastest for 8 workers, the ring for 6",
            lambda rows: all(
                _fastest(rows, f"8 workers, {latency}", "100 MB") == "halving-doubling"
                and _fastest(rows, f"6 workers, {latency}", "100 MB") == "ring"
                for latency in LATENCIES
            ),
        ),
        Statement(
            "Hosts of four workers: the torus is the fastest for 100 MB",
            lambda rows: _fastest(rows, "8 on 2 hosts, 20 us", "100 MB") == "torus",
        ),
    ),
    quick={},
)
