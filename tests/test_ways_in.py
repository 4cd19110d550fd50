"""The table of the ways into dure, in `docs/start/ways.md`: cells that name members name those that the code admits."""

import re
from pathlib import Path

import pytest
import torch

import dure
from dure.cli.methods import members
from dure.core.catalogue import load
from dure.errors import StrategyError, UsageError
from dure.run.strategy import catalogue, make
from dure.sync.base import traits_of
from dure.topology.base import topology_of

PAGE = Path(__file__).parents[1] / "docs" / "start" / "ways.md"
ATTACH, HOOK, INTEGRATIONS, JOB = range(4)
TOPOLOGIES = {name: topology_of(load(place)) for name, place in catalogue("topology").items()}


def rows():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {name: columns for name, *columns in cells}


ROWS = rows()


def named(row, way):
    return re.findall(r"`([^`]+)`", ROWS[row][way])


def texts():
    """Every method, and every method with one parameter that is a word and not the default."""
    for row in members():
        if row["axis"] == "sync":
            yield row["name"]
            for each in row["parameters"]:
                for value in each["type"].split("|"):
                    yield f"{row['name']}:{each['name']}={value}"


def refused():
    """The methods that do not run in a loop; one that never runs without its parameters."""
    found = []
    for text in texts():
        if text.partition(":")[0] in found:
            continue
        try:
            method = make(text)
        except StrategyError:  # the type of a number
            continue
        if traits_of(method).reasons.loop:
            found.append(text)
    return found


def attached(**strategy):
    model = torch.nn.Linear(3, 1)
    return dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **strategy)


def test_the_table_has_all_rows_for_each_way():
    assert {len(cells) for cells in ROWS.values()} == {4}
    assert all(all(cells) for name, cells in ROWS.items() if name)


def test_it_lists_the_methods_that_do_not_run_in_a_loop():
    assert sorted(named("methods", ATTACH)) == sorted(refused())


@pytest.mark.parametrize("text", named("methods", ATTACH))
def test_these_methods_are_refused(text):
    with pytest.raises(UsageError, match="does not run"):
        attached(sync=text)


def test_it_lists_the_topologies():
    assert named("topologies", ATTACH) == [name for name, kind in TOPOLOGIES.items() if not kind.no_loop]
    assert named("topologies", JOB) == list(TOPOLOGIES)


def test_it_lists_the_topologies_whose_number_of_workers_may_change():
    wanted = [name for name, kind in TOPOLOGIES.items() if not kind.needs_everybody]
    assert [name for name in named("another number of ranks", JOB) if name in TOPOLOGIES] == wanted


def test_it_lists_the_codecs_that_are_refused_over_servers():
    _, *votes = named("codecs", ATTACH)
    assert votes == [name for name in catalogue("codec") if make(name).vote() is not None]
    for codec in votes:
        with pytest.raises(UsageError, match="over collectives"):
            attached(sync="bsp", topology="ps", codec=codec)


@pytest.mark.parametrize("codec", catalogue("codec"))
def test_a_hook_takes_every_codec(codec):
    assert dure.hook(codec) is not None
    assert ROWS["codecs"][HOOK] == "all"


def test_a_loop_has_the_whole_model():
    assert named("partitions", ATTACH) == ["none"]
    for partition in set(catalogue("partition")) - {"none"}:
        with pytest.raises((UsageError, StrategyError)):
            attached(sync="bsp", partition=partition)


def has_state(**strategy):
    with attached(**strategy) as replica:
        try:
            replica.state_dict()
        except UsageError:
            assert not replica.keeps_state
            return False
        assert replica.keeps_state
        return True


def test_it_lists_the_methods_that_go_on_from_a_state():
    admitted = catalogue("sync").keys() - named("methods", ATTACH)
    ways = {
        name: traits_of(load(catalogue("sync")[name])()).topologies for name in catalogue("sync") if name in admitted
    }
    keeping = [
        name for name, found in ways.items() if "collective" in found and has_state(sync=name, topology="collective")
    ]
    assert named("resumes exactly", ATTACH) == [*keeping, "collective"]
    assert not any(has_state(sync=name, topology="gossip") for name, found in ways.items() if "gossip" in found)
