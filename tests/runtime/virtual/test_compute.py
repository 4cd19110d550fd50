"""Durations: their means, their streams, their traces."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from support.wording import raising

from dure.errors import ClusterError
from dure.runtime.virtual import compute as compute_module
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Compute, Constant, Durations, LogNormal, Pareto, ShiftedExponential, Trace

RANDOM: dict[str, Compute] = {
    "shifted-exponential": ShiftedExponential(shift=0.3),
    "exponential": ShiftedExponential(shift=0.0),
    "lognormal": LogNormal(sigma=0.7),
    "pareto": Pareto(tail=3.5),
}
ALL: dict[str, Compute] = {
    **RANDOM,
    "constant": Constant(),
    "trace": Trace(durations=(0.1, 0.2, 0.6)),
}


def stream(compute: Compute, count: int, seed: int = 0, flops: float = 0.0) -> list[float]:
    durations = Durations(compute, 1.0, np.random.default_rng(seed))
    return [durations.draw(flops) for _ in range(count)]


@pytest.mark.parametrize("name", RANDOM)
def test_the_factor_has_mean_one(name: str) -> None:
    compute = RANDOM[name].changed(seconds=0.02)
    drawn = np.array(stream(compute, 60_000))
    error = drawn.std() / np.sqrt(len(drawn))
    assert abs(drawn.mean() - 0.02) < 3 * error
    assert drawn.std() > 0.005
    assert drawn.min() > 0


def test_the_shapes_are_those_named() -> None:
    """Each against what only it has: a floor, a normal logarithm, a power law."""
    rng = np.random.default_rng(5)
    exponential = ShiftedExponential(shift=0.3).factors(rng, 50_000)
    assert exponential.min() == pytest.approx(0.3, abs=1e-3)
    assert (exponential > 0.3 + 0.7).mean() == pytest.approx(np.exp(-1), abs=0.01)
    logs = np.log(LogNormal(sigma=0.7).factors(rng, 50_000))
    assert logs.std() == pytest.approx(0.7, abs=0.01)
    assert ((logs - logs.mean()) ** 3).mean() == pytest.approx(0.0, abs=0.02)
    pareto = Pareto(tail=3.0).factors(rng, 50_000)
    assert pareto.min() == pytest.approx(2 / 3, abs=1e-3)
    assert (pareto > 4 / 3).mean() == pytest.approx(1 / 8, abs=0.01)


@pytest.mark.parametrize("name", ALL)
def test_a_stream_is_its_seed_s(name: str) -> None:
    first, again = stream(ALL[name], 1200), stream(ALL[name], 1200)
    assert first == again
    if name in RANDOM:
        assert first != stream(ALL[name], 1200, seed=1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", [1, 7])
def test_drawing_ahead_changes_nothing(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = stream(ALL[name], 1200)
    monkeypatch.setattr(compute_module, "_BLOCK", block)
    assert stream(ALL[name], 1200) == ahead


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_a_stream_goes_on_where_it_was(name: str, count: int) -> None:
    whole = stream(ALL[name], count + 50)
    resumed = Durations(ALL[name], 1.0, np.random.default_rng(0))
    resumed.skip(count)
    assert [resumed.draw() for _ in range(50)] == whole[count:]
    assert resumed.drawn == count + 50


def test_seconds_follow_from_the_work_or_are_given() -> None:
    assert stream(Constant(), 1, flops=1e9) == [pytest.approx(0.2e-3 + 0.05)]
    faster = Constant(flops_per_second="1 TFLOP/s", overhead="5 us")
    assert stream(faster, 1, flops=1e9) == [pytest.approx(5e-6 + 1e-3)]
    assert stream(Constant(seconds="20 ms"), 2, flops=1e9) == [0.02, 0.02]


def test_speed_divides_and_stays() -> None:
    machines = [
        Machines(count=2, compute=Constant(seconds=1.0), speed=0.2),
        Machines(count=2, compute=Constant(seconds=1.0), speed=[1, 4]),
        Machines(count=200, compute=Constant(seconds=1.0), speed={"distribution": "lognormal", "sigma": 0.5}),
        Machines(count=200, compute=Constant(seconds=1.0), speed={"distribution": "uniform", "low": 0.5, "high": 2}),
    ]
    cluster = Cluster(machines=machines)
    speeds = []
    for worker in range(cluster.workers):
        durations = cluster.durations(worker, seed=3)
        first = durations.draw()
        assert first == durations.draw() == cluster.durations(worker, seed=3).draw()
        speeds.append(1 / first)
    assert speeds[:4] == pytest.approx([0.2, 0.2, 1, 4])
    assert np.log(speeds[4:204]).std() == pytest.approx(0.5, abs=0.08)
    assert min(speeds[204:]) >= 0.5
    assert max(speeds[204:]) <= 2
    assert np.mean(speeds[204:]) == pytest.approx(1.25, abs=0.1)


def test_workers_draw_apart() -> None:
    cluster = Cluster.uniform(4, compute=LogNormal(sigma=0.5, seconds=1.0))
    streams = [[cluster.durations(worker, seed).draw() for _ in range(1)] for worker in range(4) for seed in range(3)]
    assert len({value for drawn in streams for value in drawn}) == 12


def test_a_trace_is_replayed_in_order() -> None:
    recorded = (0.1, 0.2, 0.6, 0.3)
    assert stream(Trace(durations=recorded, start="first"), 6, flops=1e12) == pytest.approx([*recorded, 0.1, 0.2])
    starts = set()
    for seed in range(40):
        drawn = stream(Trace(durations=recorded), 8, seed)
        start = min(range(4), key=lambda i: abs(recorded[i] - drawn[0]))
        cycle = list(itertools.islice(itertools.cycle(recorded), start, start + 8))
        assert drawn == pytest.approx(cycle)
        starts.add(start)
    assert starts == {0, 1, 2, 3}


def test_a_trace_file_is_read_beside_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("# measured\n20 ms\n0.03\n\n40 ms  # a pause\n")
    file = tmp_path / "cluster.yaml"
    file.write_text("machines: [{count: 2, compute: {distribution: trace, file: steps.txt, start: first}}]")
    durations = Cluster.from_yaml(file).durations(1, seed=0)
    assert [durations.draw() for _ in range(4)] == pytest.approx([0.02, 0.03, 0.04, 0.02])


@pytest.mark.parametrize(("text", "expected"), [("20 ms\nsoon\n", "soon"), ("0 s\n", "above")])
def test_a_bad_trace_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "steps.txt").write_text(text)
    with raising(ClusterError, expected):
        Trace(file=str(tmp_path / "steps.txt"))


def test_draw_alone_is_a_step() -> None:
    rng = np.random.default_rng(0)
    drawn = [LogNormal(sigma=0.2, seconds=2.0).draw(rng) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(2.0, abs=0.05)
    assert {Trace(durations=(0.5, 1.5)).draw(rng) for _ in range(50)} == {0.5, 1.5}
