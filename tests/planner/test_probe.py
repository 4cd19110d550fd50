"""`dure probe`: fits that are exact where the figures are, a cluster file that reads back, real hosts and links."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.machines import placed

import dure
from dure.cli.main import main
from dure.core.collective_cost import Path as Wire
from dure.errors import UsageError
from dure.job.job import load_job
from dure.planner.probe import measure as link_measure
from dure.planner.probe.advice import advice, bend, curve_advice, disturbance, link_advice, table
from dure.planner.probe.description import described, hand_over, sentence, stragglers, unfairness_of, wire_of
from dure.planner.probe.measure import fitted, predicted
from dure.planner.probe.probe import hosts_of, partners, probe
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network
from dure_studies import namespaces

SIZES = [1 << power for power in range(16, 22)]


def points(
    start: float, beta: float, bandwidth: float, sizes: list[int] = SIZES
) -> list[tuple[int, int, float, float]]:
    """What a network of the model would show."""
    rows = []
    for size in sizes:
        for count in (1, 3):
            seconds = start + size * beta + count * size / bandwidth
            rows.append((size, count, seconds, seconds))
    return rows


def figures(bandwidth: float, latency: float = 1e-4, alpha: float = 2e-5, beta: float = 1e-9) -> dict[str, object]:
    round_trip = 2 * Wire(latency, alpha, bandwidth).seconds(0)
    return {"round_trip": round_trip, "cpu_message": alpha, "points": points(round_trip, beta, bandwidth)}


def found(bandwidths: list[float], steps: list[list[float]] | None = None) -> dict[str, object]:
    """The figures of hosts of one rank with such links: a pair goes at the slower one's."""
    world = range(len(bandwidths))
    met = [{"hosts": [i, j], **figures(min(bandwidths[i], bandwidths[j]))} for i, j in partners(len(bandwidths))]
    return {
        "hosts": [[rank] for rank in world],
        "local": [figures(2e9) for _ in world],
        "inside": [],
        "pairs": met,
        "apply": [[(size, 1e-5 + size * 4e-10) for size in SIZES] for _ in world],
        "cores": [3 for _ in world],
        "memory": [64 * 10**9 for _ in world],
        "compute": steps or [[0.1] for _ in world],
        "flops": None,
        "names": [f"node{host}" for host in world],
        "stragglers": [],
        "collectives": {},
        "members": len(bandwidths),
        "advice": [],
    }


def test_the_models_constants_come_out_of_what_the_model_shows() -> None:
    line = wire_of({"points": points(3e-4, 2e-9, 12.5e6)})
    assert line.start == pytest.approx(3e-4, rel=1e-5)
    assert line.slopes == pytest.approx((2e-9, 8e-8), rel=1e-5)
    assert line.residual == 0


def test_messages_alone_cannot_tell_the_links_part_of_a_byte() -> None:
    alone = [row for row in points(3e-4, 2e-9, 12.5e6) if row[1] == 1]
    with pytest.raises(UsageError, match="do not determine"):
        wire_of({"points": alone})


def test_handling_that_the_link_hides_is_none() -> None:
    """A host that handles pieces as they come: a byte costs nothing beside the link, and never less than nothing."""
    rows = [(size, count, (count - 0.1) * size * 8e-8) for size in SIZES for count in (1, 3)]
    beta, wire = wire_of({"points": [(*row, row[-1]) for row in rows]}).slopes
    assert beta == 0
    assert wire == pytest.approx(8e-8, rel=0.1)


def test_a_link_that_shows_nowhere_is_still_there() -> None:
    """Three messages at once take no longer than one: all of a byte's time is the cores'."""
    rows = [(size, count, size * 1e-9, size * 1e-9) for size in SIZES for count in (1, 3)]
    figures = found([1e9])
    figures["local"] = [{"round_trip": 1e-4, "cpu_message": 1e-5, "points": rows}]
    cluster = described(figures, workers=2)
    assert cluster.link.bandwidth == pytest.approx(20e9, rel=1e-3)
    assert cluster.memory_bandwidth == pytest.approx(1e9, rel=1e-3)


def test_where_noise_hides_what_bytes_cost_a_link_is_as_fast_as_its_largest_message() -> None:
    rows = [(size, count, 0.2 / size**0.1, 0.3 / size**0.1) for size in SIZES for count in (1, 3)]
    figures = found([1e9])
    figures["local"] = [{"round_trip": 1e-4, "cpu_message": 1e-5, "points": rows}]
    size, count, seconds, _ = rows[-1]
    assert wire_of({"points": rows}).slopes == pytest.approx((0.0, seconds / (count * size)))
    assert described(figures, workers=2).memory_bandwidth == pytest.approx(count * size / seconds, rel=1e-3)


@pytest.mark.parametrize("unfairness", [0.0, 0.1, 0.3])
def test_unfairness_comes_out_of_races_in_virtual_time(unfairness: float) -> None:
    cluster = Cluster.uniform(3, unfairness=unfairness, alpha=0, beta=0, link=Link(bandwidth=1e6, latency=0))
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(1000):
        kernel = Kernel()
        network = Network(cluster, kernel, placed(cluster), rng)
        ends: list[float] = []
        for worker in (1, 2):
            network.send(worker, 0, 1_000_000, lambda ends=ends, kernel=kernel: ends.append(kernel.now))  # type: ignore[misc]
        kernel.run()
        rounds.append((ends[0], ends[1]))
    assert unfairness_of(rounds) == pytest.approx(unfairness, abs=0.02)
    figures = found([1e6, 1e6, 1e6]) | {"races": rounds}
    assert described(figures, workers=3).unfairness == pytest.approx(unfairness, abs=0.02)


def test_all_wait_for_the_slowest_host_s_codec() -> None:
    fast, slow = ({each: [(100, s), (200, 2 * s)] for each in ("encode", "decode", "combine")} for s in (1e-6, 3e-6))
    cluster = described(found([1e9, 1e9]) | {"codecs": {"1bit": [fast, slow]}}, workers=2)
    assert cluster.codecs["1bit"].encode.value == pytest.approx(3e-8, rel=1e-3)


def test_a_codec_is_probed_once() -> None:
    with pytest.raises(UsageError, match="one cost for strom"):
        probe(codecs=["strom:threshold=1", "strom:threshold=2"])
    with pytest.raises(UsageError, match="nothing is called"):
        probe(codecs=["2bit"])


def test_hosts_that_are_alike_share_a_link() -> None:
    cluster = described(found([12.5e6, 12.6e6, 12.4e6, 12.5e6]), workers=9)
    (kind,) = cluster.machines
    assert (kind.count, kind.link, kind.cores, cluster.servers.cores) == (4, None, 3, 3)
    assert cluster.link.bandwidth == pytest.approx(12.5e6, rel=0.01)
    assert cluster.link.latency == pytest.approx(1e-4, rel=1e-3)
    constants = (cluster.alpha, cluster.beta, cluster.gamma, cluster.memory_bandwidth)
    assert constants == pytest.approx((2e-5, 1e-9, 4e-10, 1 / (1 / 2e9 + 1e-9)), rel=1e-3)


def test_a_host_beside_a_slow_one_keeps_its_own_link() -> None:
    fast, slow = 100e6, 10e6
    steps = [[0.1, 0.3, 0.2], [0.2], [0.2], [0.8]]
    cluster = described(found([fast, fast, fast, slow], steps), workers=4)
    assert [kind.count for kind in cluster.machines] == [3, 1]
    rates = [kind.link.bandwidth for kind in cluster.machines if kind.link is not None]
    assert rates == pytest.approx([fast, slow], rel=1e-3)
    assert [kind.compute.seconds for kind in cluster.machines] == pytest.approx([0.2, 0.8])
    assert cluster.link.bandwidth == pytest.approx(fast, rel=1e-3)


def hosted(hosts: list[list[int]], bandwidths: list[float], inner: list[float]) -> dict[str, object]:
    """The figures of hosts of several ranks, whose inner links have the bandwidths `inner` and 5 us of latency."""
    figures_ = found(bandwidths, [[0.1 * (1 + host)] for host, ranks in enumerate(hosts) for _ in ranks])
    within = [
        {"host": host, **figures(rate, latency=5e-6, beta=0.0)}
        for host, (ranks, rate) in enumerate(zip(hosts, inner, strict=True))
        for _ in partners(len(ranks))
    ]
    return figures_ | {"hosts": hosts, "inside": within}


def test_hosts_of_two_ranks_are_machines_of_two_workers_with_a_card_and_an_inner_link() -> None:
    """The card's figures are those between hosts; the link's inside those of the ranks of a host."""
    shown = hosted([[0, 1], [2, 3], [4, 5]], [12.5e6] * 3, [4e9] * 3) | {"compute": [[0.1]] * 6}
    cluster = described(shown, workers=9)
    (kind,) = cluster.machines
    assert (kind.count, kind.workers, kind.link, kind.inside, kind.compute.seconds) == (3, 2, None, None, 0.1)
    assert cluster.workers == 6
    assert (cluster.link.bandwidth, cluster.link.latency) == pytest.approx((12.5e6, 1e-4), rel=1e-3)
    assert (cluster.inside.bandwidth, cluster.inside.latency) == pytest.approx((4e9, 5e-6), rel=1e-3)
    assert (cluster.alpha, cluster.beta) == pytest.approx((2e-5, 1e-9), rel=1e-3)


def test_hosts_of_two_and_of_four_ranks_are_two_kinds() -> None:
    cluster = described(hosted([[0, 1], [2, 3, 4, 5]], [1e9, 1e9], [4e9, 8e9]), workers=9)
    assert [(kind.count, kind.workers) for kind in cluster.machines] == [(1, 2), (1, 4)]
    inner = [kind.inside.bandwidth for kind in cluster.machines if kind.inside is not None]
    assert inner == pytest.approx([4e9, 8e9], rel=1e-3)
    assert [kind.compute.mean(0.0) for kind in cluster.machines] == pytest.approx([0.1, 0.2])


def test_the_ranks_of_one_host_are_its_workers_and_use_no_card() -> None:
    """Nothing is known of the card: what servers of their own would use is taken to be as fast as the inner link."""
    cluster = described(hosted([[0, 1, 2]], [1e9], [4e9]) | {"pairs": []}, workers=9)
    assert [(kind.count, kind.workers) for kind in cluster.machines] == [(1, 3)]
    assert cluster.host is None
    assert (cluster.inside.bandwidth, cluster.link.bandwidth) == pytest.approx((4e9, 4e9), rel=1e-3)
    assert (cluster.inside.latency, cluster.link.latency) == pytest.approx((5e-6, 5e-6), rel=1e-3)


def test_steps_have_the_mean_and_the_spread_of_the_median_worker() -> None:
    rng = np.random.default_rng(0)
    steps = [list(0.02 * np.exp(sigma * rng.standard_normal(400) - sigma**2 / 2)) for sigma in (0.1, 0.2, 0.4)]
    (kind,) = described(found([1e9] * 3, steps), workers=3).machines
    assert kind.compute.distribution == "lognormal"
    assert kind.compute.seconds == pytest.approx(0.02, rel=0.02)
    assert kind.compute.sigma == pytest.approx(0.2, rel=0.1)
    assert kind.speed == 1.0


def test_products_of_matrices_give_a_speed() -> None:
    (kind,) = described(found([1e9] * 2, [[2e-3]] * 2) | {"flops": 4e7}, workers=2).machines
    assert kind.compute.seconds is None
    assert kind.compute.flops_per_second == pytest.approx(2e10)


def test_a_straggler_is_named_and_has_a_speed_in_the_file() -> None:
    """Rank 3 of host 1 alternates between a usual step and a pause; its median step is that of the others."""
    steps = [[0.1] * 40, [0.1] * 40, [0.11] * 40, [0.1, 0.1, 0.1, 0.7] * 10, [0.1] * 40, [0.1] * 40]
    shown = hosted([[0, 1], [2, 3], [4, 5]], [1e9] * 3, [4e9] * 3) | {"compute": steps}
    (slow,) = stragglers(shown)
    assert slow == {"slow": "step", "rank": 3, "host": "node1", "factor": 2.5}
    assert "rank 3 on node1 take 2.5 times" in sentence(slow)
    cluster = described(shown, workers=6)
    assert [kind.speed for kind in cluster.machines] == [(1.0, 1.0, 1.0, 0.4, 1.0, 1.0)]
    seconds = [cluster.durations(worker, 0).draw() for worker in range(6)]
    assert seconds == pytest.approx([0.1, 0.1, 0.1, 0.25, 0.1, 0.1])


def test_one_of_two_workers_can_be_the_straggler() -> None:
    assert [slow["rank"] for slow in stragglers(found([1e9, 1e9], [[0.3], [0.1]]))] == [0]
    assert stragglers(found([1e9, 1e9], [[0.1], [0.12]])) == []


def test_a_straggler_of_one_machine_is_found_in_its_short_runs() -> None:
    runs = {"steps": [[0.1] * 9, [0.1, 0.1, 0.4] * 3], "all_reduce": None, "gradient": None}
    (slow,) = stragglers(found([1e9], [[0.1]]) | {"runs": runs})
    assert slow == {"slow": "step", "rank": 1, "host": "node0", "factor": 2.0}


def test_a_host_with_a_slow_link_is_named() -> None:
    (slow,) = stragglers(found([100e6, 100e6, 100e6, 20e6]))
    assert (slow["slow"], slow["host"], slow["factor"]) == ("link", "node3", pytest.approx(5, rel=0.01))
    assert "link of node3" in sentence(slow)


def test_the_workers_of_a_host_share_its_memory() -> None:
    shown = hosted([[0, 1], [2, 3]], [1e9] * 2, [4e9] * 2) | {"memory": [64_000_900_000, 32 * 10**9]}
    cluster = described(shown, workers=9)
    assert [cluster.memory_of(worker) for worker in range(4)] == [32 * 10**9] * 2 + [16 * 10**9] * 2
    assert described(found([1e9]), workers=6).memory_of(5) == 10_666 * 10**6


def test_ranks_of_a_host_that_are_not_in_a_row_are_refused() -> None:
    assert hosts_of(["a", "a", "b", "c", "c"]) == [[0, 1], [2], [3, 4]]
    with pytest.raises(UsageError, match=r"not in a row.*as torchrun does"):
        hosts_of(["a", "b", "a"])


def test_a_machine_alone_is_described_as_often_as_asked() -> None:
    cluster = described(found([1e9]), workers=6)
    assert cluster.workers == 6
    assert cluster.link.bandwidth == pytest.approx(2e9, rel=1e-3)


def test_hand_overs_tell_a_message_s_costs_at_both_processes_from_the_latency() -> None:
    """A step of 3 ms; a push and its answer cost each process twice alpha + bytes * beta, and pass two latencies."""
    alpha, beta, wake = 2e-4, 1e-9, 5e-5
    points = [[0, 3e-3, 2.9e-3, 0.0]]
    for nbytes in (4, 400_000):
        end = 2 * (alpha + nbytes * beta)
        points.append([nbytes, 3e-3 + 2 * end + 2 * wake, 2.9e-3 + end, end])
    assert hand_over(points) == pytest.approx((alpha, beta, wake))


def test_hand_overs_that_cost_nothing_are_not_negative() -> None:
    assert hand_over([[0, 1e-3, 1e-3, 0.0], [4, 9e-4, 9e-4, 0.0], [400, 8e-4, 8e-4, 0.0]]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("workers", "share"), [(2, 1.0), (6, 0.5)])
def test_a_machine_alone_is_a_host_whose_workers_share_its_cores(workers: int, share: float) -> None:
    """Six workers on three cores have half of one each: a step's own time is half of what it took beside the others."""
    figures = found([1e9], [[0.02]])
    rounds = 2 * (workers - 1)
    runs = {"steps": [[0.01] * 20] * workers, "all_reduce": rounds * 2e-3, "gradient": rounds * 1e-3}
    spent = [[0, 0.02, 0.02, 0.0], [4, 0.0206, 0.0202, 0.0002], [4004, 0.021, 0.0203, 0.0003]]
    cluster = described(figures | {"runs": runs, "hand_over": spent, "numel": 1000}, workers)
    (kind,), host = cluster.machines, cluster.host
    assert (kind.count, host.cores) == (workers, 3)
    assert kind.compute.mean(0.0) == pytest.approx(0.01 * share)
    assert kind.memory == 64 * 10**9 // workers // 10**6 * 10**6
    chunk = 4000 / workers
    assert host.all_reduce.start + chunk * host.all_reduce.byte == pytest.approx(2e-3, rel=1e-3)
    assert host.gradient.start + chunk * host.gradient.byte == pytest.approx(1e-3, rel=1e-3)
    assert (cluster.alpha, cluster.beta) == pytest.approx((1e-4, 1.25e-8), rel=0.01)


def test_without_a_job_rounds_have_the_line_of_the_measured_all_reduces() -> None:
    """An all_reduce of 3 ranks has 4 rounds of a third of the bytes each; the file predicts the measured seconds."""
    points = [(size, 2e-3 + size * 8e-9) for size in SIZES]
    spent = [[0, 0.0, 0.0, 0.0], [4, 0.0006, 0.0002, 0.0002], [4004, 0.001, 0.0003, 0.0003]]
    figures = found([1e9]) | {"hand_over": spent, "collectives": {"all_reduce": points}, "members": 3}
    cluster = described(figures, workers=3)
    assert cluster.host is not None
    assert (cluster.host.all_reduce.start, cluster.host.all_reduce.byte) == pytest.approx((5e-4, 6e-9), rel=1e-3)
    curve = fitted("all_reduce", points, cluster, 3)
    assert curve["predicted"] == pytest.approx([seconds for _, seconds in points], rel=1e-3)


def test_hosts_that_are_several_share_no_cores() -> None:
    assert described(found([1e9, 1e9]), workers=2).host is None


def two_regimes(below: float, above: float, border: int = 1 << 19) -> list[tuple[int, float]]:
    """Seconds of messages whose bytes take `below` up to `border`, and of which the further ones take `above`."""
    sizes = [1 << power for power in range(16, 24)]
    return [(size, 1e-4 + min(size, border) * below + max(size - border, 0) * above) for size in sizes]


def measured_points(points: list[tuple[int, float]]) -> dict[str, object]:
    """Figures with these seconds in both directions, where three messages at once use the link three times."""
    rows = [(size, count, 1e-4 + count * (s - 1e-4)) for size, s in points for count in (1, 3)]
    return {"points": [(*row, row[-1]) for row in rows]}


def test_a_bend_lies_where_the_cost_of_a_byte_changes() -> None:
    found = bend(two_regimes(1e-9, 6e-9))
    assert found is not None
    assert found.size == 1 << 19
    assert (found.below.slopes[0], found.above.slopes[0]) == pytest.approx((1e-9, 6e-9), rel=0.01)
    assert bend(two_regimes(1e-9, 1e-9)) is None
    assert bend(two_regimes(1e-9, 6e-9)[:5]) is None  # too few for two lines


def test_points_that_scatter_have_no_bend() -> None:
    rng = np.random.default_rng(0)
    many = [[(size, s * rng.lognormal(0.0, 0.6)) for size, s in two_regimes(1e-9, 1e-9)] for _ in range(40)]
    assert sum(bend(points) is not None for points in many) <= 2
    scattered = many[0]
    said = link_advice("The link", measured_points(scattered), processes=4, hosts=2)
    assert "they scatter" in said
    assert "write link.bandwidth and link.latency by hand" in said


def test_a_bad_fit_of_a_link_says_its_residual_and_what_to_do() -> None:
    """Between hosts, the advice has the bandwidths of both regimes: 8 bits by 1 ns, and by 6 ns."""
    bad = measured_points(two_regimes(1e-9, 6e-9))
    residual = wire_of(bad).residual
    assert residual > 0.2
    said = link_advice("The link between a and b", bad, processes=4, hosts=2)
    assert said.startswith(f"The link between a and b: residual {residual:.0%}. One line does not fit its points")
    assert "1 ns/B up to 512 KiB, and 6 ns/B above" in said
    assert "8 Gbit/s for messages up to 512 KiB, 1.336 Gbit/s for messages above" in said
    assert "hand-overs" in link_advice("The loopback", bad, processes=1, hosts=1)
    assert "probe without torchrun, by --workers 4" in link_advice("The link inside a", bad, processes=4, hosts=1)
    good = measured_points(two_regimes(1e-9, 1e-9))
    assert link_advice("The loopback", good, processes=1, hosts=1) == link_advice("", good, processes=4, hosts=2) == ""


def test_a_bad_curve_of_a_collective_says_where_it_bends() -> None:
    assert curve_advice("all_reduce", two_regimes(1e-9, 1e-9)) == ""
    said = curve_advice("all_reduce", two_regimes(1e-9, 6e-9))
    assert re.match(r"The curve of all_reduce: residual \d\d%\.", said)
    assert "least exact near 512 KiB" in said
    assert "least exact near 1 MiB" in curve_advice("all_reduce", two_regimes(1e-9, 6e-9, border=1 << 20))
    assert "real runs" in said


def test_advice_is_on_the_worst_link_and_the_worst_curve() -> None:
    figures = found([1e9, 1e9, 1e9])
    assert advice(figures) == []
    figures["pairs"][1]["points"] = measured_points(two_regimes(1e-9, 6e-9))["points"]
    figures["collectives"] = {"broadcast": two_regimes(1e-9, 6e-9), "all_reduce": two_regimes(1e-9, 2e-9)}
    link, curve = advice(figures)
    assert link.startswith("The link between node1 and node2: residual")
    assert curve.startswith("The curve of broadcast")


def test_a_curve_has_its_line_and_what_the_file_predicts() -> None:
    """Of 2 ranks, an all_reduce has 2 rounds with half the bytes; the first adds them up."""
    cluster = described(found([1e9, 1e9]), workers=2)
    path = Wire(cluster.link.latency, cluster.alpha, cluster.link.bandwidth, cluster.beta, cluster.gamma)
    expected = path.seconds(2048, adds=True) + path.seconds(2048)
    assert predicted(cluster, "all_reduce", 4096, 2) == pytest.approx(expected)
    curve = fitted("all_reduce", [(4096, 3e-4), (8192, 4e-4), (16384, 6e-4)], cluster, 2)
    assert (curve["start"], curve["byte"]) == pytest.approx((2e-4, 1e-4 / 4096))
    assert curve["residual"] == pytest.approx(0, abs=1e-6)
    assert curve["predicted"][0] == pytest.approx(expected)


def test_short_runs_that_others_disturbed_are_told_apart() -> None:
    even = {"steps": [[1e-3, 1.1e-3] * 20] * 2, "all_reduce": 1e-3, "gradient": 1e-3}
    assert disturbance(even) == disturbance(even | {"all_reduce": None, "gradient": None}) == ""
    assert "spread by 1.15" in disturbance(even | {"steps": [[1e-3, 1e-2] * 20]})
    assert "no cost of all_reduce was measurable" in disturbance(even | {"all_reduce": 0.0})


def test_the_table_shows_the_advice_the_stragglers_and_the_curves(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    figures = found([1e9, 1e9]) | {"residual": 0.39, "advice": ["One line does not fit."]}
    figures["stragglers"] = [{"slow": "step", "rank": 1, "host": "node1", "factor": 2.5}]
    cluster = described(figures, 2)
    figures["collectives"] = {"all_reduce": fitted("all_reduce", two_regimes(1e-9, 1e-9), cluster, 2)}
    Console(width=300).print(table(cluster, figures))
    shown = capsys.readouterr().out
    assert "One line does not fit." in shown
    assert "rank 1 on node1 take 2.5 times" in shown
    assert re.search(r"all_reduce of 2 workers +100 us and 1 ns/B, residual 0%; predicted", shown)
    assert re.search(r"Memory of a worker +64 GB", shown)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 64])
def test_everybody_has_partners_and_no_pair_meets_twice(world: int) -> None:
    pairs = list(partners(world))
    met = {frozenset(pair) for pair in pairs}
    assert len(met) == len(pairs)
    assert all(len(pair) == 2 for pair in met)
    assert {host for pair in pairs for host in pair} == (set(range(world)) if world > 1 else set())
    assert len(pairs) <= world * max(world - 1, 1).bit_length()


@pytest.mark.long
def test_this_machine_is_probed_and_the_file_is_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here.yaml"
    for sizes in ("SIZES", "TENSOR_SIZES"):
        monkeypatch.setattr(link_measure, sizes, getattr(link_measure, sizes)[:5])
    asked = ["--workers", "3", "--codec", "1bit", "--codec", "sign+momentum"]
    assert main(["probe", "digits-mlp", *asked, "--out", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    cluster = Cluster.from_yaml(path)
    assert cluster == Cluster(**told["cluster"])
    assert cluster.workers == 3
    compute = cluster.machines[0].compute
    assert compute.seconds is not None
    assert min(cluster.alpha, cluster.link.bandwidth, compute.seconds) > 0
    assert compute.flops == load_job("digits-mlp").own_flops
    assert list(cluster.codecs) == ["1bit", "sign+momentum"]
    for cost in cluster.codecs.values():
        assert min(line.start + 4810 * line.value for _, line in cost) > 0
    assert told["pairs"] == []
    assert {*told["collectives"]} == {"all_reduce", "all_gather", "broadcast"}
    assert all(curve["ranks"] == 3 and curve["points"][-1][1] > 0 for curve in told["collectives"].values())
    assert len(told["compute"][0]) >= 20
    assert cluster.memory_of(2) == cluster.memory_of(0) == told["memory"][0] // 3 // 10**6 * 10**6
    assert len(told["runs"]["steps"]) == 3
    assert min(told["runs"]["all_reduce"], told["runs"]["gradient"]) >= 0
    assert [point[0] for point in told["hand_over"]] == [0, 4, 4 * told["numel"]]
    assert cluster.host is not None
    assert cluster.host.cores == told["cores"][0]
    assert any("The loopback: residual" in each for each in told["advice"]) == (told["residual"] > 0.1)
    assert told["residual"] >= 0
    run = dure.train("digits-mlp", sync="bsp", on=str(path), steps=2, timing_only=True)
    assert run.summary()["workers"] == 3


@pytest.mark.long
def test_an_error_in_the_middle_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that its other process is gone, which it has ended itself."""

    def fails(job: object) -> list[float]:
        raise ArithmeticError("too hot")

    monkeypatch.setattr(link_measure, "step_seconds", fails)
    monkeypatch.setattr(link_measure, "SIZES", SIZES[:3])
    with pytest.raises(ArithmeticError, match="too hot"):
        probe(load_job("digits-mlp"), workers=1)


@pytest.mark.long
@pytest.mark.parametrize("slow", [pytest.param(False, marks=pytest.mark.long), True])
def test_even_where_messages_take_long_there_are_sizes_enough(
    slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_measure, "LONGEST", 0.0 if slow else 1e9)
    monkeypatch.setattr(link_measure, "SIZES", [1 << power for power in range(10, 15)])
    assert main(["probe", "--workers", "1", "--out", str(tmp_path / "here.yaml"), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Cluster.from_yaml(tmp_path / "here.yaml") == Cluster(**measured["cluster"])
    assert len({size for size, *_ in measured["local"][0]["points"]}) == (3 if slow else 5)


RANKS = 2  # of each host, started by torchrun
TORCHRUN = f"-m torch.distributed.run --nproc-per-node {RANKS} --master-addr $MASTER_ADDR --master-port 29511"


STRAGGLER = """
import os

from dure.planner.probe import measure

from dure.planner.probe.short_runs import synthetic_job

measure.SIZES, measure.TENSOR_SIZES = measure.SIZES[:6], measure.TENSOR_SIZES[:6]


def job():
    return synthetic_job([1000], 0.03 if os.environ["RANK"] == "3" else 0.01)
"""
"""A job whose steps take three times as long at rank 3. To save time, no message has more than 2 MiB."""


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_hosts_and_the_links_between_them_and_inside_are_probed(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    (tmp_path / "straggler.py").write_text(STRAGGLER)
    probes = f"-m dure probe {tmp_path / 'straggler.py'}:job --out {path} --json"
    launch = f"{sys.executable} {TORCHRUN} --nnodes $WORLD_SIZE --node-rank $RANK {probes}"
    with namespaces.hosts(2, bandwidth=25e6) as hosts:
        done = hosts.run(["sh", "-c", f"exec {launch}"], seconds=110)
    told = json.loads(done[0].out.splitlines()[-1])
    assert done[1].out == ""
    assert told["hosts"] == [[0, 1], [2, 3]]
    assert [pair["hosts"] for pair in told["pairs"]] == [[0, 1]]
    assert [pair["host"] for pair in told["inside"]] == [0, 1]
    cluster = Cluster.from_yaml(path)
    assert {kind.workers for kind in cluster.machines} == {RANKS}
    assert cluster.workers == 4
    assert len(told["races"]) == 24
    assert 0 < cluster.unfairness < 1
    assert cluster.link.bandwidth < 1.05 * 25e6 < cluster.memory_bandwidth  # what the card lets through, and no less
    inner = [(kind.inside or cluster.inside).bandwidth for kind in cluster.machines]
    assert min(inner) > 4 * 25e6
    slow = max((each for each in told["stragglers"] if each["slow"] == "step"), key=lambda each: each["factor"])
    assert slow["rank"] == 3
    assert "10.77.0.2" in slow["host"]
    assert 1.5 < slow["factor"] < 6
    assert cluster.durations(3, 0).speed == pytest.approx(1 / slow["factor"], rel=0.01)
    assert cluster.memory_of(3) == told["memory"][1] // RANKS // 10**6 * 10**6
    for kind in ("all_reduce", "all_gather", "broadcast"):
        curve = told["collectives"][kind]
        sizes = [size for size, _ in curve["points"]]
        assert sizes == [1 << power for power in range(10, 21, 2)]
        assert 0.5 < curve["predicted"][-1] / curve["points"][-1][1] < 2
    run = dure.train("digits-mlp", sync="bsp", on=str(path), steps=2, timing_only=True)
    assert run.summary()["workers"] == 4


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="workers counts the workers of this machine"):
        probe(workers=0)
    assert main(["probe", "no-such-job", "--out", str(tmp_path / "x.yaml")]) == 2
    assert "no job is called" in capsys.readouterr().err
    assert main(["probe", "--out", str(tmp_path / "no" / "x.yaml")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(("numel", "cost"), [(1 << 18, 1e-10), (1 << 26, 3e-10), (None, None)])
def test_the_cost_of_an_update_is_that_of_the_models_size(numel: int | None, cost: float | None) -> None:
    """Updates up to 4 MiB stay in the caches here."""
    sizes = [(1 << power, 1e-10 if power <= 22 else 3e-10) for power in (21, 22, 24, 26)]
    here = found([1e9]) | {"apply": [[(size, 1e-5 + size * each) for size, each in sizes]], "numel": numel}
    gamma = described(here, 1).gamma
    assert gamma == pytest.approx(cost, rel=0.05) if cost else 1e-10 < gamma < 3e-10
