"""Dense gradients among the workers, rows through servers: equal to everything by one way, and cheaper."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from oracles.test_resume import both, check_every_stop
from support import row_jobs
from support.nodes import World
from support.row_jobs import ROWS, WIDTH, bags, rows_of
from support.runs import local, resolved, virtual
from support.wording import raising

import dure
from dure.core.collective_cost import Path as Link
from dure.core.collective_cost import ring_all_reduce
from dure.core.node import Address
from dure.core.vectors import size
from dure.errors import Refused, StrategyError, UsageError
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.optimizer import FlatOptimizer, OptimizerSpec, RangesOptimizer, RowOptimizer
from dure.job.overlap import Overlap
from dure.job.replica import Layer, Replica
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Constant
from dure.topology.hybrid.choice import Hybrid
from dure.topology.hybrid.placement import ClusterShape, Use, decide, measure
from dure.topology.hybrid.topology import RowShard, added

FILE = row_jobs.__file__
OTHERS = ["bsp ps", "bsp ps:shards=3,colocated=true"]
HYBRIDS = [
    "bsp hybrid",
    "bsp hybrid:servers=none",
    "bsp hybrid:servers=all,shards=3",
    "bsp hybrid:servers=table.weight,shards=30",
    "bsp hybrid:servers=shift,shards=2,colocated=false",
    "bsp hybrid:servers=all,shards=30",
]


# ---- equal to all of it around the ring, and to all of it over servers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", OTHERS + HYBRIDS)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (4, 2, 1, 1)])
def test_every_way_gives_the_same_bits(strategy, sizes):
    """Half the loss's rates are powers of two and so are the workers' shares: sums are exact in any order."""
    around, through = (virtual(bags(), s, workers=4, batch_sizes=sizes, steps=5) for s in ("bsp collective", strategy))
    assert torch.equal(around.params, through.params)
    assert not torch.equal(around.params, around.setup.model.params)
    assert around.rows[-1]["loss"] == through.rows[-1]["loss"]


def test_rows_on_the_way_are_those_of_all_reduce():
    around, through = (virtual(bags(), s, workers=4, steps=9, eval_every=3) for s in ("bsp collective", "bsp hybrid"))
    for key in ("step", "updates", "loss"):
        assert [row[key] for row in around.rows] == [row[key] for row in through.rows], key
    assert len(around.rows) == 3


def test_adagrad_steps_the_rows_that_were_touched():
    around, through = (
        virtual(bags(optimizer="adagrad"), s, workers=3, steps=9) for s in ("bsp", "bsp hybrid:shards=2")
    )
    assert float((around.params - through.params).abs().max()) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp hybrid", "bsp hybrid:servers=all,shards=3"])
def test_on_processes_it_is_the_same(strategy, fork_server):
    options = {"workers": 2, "steps": 7, "eval_every": 3}
    real = local(f"{FILE}:bags", strategy, fork_server=fork_server, **options)
    modelled = virtual(f"{FILE}:bags", strategy, **options)
    assert float((real.params - modelled.params).abs().max()) < 1e-12
    assert [row["step"] for row in real.rows] == [row["step"] for row in modelled.rows] == [3, 6, 7]
    assert [row["updates"] for row in real.rows] == [row["updates"] for row in modelled.rows] == [6, 12, 14]
    for ours, theirs in zip(real.rows, modelled.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    for key in ("samples", "updates_applied"):
        assert real.summary[key] == modelled.summary[key]
    servers = modelled.setup.topology.servers
    assert [real.summary["per_shard"][f"server {s}"]["applied"] for s in range(servers)] == [7] * servers


def test_a_run_goes_on_bit_for_bit(tmp_path: Path):
    cluster = Cluster.uniform(3)
    check_every_stop(f"{FILE}:bags", tmp_path, cluster, strategy="bsp hybrid:shards=2", optimizer="adagrad", steps=18)


def test_checkpoints_change_nothing(tmp_path: Path):
    """All parts of a virtual run begin anew at a checkpoint, so each of them needs the squares that its tables had."""
    options = {"strategy": "bsp hybrid:shards=2", "on": Cluster.uniform(3), "optimizer": "adagrad", "steps": 8}
    without, with_them = both(tmp_path, f"{FILE}:bags", **options)
    assert with_them["params_sha256"] == without["params_sha256"]


# ---- bytes


def expected_bytes(setup, rank: int, steps: int) -> tuple[int, int]:
    """Sent and received by a worker: the ring's part, and rows of WIDTH numbers of 8 bytes with 4 of their own."""
    sampler = setup.data.draw_samplers()[rank]
    batches = [setup.job.train.inputs[sampler.next()] for _ in range(steps)]
    rows = sum(len(batch.unique()) for batch in batches)
    ring = ring_all_reduce(WIDTH, setup.workers, Link(0, 0, 1), 8)
    row = WIDTH * 8
    return steps * ring.sent[rank] + rows * (row + 4 + 4), steps * ring.received[rank] + rows * row


@pytest.mark.parametrize(("on", "shards"), [("virtual", 1), ("virtual", 3), ("local", 3)])
def test_bytes_are_those_of_the_rows_and_their_numbers(on, shards, fork_server):
    run = virtual if on == "virtual" else partial(local, fork_server=fork_server)
    finished = run(f"{FILE}:bags", f"bsp hybrid:servers=table.weight,shards={shards}", workers=2, steps=4)
    for rank in range(2):
        counted = finished.summary["per_worker"][f"worker {rank}"]
        assert (counted["bytes_sent"], counted["bytes_received"]) == expected_bytes(finished.setup, rank, 4)


def layer(rows: int = 100, width: int = 8) -> Layer:
    return Layer("table", 0, rows * width, (rows, width))


@pytest.mark.parametrize("workers", [2, 3, 8, 48])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_costs_are_those_of_the_paper_and_the_numbers(workers, share):
    """Per machine in and out: servers 4 a V (N-1)/N, ring 4 V (N-1)/N, all_gather 2 a V (N-1); numbers beside it."""
    rows, nbytes, n = 100 * share, 100 * 8 * 4, workers
    cost = Use(layer(), rows).cost(ClusterShape(n, n, True, 4))
    numbers = 4 * rows
    assert cost.servers == pytest.approx(4 * (share * nbytes + numbers) * (n - 1) / n)
    assert cost.all_reduce == pytest.approx(4 * nbytes * (n - 1) / n)
    assert cost.all_gather == pytest.approx(2 * (share * nbytes + numbers) * (n - 1))
    assert Use(layer(), None).cost(ClusterShape(n, n, True, 4)).servers == pytest.approx(cost.all_reduce)


@pytest.mark.parametrize(("workers", "shards"), [(2, 2), (8, 8), (8, 1), (8, 2), (48, 12)])
@pytest.mark.parametrize("colocated", [True, False])
def test_the_decision_flips_where_the_rule_says(workers, shards, colocated):
    row, rows = 8 * 4, 1000
    exchanged = 1 + (workers - 2) / shards if colocated else max(1, workers / shards)
    flip = 2 * (workers - 1) / workers / exchanged * row / (row + 4)
    place = ClusterShape(workers, shards, colocated, 4)
    for share, held in ((flip * 0.999, True), (flip * 1.001, False)):
        use = Use(layer(rows), rows * share)
        assert use.by_servers(place) is held
        assert decide(Hybrid(), [use], place).parts["tables"] == ([0] if held else [])


def test_shares_are_measured_on_the_first_batches():
    layers = [Layer("table", 0, 20, (10, 2)), Layer("shift", 20, 22, (2,))]
    steps = [[torch.tensor([[1, 1]]), torch.tensor([[1, 2]])], [torch.tensor([[3, 4]]), torch.tensor([[5, 6]])]]
    table, shift = measure(layers, lambda inputs: {"table": inputs}, steps)
    assert (table.rows, table.union) == (7 / 4, 3.0)
    assert shift.rows is None


def test_the_record_says_what_was_decided_and_why():
    said = virtual(bags(), "bsp hybrid", workers=4, steps=1).summary["hybrid"]
    assert (said["table.weight"]["by"], said["shift"]["by"]) == ("servers", "all_reduce")
    assert 0.1 < said["table.weight"]["share_read"] < said["table.weight"]["share_read_by_all"] < 1
    assert said["table.weight"]["nbytes"]["servers"] < said["table.weight"]["nbytes"]["all_reduce"]
    assert virtual(bags(rows=None), "bsp hybrid", workers=4, steps=1).setup.topology.servers == 0


def test_what_all_reduce_sends_while_it_is_computed_is_what_servers_do_not_hold():
    for strategy in ("bsp hybrid", "bsp hybrid:servers=none", "bsp hybrid:servers=shift"):
        setup, _ = resolved(bags(), strategy, on="virtual", workers=4)
        (first, *_) = setup.topology.rows.ring
        assert setup.topology.slices == [(size(setup.topology.rows.ring), first[0] / setup.replica.numel)]


def test_a_gradient_is_not_there_before_it_is_computed():
    """What all_reduce sends is summed before backward comes to what servers hold."""
    cluster = Cluster.uniform(2, compute=Constant(seconds=1.0))
    run = virtual(bags(), "bsp hybrid:servers=shift", cluster, steps=3)
    assert run.seconds == pytest.approx(3.0, rel=0.01)


# ---- parts


@pytest.mark.parametrize("spec", [OptimizerSpec("sgd", lr=0.1), OptimizerSpec("adagrad", lr=0.1)], ids=str)
def test_a_step_of_some_rows_is_one_of_all_with_zeros(spec):
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(9, 4, generator=draw)
    whole, some = FlatOptimizer(spec, 36), RowOptimizer(spec, table)
    expected = table.reshape(-1).clone()
    for _ in range(3):
        rows = torch.randperm(9, generator=draw)[:4].sort().values
        gradient = torch.zeros(9, 4)
        gradient[rows] = torch.randn(4, 4, generator=draw)
        whole.apply(expected, gradient.reshape(-1), expected)
        some.apply(table, rows, gradient[rows])
    assert torch.equal(table.reshape(-1), expected)


def test_an_optimizer_of_ranges_leaves_the_rest_alone():
    spec = OptimizerSpec("adam", lr=0.1)
    ours, whole = RangesOptimizer(spec, [(1, 3), (4, 5)], torch.float32), FlatOptimizer(spec, 5)
    values, expected, gradient = torch.ones(5), torch.ones(5), torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0])
    for _ in range(2):
        ours.apply(values, gradient[[1, 2, 4]], values)
        whole.apply(expected, gradient, expected)
    again = RangesOptimizer(spec, [(1, 3), (4, 5)], torch.float32)
    again.restore(ours.state())
    again.apply(values, gradient[[1, 2, 4]], values)
    whole.apply(expected, gradient, expected)
    assert torch.equal(values[[1, 2, 4]], expected[[1, 2, 4]])
    assert values[[0, 3]].tolist() == [1, 1]


def test_rows_are_added_in_the_order_of_the_workers():
    one, tiny = torch.ones(1, 1), torch.full((1, 1), 2.0**-24)
    row = torch.tensor([3])
    assert added([(row, one), (row, tiny), (row, tiny)])[1].item() == 1.0
    assert added([(row, tiny), (row, tiny), (row, one)])[1].item() > 1.0


def test_a_gradient_is_handed_over_in_parts():
    job = bags()
    gradient_engine = GradientEngine(job, exact=True)
    inputs, targets = torch.tensor([[4, 4, 2]]), torch.zeros(1, WIDTH, dtype=torch.float64)
    values = gradient_engine.initial_values(0)
    work = GradientWork(0, 0, values, inputs, targets, seed=0, flops=0.0)
    whole = gradient_engine.one(work).values
    gradient_engine.split_off([1], [0])
    parts = gradient_engine.one(work)
    (rows, found), table = parts.for_servers.rows[0], whole[WIDTH:].view(ROWS, WIDTH)
    assert rows.tolist() == [2, 4]
    assert torch.equal(found, table[rows])
    assert table.count_nonzero() == found.count_nonzero()
    assert torch.equal(parts.for_servers.whole, whole[:WIDTH])
    assert parts.values.numel() == 0
    half = parts.scaled(0.5).for_servers
    assert torch.equal(half.rows[0][1], table[rows] / 2)


def test_slices_leave_out_what_servers_hold():
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(4)))
    assert Overlap(Replica(module), 1, without={1}).slices == [(12, 16), (8, 12), (0, 4)]
    assert Overlap(Replica(module), 1000, without={0, 3}).slices == [(4, 12)]
    assert Overlap(Replica(module), 1000, without={0, 1, 2, 3}).slices == []


def shard(world: World, number: int = 0, shards: int = 2, workers: int = 2) -> RowShard:
    plan = decide(
        Hybrid(("all",)),
        [Use(layer(5, 2), 2.0), Use(Layer("b", 10, 13, (3,)), None)],
        ClusterShape(workers, shards, True, 4),
    )
    part = plan.part(number)
    return RowShard(world.node("server 0"), part, part.taken_from(torch.arange(13.0)), OptimizerSpec(lr=1.0), workers)


def test_a_server_holds_every_nth_row_and_its_stretch_of_the_rest():
    world = World()
    first, second = shard(world, 0), shard(world, 1)
    assert first.values.tolist() == [10, 11, 0, 1, 4, 5, 8, 9]
    assert second.values.tolist() == [12, 2, 3, 6, 7]
    flat = torch.zeros(13)
    for each in (first, second):
        each.part.put_into(flat, each.values)
    assert torch.equal(flat, torch.arange(13.0))


def numbers(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_a_server_numbers_the_rows_of_tables_with_more_than_2_to_the_24_rows():
    rows = 2**25 + 4
    uses = [Use(Layer(name, start, start + rows, (rows, 1)), 2.0) for name, start in (("a", 0), ("b", rows))]
    second = decide(Hybrid(("all",)), uses, ClusterShape(2, 2, True, 4)).part(1)
    asked = [torch.tensor([1, 2**25 + 3]), torch.tensor([2**24 + 1, 2**24 + 3])]
    assert second.numbered(asked).tolist() == [0, 2**24 + 1, rows // 2 + 2**23, rows // 2 + 2**23 + 1]


def test_who_asks_for_a_version_that_is_being_made_gets_it():
    """The question comes when all have pushed and the step is under way, but before its first turn."""
    world = World()
    server = shard(world)
    server.node.serve("shard", server)
    place = Address("server 0", "shard")
    into = (torch.zeros(2), torch.zeros(2))

    async def role(rank: int) -> None:
        node = world.node(f"worker {rank}")
        update = torch.ones(2), numbers(1), torch.ones(2)
        pushed = node.call(place, "push", *update, worker=rank, version=0, lr=None)
        if rank:
            await node.call(place, "read", numbers(1), into=into, version=1)
        await pushed

    tasks = [world.spawn(role(rank), f"worker {rank}") for rank in range(2)]
    world.run_ready()
    for channel in world.choices():
        while world.channels[channel]:
            world.channels[channel].popleft()()  # all arrive before anything else happens
    world.settle()
    assert all(task.done for task in tasks)
    assert [each.tolist() for each in into] == [[8, 9], [2, 3]]


@pytest.mark.parametrize(
    ("version", "row_numbers", "values", "said"),
    [
        (1, (0,), (1.0, 1.0), "step 1,"),
        (0, (3,), (1.0, 1.0), "its 3"),
        (0, (1, 0), (1.0, 1.0, 1.0, 1.0), "order"),
        (0, (-1,), (1.0, 1.0), "its 3"),
        (0, (0,), (1.0,), "has 1"),
        (0, (0,), (math.nan, 1.0), "finite"),
    ],
)
def test_a_server_refuses_what_would_spoil_it(version, row_numbers, values, said):
    world = World()
    server = shard(world)
    server.node.serve("shard", server)
    call = world.node("worker 0").call
    update = torch.ones(2), numbers(*row_numbers), torch.tensor(values)

    async def push() -> None:
        await call(Address("server 0", "shard"), "push", *update, worker=0, version=version, lr=None)

    with raising(Refused, said):
        world.run(push())
    assert server.refused == 1


@pytest.mark.parametrize("place", ["whole", "rows"])
def test_a_server_refuses_a_gradient_that_is_not_finite_wherever_it_is(place):
    world = World()
    server = shard(world)
    server.node.serve("shard", server)
    before = server.values.clone()
    update = {"whole": torch.ones(2), "numbers": numbers(1), "rows": torch.ones(2)}
    update[place][1] = math.nan

    async def push() -> None:
        call = world.node("worker 0").call
        await call(Address("server 0", "shard"), "push", *update.values(), worker=0, version=0, lr=None)

    with raising(Refused, "worker 0 is not finite"):
        world.run(push())
    assert (server.refused, server.version) == (1, 0)
    assert torch.equal(server.values, before)


# ---- what is refused


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("bsp hybrid", {"optimizer": "momentum"}, "touched"),
        ("bsp hybrid", {"optimizer": "sgd:weight_decay=0.1"}, "gradient"),
        ("bsp hybrid:servers=tabel.weight", {}, "parameter"),
        ("bsp hybrid:servers=auto/shift", {}, "servers=auto"),
        ("bsp hybrid:shards=0", {}, "1"),
        ("ssp hybrid", {}, "hybrid"),
        ("averaging hybrid", {}, "averaging"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(strategy, options, said):
    with raising(StrategyError, said):
        resolved(bags(), strategy, on="virtual", workers=4, **options)


def test_without_rows_any_optimizer_will_do():
    options = {"workers": 2, "steps": 2, "optimizer": "adam", "dtype": "float64"}
    over_servers = virtual(bags(), "bsp hybrid:servers=shift", **options)
    assert (over_servers.params - virtual(bags(), "bsp", **options).params).abs().max() < 1e-12


def test_a_run_without_data_is_refused():
    with raising(UsageError, "timing_only"):
        resolved(bags(), "bsp hybrid", on="virtual", workers=4, timing_only=True)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda inputs: {"tabel": inputs}, "parameters"),
        (lambda inputs: {"table.weight": inputs + 20}, "0 to 22"),
        (lambda inputs: {"table.weight": inputs.int()}, "torch.int32"),
    ],
)
def test_rows_that_are_none_are_refused(rows, said):
    with raising(UsageError, said):
        resolved(bags(rows), "bsp hybrid", on="virtual", workers=4)


def test_a_row_that_the_job_did_not_name_is_found_out():
    with raising(UsageError, "gradient"):
        virtual(row_jobs.wrong_rows(), "bsp hybrid", workers=2, steps=3)


def test_a_loop_of_ones_own_does_not_say_what_it_reads_next():
    module = torch.nn.Linear(2, 2)
    with raising(UsageError, "reads"):
        dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), topology="hybrid")


def test_more_rows_may_be_named_than_are_touched():
    def all_rows(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"table.weight": torch.arange(ROWS)}

    few, all_ = (
        virtual(bags(rows), "bsp hybrid:servers=table.weight", workers=2, steps=4) for rows in (rows_of, all_rows)
    )
    assert torch.equal(few.params, all_.params)
    assert few.summary["bytes_received"] < all_.summary["bytes_received"]
