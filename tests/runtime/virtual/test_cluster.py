"""Cluster files: what they mean, that they survive a round trip, and what a mistake in one says."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from support.wording import raising

import dure.runtime.virtual.cluster as module
from dure.core.validated import Validated
from dure.errors import ClusterError
from dure.runtime.virtual.accelerators import Card, InsideLink
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines, ServerMachines
from dure.runtime.virtual.compute import Constant, LogNormal, Pareto, ShiftedExponential, Trace

FULL = """
machines:
- count: 7
  compute: {distribution: lognormal, sigma: 0.3, seconds: 20 ms}
- count: 1
  speed: 0.2
  cores: 2
  link: {bandwidth: 100 Mbit/s, latency: 2 ms}
servers: {cores: 16, link: {bandwidth: 1.2 GB/s, latency: 0.05 ms}}
link: {bandwidth: 10 Gbit/s, latency: 0.1 ms}
alpha: 30 us
beta: 0.2 ns/B
gamma: 5e-10
memory_bandwidth: 12 GB/s
header: 80
field: 8
small: 1500
detection: 0.2 s
backward: 0.5
events:
- {at: 30 s, kind: crash, worker: 3}
- {at: 60 s, kind: join, worker: 3}
- {at: 45 s, kind: pause, worker: 1, for: 5 s}
- {at: 50 s, kind: slow, worker: 2, factor: 5, for: 20 s}
- {at: 1 s, kind: join, worker: 7}
"""


EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(written(tmp_path, FULL))
    assert cluster.workers == 8
    assert cluster.machines[0].compute == LogNormal(sigma=0.3, seconds=0.02)
    assert cluster.machines[1].compute == Constant()
    assert (cluster.alpha, cluster.beta, cluster.gamma, cluster.memory_bandwidth) == (3e-5, 2e-10, 5e-10, 1.2e10)
    assert cluster.events[2] == Event(at=45.0, kind="pause", worker=1, duration=5.0)
    assert cluster.absent == {7}
    assert cluster.durations(7, 0).speed == 0.2
    assert [cluster.cores_of(i) for i in (0, 6, 7, 8, 9)] == [4, 4, 2, 16, 16]
    assert [cluster.link_of(i).bandwidth for i in (0, 7, 8)] == [1.25e9, 1.25e7, 1.2e9]
    assert [cluster.latency(0, i) for i in (1, 7, 8)] == [1e-4, 2e-3, 1e-4]


def test_workers_are_numbered_machine_by_machine_and_servers_after_them() -> None:
    slow = Link(bandwidth=1e6, latency=1e-3)
    first = Machines(count=2, workers=2, cores=8, memory="1 GB", speed=[1, 2, 3, 4])
    second = Machines(workers=3, link=slow, inside=InsideLink(bandwidth=3e9))
    cluster = Cluster(machines=[first, second], servers=ServerMachines(cores=16))
    assert cluster.workers == 7
    assert [cluster.machine_of(place) for place in range(9)] == [0, 0, 1, 1, 2, 2, 2, 3, 4]
    assert [cluster.cores_of(machine) for machine in range(4)] == [8, 8, 4, 16]
    assert [cluster.link_of(machine) for machine in (1, 2, 3)] == [Link(), slow, Link()]
    assert [cluster.inside_of(machine).bandwidth for machine in (1, 2, 3)] == [12e9, 3e9, 12e9]
    assert [cluster.memory_of(worker) for worker in (0, 3, 4)] == [10**9, 10**9, None]
    assert [cluster.durations(worker, 0).speed for worker in range(6)] == [1, 2, 3, 4, 1, 1]


def test_a_worker_s_draws_do_not_depend_on_its_machine() -> None:
    compute = LogNormal(seconds=1.0)
    apart = Cluster(machines=[Machines(count=4, compute=compute, speed={"distribution": "lognormal"})])
    together = Cluster(machines=[Machines(count=2, workers=2, compute=compute, speed={"distribution": "lognormal"})])
    drawn = [[cluster.durations(worker, 3).draw(0.0) for worker in range(4)] for cluster in (apart, together)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4


@pytest.mark.parametrize(
    ("name", "homes", "inside"),
    [
        ("two_gpus_per_host", [0, 0, 1, 1, 2, 2, 3, 3], [6e9] * 4),
        ("two_and_four_gpus", [0, 0, 1, 1, 1, 1], [12e9, 24e9]),
    ],
)
def test_the_papers_hosts_are_described(name: str, homes: list[int], inside: list[float]) -> None:
    cluster = Cluster.from_yaml(EXAMPLES / f"{name}.yaml")
    assert [cluster.machine_of(worker) for worker in range(cluster.workers)] == homes
    assert [cluster.inside_of(machine).bandwidth for machine in range(len(inside))] == inside
    assert {cluster.link_of(machine).bandwidth for machine in range(len(inside))} == {1.25e9}
    assert cluster.memory_of(0) in (11e9, 24e9)


CLUSTERS = {
    "default": Cluster(),
    "uniform": Cluster.uniform(64, compute=Pareto(tail=2.1, seconds="1 s"), cores=1, alpha=0),
    "awkward numbers": Cluster(alpha=1 / 3, beta=1e-10 / 7, link=Link(bandwidth=1e9 / 7, latency=0.1 + 0.2)),
    "speeds": Cluster(
        machines=[
            Machines(count=2, speed=[1, 0.5], compute=ShiftedExponential(shift=0.1, flops_per_second="3 TFLOP/s")),
            Machines(count=3, speed={"distribution": "uniform", "low": 0.1}),
            Machines(count=3, speed={"distribution": "lognormal"}, compute=Trace(durations=("20 ms", 1 / 3))),
        ]
    ),
    "hosts": Cluster(
        machines=[
            Machines(count=2, workers=3, memory="24 GiB", speed=[1, 2, 3, 4, 5, 6]),
            Machines(workers=2, inside=InsideLink(bandwidth="6 GB/s", latency="5 us"), memory=1_000_000_007),
        ],
        inside=InsideLink(bandwidth="96 Gbit/s"),
    ),
    "software of servers": Cluster(
        machines=[Machines(workers=2, input="3000 samples/s"), Machines(input=1 / 3)],
        servers=ServerMachines(variable="50 us", process="1 GB/s", per_machine=True),
    ),
    "servers": Cluster(servers=ServerMachines(cores=2, link=Link(bandwidth="1 MB/s"))),
    "racks": Cluster(racks={"machines": 3, "oversubscription": 8 / 3, "latency": "3 us"}),
    "sites": Cluster(sites=[{"machines": 3}, {"machines": 5}], between={"bandwidth": "1 Gbit/s", "latency": 1 / 3}),
    "pairs of sites": Cluster(
        machines=[Machines(count=3)],
        sites=[{"machines": 1}] * 3,
        between=[{"sites": pair, "bandwidth": 1e9 / 7, "latency": "1 ms"} for pair in ([0, 1], [2, 1], [0, 2])],
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_round_trip_changes_nothing(name: str, tmp_path: Path) -> None:
    text = CLUSTERS[name].to_yaml()
    again = Cluster.from_yaml(written(tmp_path, text))
    assert again == CLUSTERS[name]
    assert again.to_yaml() == text


def test_a_full_file_survives(tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(written(tmp_path, FULL))
    text = cluster.to_yaml()
    assert "for: 5 s" in text
    assert "bandwidth: 100 Mbit/s" in text
    assert Cluster.from_yaml(written(tmp_path, text)) == cluster


def test_a_traced_cluster_no_longer_needs_its_file(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("1\n2\n")
    text = "machines: [{compute: {distribution: trace, file: steps.txt}}]"
    cluster = Cluster.from_yaml(written(tmp_path, text))
    (tmp_path / "steps.txt").unlink()
    assert Cluster.from_yaml(written(tmp_path, cluster.to_yaml())) == cluster


def test_a_cluster_does_not_change() -> None:
    with raising(ValidationError, "frozen"):
        Cluster().alpha = 0.0


EIGHT = "sites: [{machines: 3}, {machines: 5}]\nbetween: {bandwidth: 1 Gbit/s, latency: 30 ms}"
LINE = "bandwidth: 1 Gbit/s, latency: 30 ms"
PAIRS = "sites: [{machines: 3}, {machines: 4}, {machines: 1}]\n"

MISTAKES = {
    "servers: {variable: -1 ms}": ["servers.variable", "'-1 ms'", "not negative"],
    "servers: {process: 0}": ["servers.process", "0", "above zero"],
    "servers: {process: 1 samples/s}": ["servers.process", "'1 samples/s'", "GB/s"],
    "servers: {per_machine: 3}": ["servers.per_machine", "3", "true or false"],
    "hosts: [3]": ["hosts[0]", "3", "text"],
    "machines: [{gpus: 1.5}]": ["machines[0].gpus", "1.5", "whole number"],
    "machines: [{compute: null}]": ["machines[0].compute", "'None'", "constant"],
    "machines: [{speed: null}]": ["machines[0].speed", "'None'", "number, list"],
    "machines: [{input: 0}]": ["machines[0].input", "0", "above zero"],
    "machines: [{input: 3 GB/s}]": ["machines[0].input", "'3 GB/s'", "'3000 samples/s'"],
    "{host: {}, servers: {process: 1 GB/s}}": ["servers.process", "host", "leave it out"],
    "{host: {}, machines: [{}, {input: 10}]}": ["machines[1].input", "host", "leave it out"],
    "{servers: {per_machine: true}, events: [{at: 1, kind: crash, worker: 0}]}": ["events[0].kind", "per_machine"],
    "link: {bandwidth: -10 Gbit/s}": ["link.bandwidth", "'-10 Gbit/s'", "not negative", "'10 Gbit/s'"],
    "link: {bandwidth: 0}": ["link.bandwidth", "0", "above zero"],
    "link: {bandwidth: 10 Gbits}": ["link.bandwidth", "'10 Gbits'", "Gbit/s"],
    "link: {bandwith: 1 GB/s}": ["link", "'bandwith'", "did you mean 'bandwidth'"],
    "link: {latency: soon}": ["link.latency", "'soon'", "'20 ms'"],
    "link: 3": ["link", "3", "mapping"],
    "machnes: []": ["'machnes'", "did you mean 'machines'"],
    "machines: []": ["machines", "at least one"],
    "machines: 3": ["machines", "3", "a list"],
    "machines: [{count: 0}]": ["machines[0].count", "0", "at least 1"],
    "machines: [{}, {count: many}]": ["machines[1].count", "'many'", "whole number"],
    "machines: [{cores: 2.5}]": ["machines[0].cores", "2.5", "whole number"],
    "machines: [{speed: 0}]": ["machines[0].speed", "0", "above 0"],
    "machines: [{speed: .inf}]": ["machines[0].speed", "inf", "finite"],
    "machines: [{count: 3, speed: [1, 2]}]": ["machines[0].speed", "2 speeds for 3 workers"],
    "machines: [{count: 2, workers: 2, speed: [1, 2]}]": ["machines[0].speed", "2 speeds for 4 workers"],
    "machines: [{workers: 0}]": ["machines[0].workers", "0", "at least 1"],
    "machines: [{}, {workers: 2}]\nhost: {cores: 2}": ["machines[1].workers", "count"],
    "machines: [{memory: 0 GB}]": ["machines[0].memory", "'0 GB'", "above zero"],
    "machines: [{memory: 11 gigs}]": ["machines[0].memory", "'11 gigs'", "GiB"],
    "machines: [{memory: 0.3 B}]": ["machines[0].memory", "'0.3 B'", "whole number of bytes"],
    "inside: {bandwith: 6 GB/s}": ["inside", "'bandwith'", "did you mean 'bandwidth'"],
    "machines: [{count: 2, workers: 2}]\nevents: [{at: 1 s, kind: crash, worker: 4}]": ["no worker 4 among 4"],
    "machines: [{count: 2, speed: [1, -2]}]": ["machines[0].speed[1]", "-2", "above 0"],
    "machines: [{speed: {distribution: uniform, low: 3}}]": ["machines[0].speed", "low=3.0", "high=1.0"],
    "machines: [{compute: {distribution: lognorml}}]": [
        "compute.distribution",
        "'lognorml'",
        "did you mean 'lognormal'",
    ],
    "machines: [{compute: {distribution: pareto, tail: 1}}]": ["machines[0].compute.tail", "1", "above 1"],
    "machines: [{compute: {distribution: pareto, tial: 2}}]": ["machines[0].compute", "'tial'", "did you mean 'tail'"],
    "machines: [{compute: {seconds: 20 m}}]": ["machines[0].compute.seconds", "'20 m'", "ms"],
    "machines: [{compute: {seconds: 0 ms}}]": ["machines[0].compute.seconds", "'0 ms'", "above zero"],
    "machines: [{compute: {distribution: trace}}]": ["machines[0].compute.durations", "required"],
    "machines: [{compute: {distribution: trace, durations: [1, -1]}}]": ["compute.durations[1]", "-1", "negative"],
    "machines: [{compute: {distribution: trace, durations: [1], seconds: 2}}]": ["compute.seconds", "leave it out"],
    "machines: [{compute: {distribution: trace, file: none.txt}}]": ["machines[0].compute", "none.txt", "No such file"],
    "racks: {}": ["racks.machines", "required"],
    "racks: {machine: 4}": ["racks", "'machine'", "did you mean 'machines'"],
    "racks: {machines: 4, oversubscription: 0.25}": ["racks.oversubscription", "0.25", "at least 1"],
    "racks: {machines: 4, oversubscription: .nan}": ["racks.oversubscription", "nan", "at most"],
    "racks: {machines: 4}\nhost: {cores: 2}": ["racks", "`host` places all workers on one machine"],
    f"{EIGHT}\nhost: {{cores: 2}}": ["sites", "`host` places all workers on one machine"],
    EIGHT.partition("\n")[0]: ["between", "between: {bandwidth: 1 Gbit/s, latency: 30 ms}"],
    EIGHT.partition("\n")[2]: ["between", "there are none", "write sites"],
    f"machines: [{{count: 9}}]\n{EIGHT}": ["sites", "8 machines", "the cluster has 9"],
    "sites: [{machines: 8}]": ["sites", "is 1", "2 to 100"],
    f"sites: [{', '.join(['{machines: 1}'] * 101)}]": ["sites", "is 101", "2 to 100"],
    "sites: [{machines: 0}, {machines: 8}]": ["sites[0].machines", "0", "at least 1"],
    f"{EIGHT.partition('between')[0]}between: {{bandwith: 1, latency: 1}}": ["between", "did you mean 'bandwidth'"],
    f"{EIGHT.partition('between')[0]}between: {{bandwidth: 1}}": ["between.latency", "required"],
    f"{EIGHT.partition('between')[0]}between: 3": ["between", "3", "mapping"],
    f"{PAIRS}between: []": ["between", "[0, 1], [0, 2], [1, 2] is missing"],
    f"{PAIRS}between: [{{{LINE}, sites: [2, 0]}}]": ["between", "[0, 1], [1, 2] is missing", "each pair once"],
    f"{PAIRS}between: [{{{LINE}, sites: [2, 3]}}]": ["between[0].sites", "no site 3 among 3", "0 to 2"],
    f"{PAIRS}between: [{{{LINE}, sites: [1, 1]}}]": ["between[0].sites", "[1, 1]", "[0, 1]"],
    f"{PAIRS}between: [{{{LINE}, sites: [1]}}]": ["between[0].sites", "[1]", "[0, 1]"],
    f"{PAIRS}between: [{{{LINE}, sites: [0, 1]}}, {{{LINE}, sites: [1, 0]}}]": [
        "between[1].sites",
        "0 and 1 have a line",
    ],
    f"{PAIRS}between: [{{{LINE}}}]": ["between[0].sites", "required"],
    "alpha: -1": ["alpha", "-1", "not negative"],
    "events: [{kind: crash, worker: 1}]": ["events[0].at", "required"],
    "events: [{at: 1 s, kind: crsh, worker: 1}]": ["events[0].kind", "'crsh'", "did you mean 'crash'"],
    "events: [{at: 1 s, kind: crash, worker: 8}]": ["events[0].worker", "no worker 8", "0 to 7"],
    "events: [{at: 1 s, kind: crash, worker: -1}]": ["events[0].worker", "-1", "at least 0"],
    "events: [{at: 1 s, kind: pause, worker: 1}]": ["events[0].for", "for: 5 s"],
    "events: [{at: 1 s, kind: slow, worker: 1}]": ["events[0].factor", "factor: 5"],
    "events: [{at: 1 s, kind: slow, worker: 1, factor: -5}]": ["events[0].factor", "-5", "above 0"],
    "events: [{at: 1 s, kind: crash, worker: 1, for: 3 s}]": ["events[0].for", "join"],
    "events: [{at: 1 s, kind: pause, worker: 1, for: 3 s, factor: 2}]": ["events[0].factor", "slow"],
    "events: [{at: 2 s, kind: crash, worker: 1}, {at: 3 s, kind: slow, factor: 2, worker: 1}]": [
        "events[1]",
        "crashed",
    ],
    "events: [{at: 2 s, kind: slow, factor: 2, worker: 1}, {at: 3 s, kind: join, worker: 1}]": ["events[1]", "already"],
    "a: [": ["line 1", "YAML"],
    "machines: [{count: 2}]\nalpha: 1\nmachines: [{count: 3}]": ["line 3", '"machines" is there twice'],
    "link: {latency: 1 ms, latency: 2 ms}": ["line 1", '"latency" is there twice'],
    "link: !!python/object/apply:os.system [ls]": ["line 1", "YAML"],
    "- 1": ["mapping", "machines"],
    "1: 2": ["mapping", "machines"],
    "": ["mapping", "machines"],
    f"machines: [{{count: 1{'0' * 30}}}]": ("machines[0]", "100,000"),
    "machines: [{count: 1000000000}]": ("machines[0]", "1,000,000,000 workers", "at most 100,000"),
    "machines: [{count: 60000}, {count: 50000}]": ("110,000 workers", "at most 100,000"),
    f"machines: [{{cores: {'9' * 400}}}]": ("machines[0].cores", "characters left out", "at most 1,000,000"),
    f"host: {{cores: 1{'0' * 30}}}": ("host.cores", "at most 1,000,000"),
    f"header: 1{'0' * 30}": ("header", "at most 1,000,000,000,000"),
    f"link: {{bandwidth: {'9' * 400}}}": ("link.bandwidth", "characters left out", "finite"),
    f"link: {{bandwidth: {'9' * 5000}}}": ("line 1, column 19", "is no value of the type int"),
    "link: {latency: 1e999999999 s}": ("link.latency", "finite"),
    "link: {bandwidth: 1e-320}": ("link.bandwidth", "from 1e-30 to 1e+30"),
    "events: [{at: 1.0e+300, kind: crash, worker: 0}]": ("events[0].at", "from 1e-30 to 1e+30"),
    f"events: [{{at: 1, kind: crash, worker: {'9' * 400}}}]": ("events[0].worker", "characters left out"),
    "machines: [{speed: 1.0e+300}]": ("machines[0].speed", "from 1e-09 to 1e+09"),
    "machines: [{speed: {distribution: lognormal, sigma: 1.0e+300}}]": ("machines[0].speed.sigma", "at most 10"),
    "machines: [{compute: {distribution: lognormal, sigma: 1.0e+300}}]": ("machines[0].compute.sigma", "at most 10"),
    "machines: [{compute: {distribution: trace, file: /dev/zero}}]": ("/dev/zero", "no regular file"),
    f"events: [{{at: 1, worker: 0, kind: {'x' * 100_000}}}]": ("events[0].kind", "characters left out", "write one of"),
    f"machines: [{{compute: {{distribution: {'x' * 100_000}}}}}]": ("machines[0].compute", "characters left out"),
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:80])
def test_a_mistake_is_one_sentence(text: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(file)
    said = str(caught.value)
    for part in (str(file), *MISTAKES[text]):
        assert part in said
    assert "\n" not in said
    assert len(said) < 700
    assert said.endswith(".")
    assert ". " not in said.removeprefix(str(file))
    assert not any(word in said.lower() for word in ("traceback", "pydantic", "validation error", "errors.py"))
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with raising(ClusterError, "nowhere.yaml"):
        Cluster.from_yaml(tmp_path / "nowhere.yaml")
    with raising(ClusterError, "directory"):
        Cluster.from_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with raising(ClusterError, "text"):
        Cluster.from_yaml(tmp_path / "binary.yaml")


def test_the_bounds_leave_room() -> None:
    late = {"at": 1e9, "kind": "crash", "worker": 99_999}
    cluster = Cluster(machines=({"count": 50_000}, {"count": 1000, "workers": 50}), events=(late,))
    assert cluster.workers == 100_000
    assert cluster.machine_of(99_999) == 50_999


def test_python_says_the_same_as_a_file() -> None:
    with raising(ClusterError, "-1 B/s"):
        Cluster(machines=[{}, {"link": {"bandwidth": "-1 B/s"}}])
    with raising(ClusterError, "-1 B/s"):
        Link(bandwidth="-1 B/s")
    with raising(ClusterError, "0"):
        Cluster.uniform(workers=0)


def test_the_example_in_the_docstring_is_a_cluster(tmp_path: Path) -> None:
    assert module.__doc__ is not None
    example = module.__doc__.split("\n\n")[1]
    cluster = Cluster.from_yaml(written(tmp_path, example))
    assert cluster.workers == 8
    assert len(cluster.events) == 4


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cluster-file.md"


def test_the_files_of_the_page_are_clusters(tmp_path: Path) -> None:
    files = re.findall(
        r"^```\{code-block\} yaml\n:caption: [^\n]*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    clusters = [Cluster.from_yaml(written(tmp_path, text)) for text in files]
    assert [cluster.workers for cluster in clusters] == [4, 8, 32, 48, 2, 8]


def models(hint: object) -> list[type[Validated]]:
    """The models in a type."""
    if isinstance(hint, type) and issubclass(hint, Validated):
        return [hint]
    return [model for part in get_args(hint) for model in models(part)]


def test_the_page_has_a_table_of_every_mapping() -> None:
    found: set[type[Validated]] = {Cluster}
    left = [*found]
    while left:
        inner = [model for field in left.pop().model_fields.values() for model in models(field.annotation)]
        left += [model for model in inner if model not in found]
        found.update(inner)
    told: set[type[Validated]] = {Cluster}
    for path in re.findall(r"^```\{cluster-keys\} (\S+)$", PAGE.read_text(), re.MULTILINE):
        kinds: list[type[Validated]] = [Cluster]
        for step in path.split("."):
            kinds = models(next(kind.model_fields[step] for kind in kinds if step in kind.model_fields).annotation)
        told.update(kinds)
    assert "```{cluster-keys}\n" in PAGE.read_text()
    assert told == found
    for model in found:
        assert undocumented(model) == []


def undocumented(model: type[Validated]) -> list[str]:
    """The fields of a model without a text behind them, which the page prints."""
    missing = []
    for base in model.__mro__[: model.__mro__.index(Validated)]:
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for line, text in itertools.zip_longest(definition.body, definition.body[1:]):
            if isinstance(line, ast.AnnAssign) and not (
                isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            ):
                missing.append(f"{base.__name__}.{ast.unparse(line.target)}")
    return missing


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        (
            "machines: [{count: 2}, {speed: 0.4}]",
            ["20 GFLOP/s", "200 us of overhead", "10 Gbit/s", "latency of 100 us"],
        ),
        ("machines: [{compute: {flops_per_second: 5 GFLOP/s}}]\nlink: {bandwidth: 1 Gbit/s}", ["200 us", "latency"]),
        ("machines: [{compute: {seconds: 10 ms}}]\nlink: {bandwidth: 1 Gbit/s, latency: 1 ms}", []),
        ("machines: [{compute: {seconds: 10 ms}, link: {bandwidth: 1 Gbit/s, latency: 1 ms}}, {}]", ["20 GFLOP/s"]),
    ],
    ids=["nothing described", "speed and bandwidth", "all", "one machine of two"],
)
def test_a_description_by_hand_states_what_is_assumed_and_that_nothing_was_checked(tmp_path, text, assumed):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    said = Cluster.from_yaml(path).basis()
    assert "How wrong the seconds are: not checked for these machines" in said
    assert "\n" not in said
    path.write_text(Cluster.from_yaml(path).to_yaml())
    assert Cluster.from_yaml(path).basis() == said, "the record of a run has another basis when it is resumed"
    for each in assumed:
        assert said.count(each) == 1
    if not assumed:
        assert said.startswith("All speeds and links are as described.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "machines: [{count: 2, gpus: 4, compute: {seconds: 10 ms}}]\nlink: {bandwidth: 25 Gbit/s}",
            "12 GB/s between the GPUs of a machine, one network card for each machine, RDMA uses 88 % of a card",
        ),
        (
            "machines: [{count: 2, gpus: 4, compute: {seconds: 10 ms}, inside: {kind: mesh}, card: {transport: tcp}}]\n"
            "link: {bandwidth: 25 Gbit/s}",
            "22 GB/s by each link of the mesh between the GPUs of a machine, one network card for each machine, "
            "TCP uses 90 % of a card, at most 13 Gbit/s of a card by TCP",
        ),
        (
            "machines: [{gpus: 4, compute: {seconds: 10 ms}, inside: {kind: switch}}]",
            "120 GB/s between the GPUs of a machine",
        ),
        (
            "machines: [{count: 2, gpus: 1, compute: {seconds: 1 ms}, card: {count: 1, share: 0.88}}]\n"
            "link: {bandwidth: 1 GB/s}",
            "",
        ),
        (
            "machines: [{count: 2, gpus: 1, compute: {seconds: 1 ms}, card: {count: 1}}]\nlink: {bandwidth: 10 Gbit/s}",
            "RDMA uses 88 % of a card",
        ),
        (
            "machines: [{gpus: 8, gpu: v100-sxm2-16gb}]",
            "the catalogue's figures of v100-sxm2-16gb, 22 GB/s by each link of the mesh between the GPUs of a machine",
        ),
    ],
    ids=[
        "all by default",
        "mesh and TCP",
        "one machine",
        "defaults that are stated",
        "one default",
        "of the catalogue",
    ],
)
def test_assumed_links_of_gpus_are_stated(tmp_path, text, said):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    basis = Cluster.from_yaml(path).basis()
    assert basis.startswith(f"Assumed by default: {said}. " if said else "All speeds and links are as described. ")
    assert "dure probe" not in basis, "a probe measures CPUs"
    path.write_text(Cluster.from_yaml(path).to_yaml())
    assert Cluster.from_yaml(path).basis() == basis, "the record of a run has another basis when it is resumed"


def test_one_machine_of_gpus_is_described_without_its_link():
    assert Cluster(machines=[{"gpus": 8}]).about() == "1 machine with 8 GPUs"
    assert Cluster(machines=[{"gpus": 8, "count": 2}]).about() == "2 machines with 16 GPUs, links of 10 Gbit/s"


def test_a_measured_description_assumes_nothing():
    said = Cluster(machines=[{"compute": {"seconds": "10 ms"}}], hosts=("vm",)).basis()
    assert "Assumed" not in said
    assert "How wrong the seconds are on vm" in said


def test_a_copy_has_the_properties_of_its_own_values():
    few = Cluster.uniform(2)
    assert (few.workers, few.machine_of(1)) == (2, 1)
    many = few.model_copy(update={"machines": (Machines(count=5),)})
    assert (many.workers, many.machine_of(4)) == (5, 4)
    with raising(ClusterError, "card"):
        few.model_copy(update={"card": Card(count=2)})


@pytest.mark.parametrize(
    ("gpu", "said", "bandwidth", "latency"),
    [
        ("a100-sxm4-40gb", {}, 230e9, 3.4e-6),
        ("a100-sxm4-40gb", {"bandwidth": "12 GB/s", "latency": "10 us"}, 12e9, 10e-6),  # those that count by default
        ("a100-sxm4-40gb", {"latency": "5 us"}, 230e9, 5e-6),
        ("a100-sxm4-40gb", {"kind": "switch"}, 230e9, 3.4e-6),
        ("a100-pcie-40gb", {"kind": "pcie-host"}, 11e9, 5.7e-6),
        ("a100-pcie-40gb", {"kind": "pcie", "bandwidth": "10 GB/s"}, 10e9, 5.7e-6),
    ],
)
def test_what_is_stated_of_links_inside_counts_and_the_rest_is_that_of_the_device(
    gpu: str, said: dict[str, str], bandwidth: float, latency: float
) -> None:
    machines = {"count": 2, "gpus": 4, "gpu": gpu}
    for given in ({"machines": [machines], "inside": said}, {"machines": [{**machines, "inside": said}]}):
        found = Cluster(**given).inside_of(0)
        assert (found.bandwidth, found.latency) == (bandwidth, latency)
