"""Cores that processes of one machine share in virtual time: closed forms, and runs on one host."""

from __future__ import annotations

from functools import partial

import pytest
from support.machines import placed

import dure
from dure.runtime.virtual.cluster import Cluster, Link, Machines, RoundCost, SharedHost
from dure.runtime.virtual.compute import Constant
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.sharing import Cores, Process


class Bench:
    """Processes on shared cores, and when each demand ended."""

    def __init__(self, cores: int, processes: int) -> None:
        self.kernel = Kernel()
        shared = Cores(self.kernel, cores)
        self.processes = [Process(shared) for _ in range(processes)]
        self.ends: dict[str, float] = {}

    def ask(self, process: int, seconds: float, name: str, at: float = 0.0) -> None:
        self.kernel.at(at, lambda: self.processes[process].run(seconds, partial(self._end, name)) and None)

    def _end(self, name: str) -> None:
        assert name not in self.ends
        self.ends[name] = self.kernel.now


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (2, 7), (4, 3), (3, 16)])
def test_equal_demands_at_once_take_processes_over_cores_times_as_long(cores: int, processes: int) -> None:
    bench = Bench(cores, processes)
    for process in range(processes):
        bench.ask(process, 2.0, str(process))
    bench.kernel.run()
    assert list(bench.ends.values()) == pytest.approx([2.0 * max(1.0, processes / cores)] * processes)


def test_unequal_demands_share_equally_until_the_shorter_ends() -> None:
    """One core, 1 s and 3 s: each gets half until 2 s; the longer has 2 s left and the core for itself."""
    bench = Bench(1, 2)
    bench.ask(0, 1.0, "short")
    bench.ask(1, 3.0, "long")
    bench.kernel.run()
    assert bench.ends == pytest.approx({"short": 2.0, "long": 4.0})


def test_a_third_process_slows_two_from_its_arrival() -> None:
    """Two cores: 2 s of work each, a third process at 1 s. Two thirds of a core until the first two end at 2.5 s."""
    bench = Bench(2, 3)
    for process, at in ((0, 0.0), (1, 0.0), (2, 1.0)):
        bench.ask(process, 2.0, str(process), at)
    bench.kernel.run()
    assert bench.ends == pytest.approx({"0": 2.5, "1": 2.5, "2": 3.5})


def test_a_process_does_one_thing_after_another() -> None:
    bench = Bench(4, 1)
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 0.0)):
        bench.ask(0, seconds, name)
    bench.kernel.run()
    assert bench.ends == pytest.approx({"a": 1.0, "b": 3.0, "c": 3.0})


def test_what_follows_comes_before_what_waits() -> None:
    """The reply to a message leaves before the next message is looked at; a turn (`last`) lets all that waits pass."""
    bench = Bench(1, 1)
    process = bench.processes[0]

    def ended() -> None:
        bench._end("first")
        process.run(1.0, partial(bench._end, "turn"), last=True)
        process.run(1.0, partial(bench._end, "reply"))

    process.run(1.0, ended)
    bench.ask(0, 1.0, "waits", at=0.5)
    bench.kernel.run()
    assert bench.ends == pytest.approx({"first": 1.0, "reply": 2.0, "waits": 3.0, "turn": 4.0})


def test_a_paused_process_leaves_its_core_to_others() -> None:
    bench = Bench(1, 2)
    bench.ask(0, 1.0, "paused")
    bench.ask(1, 2.0, "other")
    bench.kernel.at(1.0, bench.processes[0].pause)  # both have had half a second
    bench.kernel.at(5.0, bench.processes[0].go_on)
    bench.kernel.run()
    assert bench.ends == pytest.approx({"other": 2.5, "paused": 5.5})


def test_what_is_dropped_costs_no_more_and_never_ends() -> None:
    bench = Bench(1, 2)
    demand = bench.processes[0].run(4.0, lambda: bench._end("dropped"))
    bench.ask(0, 1.0, "next")
    bench.ask(1, 3.0, "other")
    bench.kernel.at(2.0, lambda: bench.processes[0].drop(demand))
    bench.kernel.run()
    assert bench.ends == pytest.approx({"next": 4.0, "other": 5.0})


def test_stretching_lengthens_what_is_left() -> None:
    bench = Bench(1, 1)
    demand = bench.processes[0].run(4.0, lambda: bench._end("slow"))
    bench.kernel.at(1.0, lambda: bench.processes[0].stretch(demand, 2.0))
    bench.kernel.run()
    assert bench.ends == pytest.approx({"slow": 7.0})


# ---- runs on one host

STEP, ALPHA, WAKE, ROUND = 0.01, 1e-3, 2e-3, 4e-3


def one_host(workers: int, cores: int, **rest: float) -> Cluster:
    machines = (Machines(count=workers, compute=Constant(seconds=STEP)),)
    host = SharedHost(
        cores=cores, all_reduce=RoundCost(start=ROUND, byte=0.0), gradient=RoundCost(start=ROUND / 2, byte=0.0)
    )
    constants = {"alpha": ALPHA, "beta": 0.0, "gamma": 0.0, **rest}
    return Cluster(machines=machines, host=host, link=Link(latency=WAKE), **constants)


def seconds(strategy: str, cluster: Cluster, steps: int = 8) -> float:
    run = dure.train("digits-mlp", strategy=strategy, on=cluster, steps=steps, timing_only=True)
    return float(run.figures["seconds"])


@pytest.mark.parametrize(("workers", "cores"), [(1, 1), (2, 2), (4, 2), (6, 4)])
def test_steps_of_workers_that_share_cores(workers: int, cores: int) -> None:
    """Eight steps apart, then one meeting of 2 (K - 1) rounds."""
    expected = 8 * STEP * max(1, workers / cores) + 2 * (workers - 1) * ROUND
    assert seconds("one-shot", one_host(workers, cores)) == pytest.approx(expected)


def test_a_gradient_s_sum_costs_its_own_rounds() -> None:
    assert seconds("bsp", one_host(3, 2)) == pytest.approx(8 * (STEP * 3 / 2 + 4 * ROUND / 2))


def test_one_worker_and_one_server_hand_over() -> None:
    """Beside its gradient a step is a pull and a push: four messages, each of two alphas and a latency."""
    cluster = one_host(1, 2)
    longer, shorter = (seconds("downpour", cluster, steps) for steps in (20, 10))
    assert (longer - shorter) / 10 == pytest.approx(STEP + 4 * (2 * ALPHA + WAKE))


def test_a_server_shares_the_workers_cores() -> None:
    """One core for all: what a process does, the others wait for. No latency, so no core is ever idle."""
    cluster = one_host(2, 1).changed(link=Link(latency=0.0))
    longer, shorter = (seconds("downpour", cluster, steps) for steps in (60, 20))
    assert (longer - shorter) / 40 == pytest.approx(2 * (STEP + 8 * ALPHA), rel=0.01)


def test_bytes_cost_both_processes() -> None:
    free, costly = (seconds("downpour", one_host(1, 2, beta=beta), 10) for beta in (0.0, 1e-7))
    assert costly - free > 2 * 10 * 4810 * 4 * 1e-7  # ten pushes at least, at both ends


def test_events_reach_processes_of_a_host() -> None:
    plain = {"workers": 2, "cores": 2}
    alone = seconds("one-shot", one_host(**plain))
    for event, more in (
        ({"at": 0.02, "kind": "pause", "worker": 0, "for": 0.5}, 0.5),
        ({"at": 0.0, "kind": "slow", "worker": 1, "factor": 3}, 2 * 8 * STEP),
        ({"at": 0.045, "kind": "slow", "worker": 1, "factor": 3}, 2 * 3.5 * STEP),
    ):
        cluster = Cluster(**{**one_host(**plain).model_dump(by_alias=True), "events": [event]})
        assert seconds("one-shot", cluster) == pytest.approx(alone + more)


def test_a_worker_of_a_host_crashes_and_returns() -> None:
    events = [{"at": 0.055, "kind": "crash", "worker": 1}, {"at": 0.2, "kind": "join", "worker": 1}]
    cluster = Cluster(**{**one_host(2, 1).model_dump(by_alias=True), "events": events})
    run = dure.train("digits-mlp", strategy="ssp:bound=3", on=cluster, steps=20, seed=1)
    assert run.summary()["failures_survived"] == 1


TWELVE = (
    "bsp", "bsp ps", "averaging:period=2", "bmuf:period=2", "easgd:period=2", "ssp:bound=3", "downpour", "ad-psgd",
    "hogwild", "k-async:k=2", "k-sync:k=1", "diloco:period=2",
)  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", TWELVE)
def test_every_method_takes_longer_on_fewer_cores(strategy: str) -> None:
    """Three workers, and servers where there are some, on one core take at least as long as their steps together."""
    many, one = (seconds(strategy, one_host(3, cores), 6) for cores in (8, 1))
    assert many >= 4 * STEP  # k-sync's fast worker makes less than others
    assert one > max(many, 12 * STEP)


def test_the_same_host_gives_the_same_run() -> None:
    cluster = one_host(3, 2)
    runs = [dure.train("digits-mlp", strategy="downpour", on=cluster, steps=20, seed=3) for _ in range(2)]
    assert runs[0].history == runs[1].history


def test_a_host_is_written_and_read() -> None:
    import yaml

    cluster = one_host(3, 2)
    assert Cluster(**yaml.safe_load(cluster.to_yaml())) == cluster
    assert set(placed(cluster, 2).values()) == {0}
