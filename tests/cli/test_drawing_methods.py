"""Pictures of methods over time: their cells are what the methods' definitions say."""

import re
from itertools import pairwise

import pytest
from support.gantt_charts import picture_in

from dure.cli.drawing import COMPUTE, WAIT, WORKERS, Cell, MethodPicture
from dure.cli.main import main
from dure.report.gantt import svg, text
from dure.run.strategy import Strategy, catalogue

SLOW = f"worker {WORKERS - 1}"


def picture(strategy: str) -> MethodPicture:
    return MethodPicture.of(Strategy.parse(strategy), strategy)


def computations(drawn: MethodPicture) -> dict[str, list[Cell]]:
    return {name: [cell for cell in cells if cell.kind == COMPUTE] for name, cells in drawn.rows.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", sorted(catalogue("sync")))
def test_every_method_has_a_picture(method):
    drawn = picture(method)
    assert list(drawn.rows)[:WORKERS] == [f"worker {rank}" for rank in range(WORKERS)]
    for cells in drawn.rows.values():
        assert cells
        assert all(0 <= cell.start < cell.end for cell in cells)
        steps = [cell.step for cell in cells if cell.step is not None]
        assert steps == list(range(1, len(steps) + 1))
        computed = [cell for cell in cells if cell.kind == COMPUTE and not cell.aborted]
        if method != "asysvrg":  # the last one may not have ended
            assert all(cell.step is not None for cell in computed[:-1])
    shown = picture_in(svg(drawn.chart))
    assert shown.unit == "ms"
    for name, cells in drawn.rows.items():
        found = [(bar.start, bar.about.partition(":")[0].split(",")[0]) for bar in shown.rows[name]]
        kinds = [f"{cell.kind}{' in vain' if cell.aborted else ''}" for cell in cells]
        assert found == [(pytest.approx(cell.start, abs=1e-6), kind) for cell, kind in zip(cells, kinds, strict=True)]
        ends = [min(cell.end, drawn.seconds) for cell in cells if cell.message != "order"]
        assert [bar.end for bar in shown.rows[name] if "order" not in bar.about] == pytest.approx(ends, abs=1e-6)
    assert len(text(drawn.chart, 120).splitlines()) == len(drawn.rows)


def test_synchronous_workers_read_the_version_of_the_step():
    for cells in computations(picture("bsp ps")).values():
        assert [cell.version for cell in cells] == [str(step) for step in range(len(cells))]


def test_the_fast_workers_of_bsp_wait_for_the_slow_one():
    rows = picture("bsp").rows
    assert sum(cell.end - cell.start for cell in rows["worker 0"] if cell.kind == WAIT) > 0.04
    assert not [cell for cell in rows[SLOW] if cell.kind == WAIT]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_under_ssp_no_worker_leads_by_more_than_the_bound(bound):
    drawn = computations(picture(f"ssp:bound={bound}"))
    leads = [
        cell.step - 1 - sum(other.end <= cell.start for other in drawn[SLOW])
        for name, cells in drawn.items()
        for cell in cells
        if name != SLOW
    ]
    assert max(leads) == bound


def test_downpours_slow_worker_reads_what_others_will_have_changed():
    """While it computes, three workers of twice its speed push two gradients each: about six versions go by."""
    read = [int(cell.version) for cell in computations(picture("downpour"))[SLOW]]
    later = [after - before for before, after in pairwise(read)]
    assert all(3 <= each <= 8 for each in later), later


def test_backup_workers_compute_in_vain():
    drawn = computations(picture("backup"))
    assert all(cell.aborted for cell in drawn[SLOW][:-1])
    assert not any(cell.aborted for cell in drawn["worker 0"])


def test_local_models_have_no_version_of_a_server():
    assert {cell.version for cells in computations(picture("averaging:period=3")).values() for cell in cells} == {""}


def test_gradients_that_are_no_steps_have_no_number():
    """Of each inner step of AsySVRG the first gradient is the step, the second is that at the snapshot."""
    cells = [cell for cell in picture("asysvrg").rows["worker 0"] if cell.kind == COMPUTE]
    assert {cell.step is None for cell in cells} == {True, False}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_coordinator_commands_its_servers_between_evaluations(shards):
    """No worker begins a gradient meanwhile. A slow one may be at a portion that another has done before it."""
    drawn = picture(f"lbfgs ps:shards={shards}")
    rounds = drawn.rows["server 0"]
    assert {cell.message for cell in rounds} == {"order"}
    begun = sorted({cell.start for cells in computations(drawn).values() for cell in cells})
    assert not [start for start in begun for each in rounds if each.start < start < each.end]
    pauses = {sum(start <= each.start for start in begun) for each in rounds}
    assert len(pauses) >= 3, "before the first evaluation, and after the first two"
    assert re.findall(r"communicate, order: ", svg(drawn.chart)) == ["communicate, order: "] * len(rounds)
    assert text(drawn.chart, 120).splitlines()[-1].count("~") >= len(pauses)


def test_messages_to_servers_name_their_receivers():
    drawn = svg(picture("downpour ps:shards=2").chart)
    assert "communicate, push to servers 0 and 1: " in drawn
    assert "communicate, pull from servers 0 and 1: " in drawn
    assert ">exchanges messages with servers 0 and 1</text>" in drawn
    assert ">exchanges messages with servers 0 to 3</text>" in svg(picture("bsp ps:shards=4").chart)
    assert "server" not in svg(picture("bsp").chart)


def test_rows_are_in_the_order_of_ranks():
    names = list(picture("ssp ps:shards=12").rows)
    assert names == sorted(names, key=lambda name: (not name.startswith("worker"), int(name.split()[1])))


def test_a_partition_is_refused(capsys):
    assert main(["methods", "bsp gpipe:stages=2,micro=4", "--draw"]) == 2
    assert "leave it out, or draw it alone, as in dure methods gpipe:stages=2,micro=4 --draw" in capsys.readouterr().err


def test_a_drawing_is_written_and_shown(capsys, tmp_path):
    path = tmp_path / "ssp.svg"
    assert main(["methods", "ssp:bound=2", "--draw", str(path)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^worker \d \|.*\|$", shown, re.MULTILINE)) == WORKERS
    assert "virtual time" in shown
    assert path.read_text(encoding="utf-8").startswith("<svg")
