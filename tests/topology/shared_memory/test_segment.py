"""Memory that processes share: what is counted in it, its locks, its end; and the segment by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import racing
from support.nodes import World
from support.wording import raising

from dure.core.node import Address, Call
from dure.core.state import State
from dure.errors import DureError, Evicted, Refused
from dure.runtime.memory import MappedMemory
from dure.topology.shared_memory.choice import SharedMemory
from dure.topology.shared_memory.segment import BUCKETS, SMALL, Access, Layout, Segment, SharedShard

EACH = racing.WORKERS * racing.UPDATES


@pytest.fixture(scope="module")
def raced():
    """What came of all experiments of `support.racing`, each with three processes."""
    command = [sys.executable, racing.__file__, *racing.EXPERIMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    return json.loads(done.stdout)


# ---- processes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["atomic", "striped"])
def test_with_locks_no_addition_is_lost(raced, mode):
    found = raced[mode]
    assert found["least"] == found["most"] == found["version"] == found["expected"]


@pytest.mark.long
def test_without_locks_additions_may_be_lost_and_are_counted_all_the_same(raced):
    found = raced["racy"]
    assert found["least"] <= found["most"] <= found["expected"]
    assert found["version"] == found["expected"]
    assert found["written"] == found["expected"] * 200_000


@pytest.mark.long
def test_no_two_workers_draw_the_same_claim(raced):
    assert raced["claims"] == {"each once": True, "sum": EACH, "counter": 3 * EACH}


def test_under_one_lock_the_result_is_that_of_a_serial_order(raced):
    found = raced["serial"]
    assert found["versions"], "two updates made the same version, or one was skipped"
    assert found["replayed"]
    assert found["changes"] > racing.WORKERS, "the workers took turns so seldom that this shows nothing"
    assert not found["by rank"], "any order gives the same bits, so that this shows nothing"


def test_on_disjoint_supports_each_is_as_if_alone(raced):
    assert raced["disjoint"] == {"equal": True, "written": 8 * EACH}


def test_who_is_killed_holds_no_lock(raced):
    found = raced["killed"]
    assert found["values"] == [2.0] * 4
    assert found["version"] == 2
    assert found["seconds"] < 1


def test_memory_has_no_name_and_ends_with_the_last_who_has_mapped_it(raced):
    found = raced["gone"]
    assert found["still"] == 7, "it did not outlive its owner's death where it was mapped"
    assert not found["path"]
    assert found["during"] > found["before"] == found["after"]
    assert not list(Path("/dev/shm").glob("*dure*"))


def test_memory_that_is_not_here_is_explained():
    with raising(DureError, "processes"):
        MappedMemory.of("/proc/1/fd/999")


def test_more_memory_than_there_is_is_explained():
    with raising(DureError, "memory"):
        MappedMemory(1 << 50)


@pytest.mark.long
def test_a_lock_that_is_never_released_is_told(monkeypatch):
    script = (
        "import os, time\n"
        "from dure.errors import DureError\n"
        "from dure.runtime import memory\n"
        "memory.LOCK_SECONDS = 0.3\n"
        "here = memory.MappedMemory(64)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    with here.hold(3, 2):\n"
        "        time.sleep(20)\n"
        "time.sleep(0.3)\n"
        "with here.hold(5):\n"
        "    print('another is free')\n"
        "try:\n"
        "    with here.hold(4):\n"
        "        print('got it')\n"
        "except DureError as error:\n"
        "    print(error)\n"
        "os.kill(pid, 9)\n"
        "os.waitpid(pid, 0)\n"
        "with here.hold(4):\n"
        "    print('got it')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    first, second, third = done.stdout.splitlines()
    assert (first, third) == ("another is free", "got it")
    assert second.startswith("a lock on shared memory was held for 0.3 s")


# ---- a segment


def sparse(indices: list[int], values: list[float], numel: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([indices], values, (numel,), is_coalesced=True, check_invariants=False)


def test_a_sparse_update_writes_only_what_it_names():
    segment = Segment(Layout(6, torch.float32, 1))
    segment.values.fill_(float("nan"))
    segment.values[[1, 4]] = 0.0
    segment.add(0, sparse([1, 4], [1.0, 2.0], 6), -0.5, seen=0)
    assert segment.values[[1, 4]].tolist() == [-0.5, -1.0]
    assert segment.values.isnan().sum() == 4
    assert segment.written == 2


@pytest.mark.parametrize("locks", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_number_of_locks_changes_no_bit(locks, is_sparse):
    draw = torch.Generator().manual_seed(locks)
    update = torch.randn(11, generator=draw)
    if is_sparse:
        update = sparse([0, 3, 4, 5, 10], torch.randn(5, generator=draw).tolist(), 11)
    one, other = (Segment(Layout(11, torch.float32, 1)) for _ in range(2))
    one.add(0, update, -0.3, seen=0)
    other.add(0, update, -0.3, seen=0, locks=locks)
    assert torch.equal(one.values, other.values)
    assert one.written == other.written


def test_staleness_counts_the_updates_of_others_in_between():
    segment = Segment(Layout(2, torch.float64, 3))
    update = torch.ones(2, dtype=torch.float64)
    seen = [segment.version] * 3
    made = [segment.add(rank, update, 1.0, seen=seen[rank]) for rank in (2, 0, 1)]
    assert made == [1, 2, 3]
    assert segment.staleness == {0: 1, 1: 1, 2: 1}
    assert segment.rows[:, 0].tolist() == [1, 1, 1], "each counts in a row of its own, where no other writes"
    segment.rows[0, 0] += 10 * BUCKETS
    segment.add(1, update, 1.0, seen=3)
    assert segment.staleness == {0: 1, 1: 1, 2: 1, BUCKETS - 1: 1}


def test_a_counter_ends_at_its_limit_and_not_before():
    segment = Segment(Layout(1, torch.float32, 1))
    assert [segment.claim(0, 4, 10) for _ in range(4)] == [0, 4, 8, None]
    assert segment.claim(1, 4, 10) == 0
    assert [segment.claim(2, 5, 10) for _ in range(3)] == [0, 5, None]


def test_vectors_do_not_overlap_whatever_their_size():
    for numel in (1, 7, 16, 33):
        layout = Layout(numel, torch.float64, 5, ("snapshot", "mean"))
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        segment = Segment(layout, memory)
        for number, vector in enumerate([segment.values, *segment.vectors.values()], start=1):
            vector.fill_(number)
        segment.claims[:], segment.rows[:] = -1, -2
        assert segment.values.eq(1).all()
        assert segment.vectors["snapshot"].eq(2).all()
        assert segment.vectors["mean"].eq(3).all()
        assert (segment.claims == -1).all()


def test_a_segment_goes_on_from_its_state():
    layout = Layout(3, torch.float32, 2, ("mean",))
    segment = Segment(layout)
    segment.add(1, torch.ones(3), 2.0, seen=0)
    segment.vectors["mean"].fill_(5)
    segment.claim(0, 3, 9)
    state = segment.state()
    segment.values.zero_()
    other = Segment(layout)
    other.restore(State(state.tensors, json.loads(json.dumps(state.plain))))
    assert other.values.tolist() == [2.0] * 3
    assert other.vectors["mean"].tolist() == [5.0] * 3
    assert (other.version, other.claim(0, 3, 9)) == (1, 3)


# ---- its owner


class Alone:
    """A node that does its work at once."""

    name = "worker 0"


def shard(vectors: tuple[str, ...] = ("snapshot", "mean")) -> SharedShard:
    segment = Segment(Layout(2, torch.float32, 3, vectors))
    return SharedShard(Alone(), segment, torch.tensor([1.0, -1.0]))


def contribution(worker: int, values: list[float], weight: float, incarnation: int = 0) -> Call:
    fields = {"worker": worker, "incarnation": incarnation, "weight": weight}
    return Call(f"worker {worker}", "contribute", fields, (torch.tensor(values),))


def close(version: int) -> Call:
    return Call("server 0", "close", {"version": version}, ())


def test_odd_versions_make_the_mean_and_even_ones_the_snapshot():
    owner = shard()
    vectors, values = owner.segment.vectors, owner.segment.values
    assert vectors["snapshot"].tolist() == [1.0, -1.0]
    owner.handle(contribution(0, [2.0, 4.0], 3))
    owner.handle(contribution(2, [6.0, 0.0], 1))
    owner.segment.claim(0, 5, 9)
    owner.handle(close(1))
    assert vectors["mean"].tolist() == [2.0, 1.0]
    assert owner.segment.claim(0, 5, 9) == 0
    values.fill_(7)
    assert vectors["snapshot"].tolist() == [1.0, -1.0], "the snapshot moves with the model"
    owner.handle(close(1))
    assert vectors["mean"].tolist() == [2.0, 1.0], "a repeated message closed a phase twice"
    owner.handle(close(2))
    assert vectors["snapshot"].tolist() == [7.0, 7.0]
    owner.handle(close(3))
    assert vectors["mean"].tolist() == [0.0, 0.0], "nobody contributed"


def test_nothing_is_taken_from_a_past_life():
    owner = shard()
    owner.handle(Call("server 0", "leave", {"worker": 1, "incarnation": 0}, ()))
    with pytest.raises(Evicted):
        owner.handle(contribution(1, [9.0, 9.0], 1))
    owner.handle(contribution(1, [1.0, 1.0], 1, incarnation=1))
    owner.handle(close(1))
    assert owner.segment.vectors["mean"].tolist() == [1.0, 1.0]


def test_what_is_pulled_does_not_change_any_more():
    owner = shard()
    (pulled,) = owner.handle(Call("worker 0", "pull", {}, ())).tensors
    owner.segment.values.zero_()
    assert pulled.tolist() == [1.0, -1.0]


def test_an_owner_goes_on_from_its_state():
    owner = shard()
    owner.handle(close(1))
    owner.handle(contribution(0, [2.0, 4.0], 2))
    owner.handle(Call("server 0", "leave", {"worker": 2, "incarnation": 0}, ()))
    state = owner.state()
    other = shard()
    other.restore(State(state.tensors, json.loads(json.dumps(state.plain))))
    other.handle(contribution(1, [2.0, 0.0], 2))
    with pytest.raises(Evicted):
        other.handle(contribution(2, [9.0, 9.0], 1))
    other.handle(close(1))
    assert other.weight == 4, "phase 1 had been closed before"
    other.handle(close(3))
    assert other.segment.vectors["mean"].tolist() == [1.0, 1.0]


def test_what_would_spoil_the_model_is_refused():
    segment = Segment(Layout(2, torch.float32, 1))
    access = Access(Alone(), 0, segment, owner=Address("server 0", "shard"))
    for bad in (torch.tensor([1.0, float("nan")]), sparse([0], [float("inf")], 2)):
        with raising(Refused, "infinity"):
            access.add(bad, 1.0, seen=0).send(None)
    assert (segment.refused, segment.version) == (2, 0)


def test_large_finite_numbers_spoil_nothing():
    segment = Segment(Layout(2, torch.float32, 1))
    access = Access(World().node("worker 0"), 0, segment, owner=Address("server 0", "shard"))
    access.node.world.run(access.add(torch.tensor([3e38, -3e38]), 0.5, seen=0))  # their squares are infinite
    assert segment.values.tolist() == pytest.approx([1.5e38, -1.5e38])


# ---- who has it alone


class Noted:
    """Locks that anybody may have, and which were asked for."""

    def __init__(self) -> None:
        self.held: list[int] = []

    @contextmanager
    def hold(self, first: int, count: int = 1) -> Iterator[None]:
        self.held += range(first, first + count)
        yield


@pytest.mark.parametrize("nbytes", [8, 2 * SMALL])
def test_what_is_done_alone_between_processes_is_done_under_the_first_lock(nbytes):
    layout, world = Layout(nbytes // 4, torch.float32, 1), World()
    for locks, parts in ((0, []), (2, [0, 1])):
        noted = Noted()
        segment = Segment(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), noted)
        access = Access(world.node("worker 0"), 0, segment, owner=Address("server 0", "shard"), locks=locks)
        into, update = torch.ones(layout.numel), torch.ones(layout.numel)
        assert world.run(access.read(into))[0] is segment.values
        assert noted.held == []
        world.run(access.add(update, 1.0, seen=0))
        assert noted.held == parts
        noted.held.clear()
        world.run(access.add(update, 1.0, seen=1, alone=True))
        assert noted.held == [0]
        copy, version = world.run(access.read(into, alone=True))
        assert noted.held == [0, 0]
        assert copy is into
        assert into.eq(2).all()
        assert version == 2


def test_locks_of_nothing_are_explained():
    with raising(ValueError, "ranges"):
        SharedMemory(locks=0)
