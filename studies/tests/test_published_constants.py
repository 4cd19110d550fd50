"""Constants of the model of accelerators and servers: their origins, the rows that some were chosen from, and scores
without these rows or without parts of the model."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from support.wording import raising

from dure.core import accelerator_cost, devices
from dure.errors import UsageError
from dure.partition import backward
from dure.run import step_shape
from dure.runtime.virtual import accelerators, buckets, server_software
from dure.runtime.virtual.accelerators import INSIDE, LIBRARIES, AcceleratorEngine
from dure.runtime.virtual.cluster import Cluster, ServerMachines
from dure_studies.published import study, variants
from dure_studies.published.constants import ALL_SOURCES, CHOSEN, chosen_from, fitted_from, used_by, without_rows
from dure_studies.published.rows import Source, published, read
from dure_studies.published.variants import ModelVariant, scored_figures

NCCL = "src/graph/tuning.cc of NCCL"
SHEET = "data sheets and usual measurements of links"
NO_MEASUREMENT = "units, counts and bounds of rounding"

ORIGINS: dict[ModuleType, dict[str, list[float]]] = {
    accelerator_cost: {
        NCCL: [1.9, 0.9, 28e-6, 50e-6],
        NO_MEASUREMENT: [4],  # bytes of an element
    },
    accelerators: {
        NCCL: [3.4e-6, 3.4e-6, 5.7e-6, 5.7e-6, 9.6e-6],
        SHEET: [120e9, 10e9, 5.5e9, 80, 130, 12e9, 10e-6],
        "usual results of nccl-tests": [0.88],
        "TCP: usual share, flow of a core, seconds of a hop": [0.9, 13e9, 40e-6],
        "defaults of the libraries": [25, 64, 64, 5e-3],
        "a guess: Horovod's negotiation": [10e-6],
        "Blom's approximation": [0.375, 0.25],
        NO_MEASUREMENT: [4, 8, 8, 20, 20, 20, 20],
        "chosen": [0.02, 0.10, 40e-6, 25e-6, 22e9, 22, 22],
    },
    buckets: {NO_MEASUREMENT: [1e-9]},
    server_software: {},
    devices: {"usual shares of peaks, and of a kernel's start": [6e-6, 0.75, 0.7, 0.45, 0.45, 0.45, 0.45]},
    backward: {"gradient, weight and momentum of a parameter": [5]},
    step_shape: {"data sheet of V100": [16.0]},
}
"""Every number above 2 or between the whole ones in the model's modules, but for bounds of fields, by its origin."""


def numbers(module: ModuleType) -> list[float]:
    """The numbers in a module that are no 0, 1 or 2 and no bound of a field."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    bounds = {
        id(part)
        for each in ast.walk(tree)
        if isinstance(each, ast.keyword) and each.arg in ("ge", "gt", "le", "lt")
        for part in ast.walk(each.value)
    }
    return [
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant) and type(each.value) in (int, float) and id(each) not in bounds
        if each.value not in (0, 1, 2)
    ]


@pytest.mark.parametrize("module", ORIGINS, ids=lambda module: module.__name__)
def test_every_number_of_the_model_has_an_origin(module: ModuleType) -> None:
    """A number that is added to the model needs a line in `ORIGINS`: with a source, or, if rows were in sight when it
    was chosen, as `chosen` and in `CHOSEN`."""
    stated = [number for some in ORIGINS[module].values() for number in some]
    assert Counter(numbers(module)) == Counter(stated)


def test_chosen_constants_are_those_in_force() -> None:
    engine = AcceleratorEngine()
    in_force = {
        "spread": engine.spread,
        "contention": engine.contention,
        "start": engine.start,
        "tensor": LIBRARIES["ddp"].tensor,
        "mesh": INSIDE["mesh"].bandwidth,
    }
    chosen = set(ORIGINS[accelerators]["chosen"]) - {22}  # links of a mesh by the bandwidth of one
    assert set(in_force.values()) == chosen
    described = [row.cluster or source.cluster for source in published() for row in source.rows]
    servers = [ServerMachines(**each["servers"]) for each in described if "servers" in each]
    assert len(servers) == 5  # of H1, and of the file of T
    (in_force["process"],) = {each.process for each in servers}
    assert {(each.threads, each.overlap) for each in servers} == {(32, True)}
    assert {name: each.value for name, each in CHOSEN.items() if each.value is not None} == in_force


def test_at_most_four_constants_are_fitted_and_all_name_the_rows_that_they_were_chosen_from() -> None:
    assert [name for name, each in CHOSEN.items() if each.fitted] == ["spread"]
    assert {name: "".join(each.rows) for name, each in CHOSEN.items() if not each.fitted} == {
        "contention": "H",
        "tick": "H",
        "start": "D",
        "tensor": "D",
        "mesh": "G",
        "process": "T",
        "threads": "T",
        "early pushes": "T",
        "early pulls": "T",
    }
    letters = {row.id.rstrip("0123456789") for source in published() for row in source.rows}
    assert set(ALL_SOURCES) <= letters


def test_a_prediction_names_the_rows_of_its_constants() -> None:
    horovod = Cluster(machines=[{"gpus": 4, "inside": {"kind": "pcie"}}], engine={"library": "horovod"})
    assert used_by(horovod) == ["spread", "contention", "start", "tick"]
    mesh = Cluster(machines=[{"gpus": 4, "inside": {"kind": "mesh", "bandwidth": "44 GB/s"}}])
    assert used_by(mesh) == ["spread", "contention", "start", "tensor", "mesh"]
    assert without_rows("mesh", mesh) == {"machines.inside.bandwidth": pytest.approx(50e9)}  # two links of 25 GB/s
    assert used_by(Cluster.uniform(4)) == []
    assert fitted_from(Cluster.uniform(4)) == ()
    assert fitted_from(horovod) == tuple(sorted(ALL_SOURCES))
    assert chosen_from("L") == []
    assert chosen_from("DT") == ["start", "tensor", "process"]


OWN = """
source: our laboratory
cluster:
  machines: [{count: 2, gpus: 2, inside: {kind: mesh, bandwidth: 0.5 GB/s}}]
  link: {bandwidth: 10 Gbit/s}
rows:
- {id: D1, what: AlexNet, class: A, figures: [{name: 16 GPUs, job: "alexnet:batch=512", one: 400, measured: 0.4}]}
"""
"""With the name of a scored figure."""


@pytest.fixture
def own(tmp_path: Path) -> Source:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return read(path)


@pytest.mark.parametrize("part", [part for part in variants.PARTS if part not in ("nothing", "software of servers")])
def test_each_part_of_the_model_changes_a_prediction_and_comes_back(own: Source, part: str) -> None:
    (figure,) = scored_figures([own])
    if part == "share of cards":  # which count where links inside hosts are no limit
        own.cluster["machines"][0]["inside"] = {"kind": "mesh"}
    usual = figure.predicted(ModelVariant())
    changed = figure.predicted(variants.PARTS[part])
    assert 0 < changed != pytest.approx(usual, rel=1e-6)
    assert figure.predicted(ModelVariant()) == usual
    faster = {"spread of ranks", "links inside hosts", "share of cards", "software of libraries", "starts and hops"}
    if part in faster | {"contention"}:
        assert changed > usual
    if part == "overlap":
        assert changed < usual


def test_constants_of_rows_take_their_values_without_them(own: Source) -> None:
    (figure,) = scored_figures([own])
    usual = figure.predicted(ModelVariant())
    for name in ("contention", "start", "tensor"):
        assert figure.predicted(ModelVariant(), [name]) > usual
    assert figure.predicted(ModelVariant(), ["process"]) == usual  # no servers there
    assert LIBRARIES["ddp"].tensor == 25e-6


def test_each_source_is_predicted_with_the_spread_of_the_others(own: Source) -> None:
    slower = own.model_copy(
        update={"rows": tuple(row.model_copy(update={"id": "H6", "figures": figures_at(row, 0.3)}) for row in own.rows)}
    )
    unscored = own.model_copy(update={"rows": tuple(row.model_copy(update={"id": "X1"}) for row in own.rows)})
    rows = variants.without_sources([own, unscored, slower])
    assert [row["left_out"] for row in rows] == ["D", "H", "each by the others"]
    assert [row["figures"] for row in rows] == [1, 1, 2]
    assert rows[0]["without"] == "start, tensor"
    assert rows[1]["without"] == "contention"
    assert rows[0]["spread"] == max(variants.GRID)  # the other source is slower than any prediction


def figures_at(row: object, measured: float) -> tuple[object, ...]:
    return tuple(
        each.model_copy(update={"name": "vgg16", "measured": measured})
        for each in row.figures  # type: ignore[attr-defined]
    )


def test_scores_without_parts_need_all_rows() -> None:
    with raising(UsageError, "--without parts scores all figures"):
        study.reproduce(without="parts", row="H6")
