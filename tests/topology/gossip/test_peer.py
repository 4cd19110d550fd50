"""Averaging between neighbors: atomic, without a deadlock, and on both sides or on neither."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
import torch
from support.post import Post, PostNode

from dure.core.mixing import pairwise_mixing, spectral_gap
from dure.core.node import Operation, Reply
from dure.topology.gossip.choice import Gossip
from dure.topology.gossip.graph import build
from dure.topology.gossip.topology import GIVE_UP_STEPS, Peer, Turn

GRAPHS = {
    "triangle": nx.cycle_graph(3),
    "pair": nx.complete_graph(2),
    "odd ring": nx.cycle_graph(5),
    "complete": nx.complete_graph(4),
    "star": nx.star_graph(3),
    "wheel": nx.wheel_graph(5),
}


# ---- the rule, tried in all orders: no deadlock, on any graph


class Waiting(Turn):
    """Blocking exchange: whoever is busy has everybody wait."""

    def answer(self, caller: int) -> str:
        return "meet" if self.asking is None else "wait"


class Model:
    """Workers that ask a neighbor, `rounds` times each, and again where they are refused; every event is one action."""

    def __init__(self, graph: nx.Graph, rounds: int, turn: type[Turn] = Turn) -> None:
        self.graph = {node: sorted(graph.neighbors(node)) for node in graph}
        self.turns = {node: turn(node) for node in graph}
        self.left = dict.fromkeys(graph, rounds)
        self.letters: list[tuple[str, int, int]] = []
        self.waiting: dict[int, deque[int]] = {node: deque() for node in graph}
        self.met = 0

    def actions(self) -> list[tuple[str, int, int]]:
        idle = [node for node, turn in self.turns.items() if turn.asking is None and self.left[node]]
        return self.letters + [("ask", node, other) for node in idle for other in self.graph[node]]

    def act(self, action: tuple[str, int, int]) -> None:
        kind, source, target = action
        if kind == "ask":
            self.turns[source].asking = target
            self.letters.append(("meet", source, target))
            return
        self.letters.remove(action)
        if kind == "meet":
            self.answer(source, target)
            return
        self.left[target] -= kind == "mean"
        self.turns[target].asking = None
        while self.waiting[target]:
            self.answer(self.waiting[target].popleft(), target)

    def answer(self, caller: int, asked: int) -> None:
        verdict = self.turns[asked].answer(caller)
        if verdict == "wait":
            self.waiting[asked].append(caller)
        else:
            self.met += verdict == "meet"
            self.letters.append(("mean" if verdict == "meet" else "busy", asked, caller))

    def key(self) -> object:
        asking = tuple(turn.asking for turn in self.turns.values())
        return asking, tuple(self.left.values()), tuple(sorted(self.letters)), tuple(map(tuple, self.waiting.values()))


def run_at_random(model: Model, chance: random.Random) -> bool:
    """Whether all came to their end."""
    while actions := model.actions():
        model.act(actions[int(chance.random() * len(actions))])
    return not any(model.left.values())


@pytest.mark.long
def test_a_hundred_thousand_random_schedules_have_no_deadlock():
    chance = random.Random(1)
    names = sorted(GRAPHS)
    for schedule in range(100_000):
        graph = GRAPHS[names[schedule % len(names)]] if schedule % 3 else GRAPHS["triangle"]
        model = Model(graph, 1)
        assert run_at_random(model, chance), (schedule, model.key())
        assert model.met == len(graph)


def test_blocking_exchange_on_a_ring_of_three_deadlocks():
    """What the test above would see if everybody waited."""
    chance = random.Random(1)
    ends = [run_at_random(Model(GRAPHS["triangle"], 1, Waiting), chance) for _ in range(300)]
    assert 5 < ends.count(False) < 295


@pytest.mark.parametrize("turn", [Turn, Waiting])
def test_every_order_of_events_on_a_ring_of_three(turn):
    """All states that can be reached: nobody is stuck in any, unless exchange blocks."""
    seen: set[object] = set()
    stuck = 0
    stack: list[list[tuple[str, int, int]]] = [[]]
    while stack:
        path = stack.pop()
        model = Model(GRAPHS["triangle"], 2 if turn is Turn else 1, turn)
        for action in path:
            model.act(action)
        if model.key() in seen:
            continue
        seen.add(model.key())
        actions = model.actions()
        stuck += not actions and any(model.left.values())
        if len(path) < 40:
            stack += [[*path, action] for action in actions]
    assert len(seen) > 100
    assert (stuck > 0) is (turn is Waiting)


# ---- the peers themselves


@dataclass
class Holder:
    params: torch.Tensor
    clock: int = 0
    entered: int = 0


def peers(graph: nx.Graph, models: torch.Tensor) -> tuple[Post, list[Peer]]:
    post, found = Post(), []
    for rank in graph:
        node = PostNode(post, rank)
        peer = Peer(node, Holder(models[rank].clone()), graph, seed=0)  # type: ignore[arg-type]
        post.services[node.name] = peer
        found.append(peer)
    return post, found


def one_hot(graph: nx.Graph) -> torch.Tensor:
    return torch.eye(len(graph), dtype=torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GRAPHS)
def test_in_any_order_of_messages_the_sum_stays_and_all_come_through(name):
    """Each averages six times, learns meanwhile, and sometimes gives up: what is given is taken, or neither."""
    graph = GRAPHS[name]
    for seed in range(60):
        chance = random.Random(seed)
        post, everybody = peers(graph, one_hot(graph))
        learned = 0
        while letters := post.first_letters() or [peer for peer in everybody if peer.model.clock < 6]:
            ready = [peer for peer in everybody if peer.model.clock < 6 and _idle(peer)]
            if ready and (not post.letters or chance.random() < 0.3):
                peer = chance.choice(ready)
                peer.average()
                peer.model.clock += 1
                post.run_ready()
            else:
                assert post.letters, f"stuck: {[peer.turn.asking for peer in everybody]}"
                post.deliver(chance.choice(letters))
            if chance.random() < 0.2:
                peer = chance.choice(everybody)
                peer.model.params = peer.model.params + 0.25
                learned += 1
            if chance.random() < 0.05:
                _give_up(chance.choice(everybody))
        total = sum(peer.model.params for peer in everybody)
        assert torch.allclose(total, torch.ones(len(graph), dtype=torch.float64) + 0.25 * learned, atol=1e-12)
        assert not any(peer._met for peer in everybody)
        assert sum(peer.averaged for peer in everybody) > 2 * len(graph) or name == "pair"


@pytest.mark.parametrize("name", GRAPHS)
def test_what_comes_out_is_one_averaging_after_another(name):
    """Atomic: the models are the product of means of two, in the order in which the questions were answered."""
    graph = GRAPHS[name]
    for seed in range(40):
        chance = random.Random(seed)
        post, everybody = peers(graph, one_hot(graph))
        met: list[tuple[int, int]] = []
        for peer in everybody:
            peer._mean_with = _noting(peer, met)  # type: ignore[method-assign]
        for clock in range(4):
            for peer in everybody:
                peer.model.clock = clock
                peer.average()
            for _ in range(chance.randrange(12)):
                if letters := post.first_letters():
                    post.deliver(chance.choice(letters))
        post.settle(chance.choice)
        product = one_hot(graph)
        for one, other in met:
            product[[one, other]] = product[[one, other]].mean(dim=0)
        assert torch.equal(torch.stack([peer.model.params for peer in everybody]), product)


def _noting(peer: Peer, met: list[tuple[int, int]]) -> Callable[..., Reply]:
    mean_with = peer._mean_with

    def noted(tensors: list[torch.Tensor], rank: int, number: list[int]) -> Reply:
        met.append((rank, peer.rank))
        return mean_with(tensors, rank, number)

    return noted


def _idle(peer: Peer) -> bool:
    return peer._averaging is None or peer._averaging.done


def _give_up(peer: Peer) -> None:
    if peer._meet_call is not None:
        peer._meet_call.cancel()
        peer.node.post.run_ready()  # type: ignore[attr-defined]


def test_all_come_to_the_mean():
    graph = build(Gossip("ring"), 6)
    post, everybody = peers(graph, one_hot(graph))
    for clock in range(80):
        for peer in everybody:
            peer.model.clock = clock
            peer.average()
        post.settle()
    for peer in everybody:
        assert torch.allclose(peer.model.params, torch.full((6,), 1 / 6, dtype=torch.float64), atol=1e-3)


def exchange(graph: nx.Graph, models: torch.Tensor, one: int, other: int) -> torch.Tensor:
    """The models after the averaging of one pair."""
    post, everybody = peers(graph, models)
    post.spawn(everybody[one]._is_answered(everybody[one]._ask(other)), "test").when_done(lambda: None)
    post.settle()
    return torch.stack([peer.model.params for peer in everybody])


def disagreement(models: torch.Tensor) -> float:
    return float((models - models.mean(dim=0)).square().sum())


@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("kind", ["complete", "ring"])
def test_an_exchange_shrinks_the_disagreement_as_the_theory_says(kind, workers):
    """By 1 - 1/(K-1) where all are neighbors; on a ring, in its slowest wave, by 1 - (1 - cos(2 pi/K))/K."""
    graph = build(Gossip(kind), workers)
    if kind == "complete":
        models = torch.randn(workers, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    else:
        angle = 2 * torch.pi * torch.arange(workers, dtype=torch.float64) / workers
        models = torch.cos(angle).unsqueeze(1)
    left = 0.0
    for one in graph:
        for other in graph.neighbors(one):
            left += disagreement(exchange(graph, models, one, other)) / (workers * graph.degree(one))
    expected = {("complete", 6): 0.8, ("ring", 6): 0.91667, ("complete", 4): 2 / 3, ("ring", 4): 0.75}[kind, workers]
    assert left / disagreement(models) == pytest.approx(expected, abs=1e-5)
    assert 1 - spectral_gap(pairwise_mixing(graph)) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(
        torch.from_numpy(pairwise_mixing(graph)) @ models,
        sum(
            exchange(graph, models, one, other) / (workers * graph.degree(one))
            for one in graph
            for other in graph.neighbors(one)
        ),  # type: ignore[arg-type]
    )


def product(graph: nx.Graph, averagings: int, seed: int) -> torch.Tensor:
    """W_k ... W_1 of so many averagings, one after another, each begun by a worker that is drawn."""
    post, everybody = peers(graph, one_hot(graph))
    chance = random.Random(seed)
    for number in range(averagings):
        peer = everybody[chance.randrange(len(everybody))]
        peer.model.clock = seed * averagings + number
        peer._asked = False
        peer.average()
        post.settle()
    return torch.stack([peer.model.params for peer in everybody])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ring", "exponential", "random-regular"])
def test_disagreement_decays_at_the_rate_of_the_gap(kind):
    """Expected models are W^k x: in the slowest direction (1 - gap)^k of x, on both sides within 4 standard errors.

    Of its square, at least that squared (Jensen) and at most (1 - gap)^k are left. The errors are small enough to tell
    a gap that is a tenth off, as with weights of 1/3 and 2/3 (8/9 of the gap).
    """
    graph = build(Gossip(kind), 16)
    values, vectors = np.linalg.eigh(pairwise_mixing(graph))
    slowest = torch.from_numpy(vectors[:, np.isclose(values, values[-2])])
    averagings = 40 if kind == "ring" else 20
    products = [product(graph, averagings, seed) @ slowest for seed in range(60 if kind == "ring" else 240)]
    expected = values[-2] ** averagings
    kept = np.array([float((slowest * left).sum()) for left in products]) / slowest.shape[1]
    squares = np.array([float(left.square().sum()) for left in products]) / slowest.shape[1]
    error = 4 * kept.std() / math.sqrt(len(kept))
    assert error < 0.1 * (1 - expected)
    assert kept.mean() == pytest.approx(expected, abs=error)
    error = 4 * squares.std() / math.sqrt(len(squares))
    assert expected**2 - error <= squares.mean() <= expected + error


def test_rounds_of_pairs_that_make_the_full_mean_are_bsp():
    """Four workers, each with its gradient; two rounds of pairs: bit for bit one step on the mean gradient."""
    graph = nx.cycle_graph(4)
    gradients = torch.tensor([[3.0], [-1.0], [0.5], [7.0]], dtype=torch.float64)
    models = torch.full((4, 1), 2.0, dtype=torch.float64) - 0.25 * gradients
    for pair in ((0, 1), (2, 3), (1, 2), (3, 0)):
        models = exchange(graph, models, *pair)
    assert torch.equal(models, torch.full((4, 1), 2.0 - 0.25 * 2.375, dtype=torch.float64))


# ---- interrupted: on both sides or on neither


STAGES = ("meet", "answer to meet", "settle", "answer to settle")


def up_to(stage: int) -> tuple[Post, Peer, Peer]:
    """Worker 0 averages with worker 1, both learn meanwhile, and `stage` of the four messages have arrived."""
    graph = nx.complete_graph(2)
    post, (one, other) = peers(graph, torch.tensor([[8.0], [2.0]], dtype=torch.float64))
    one.average()
    post.run_ready()
    one.model.params = one.model.params + 0.5
    for kind in STAGES[:stage]:
        (letter,) = post.letters
        assert letter.kind == kind
        post.deliver(letter)
    other.model.params = other.model.params - 0.25
    return post, one, other


@pytest.mark.parametrize(("stage", "active", "passive"), [(0, 8, 2), (1, 8, 2), (2, 8, 2), (3, 8, 5), (4, 5, 5)])
@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_who_dies_in_the_middle_takes_no_half_of_an_averaging_along(stage, active, passive, victim):
    """8 and 2 have the mean 5. What the survivor has learned meanwhile, 0.5 or -0.25, stays."""
    post, one, other = up_to(stage)
    post.kill(victim)
    post.settle()
    if victim == "worker 1":
        assert float(one.model.params) == active + 0.5
        assert (one.turn.asking, one._averaging.done) == (None, True)  # type: ignore[union-attr]
    else:
        assert float(other.model.params) == passive - 0.25
        assert not other._met


@pytest.mark.parametrize("stage", range(5))
def test_a_connection_that_ends_between_two_who_live_leaves_them_agreed(stage):
    post, one, other = up_to(stage)
    post.cut("worker 0", "worker 1")
    post.settle()
    mean = stage >= 3
    assert float(one.model.params) == (5 if mean else 8) + 0.5
    assert float(other.model.params) == (5 if mean else 2) - 0.25


@pytest.mark.parametrize("stage", range(2))
def test_who_gives_up_has_the_other_side_take_it_back(stage):
    """The neighbor stands still; when it goes on it finds the question, and then that it is off."""
    post, one, other = up_to(stage)
    one.model.clock = GIVE_UP_STEPS
    one.average()
    post.settle()
    assert (float(one.model.params), float(other.model.params)) == (8.5, 1.75)
    assert not other._met
    assert one._away == {1}
    other.average()
    post.settle()
    assert not one._away, "who is heard of is a neighbor again"
    assert float(one.model.params) == float(other.model.params) == 5.125


def test_a_question_that_comes_twice_counts_once():
    post, (one, other) = peers(nx.complete_graph(2), torch.tensor([[8.0], [2.0]], dtype=torch.float64))
    one.average()
    post.run_ready()
    (letter,) = post.letters
    for _ in range(3):
        letter.deliver()
        other.model.params = other.model.params + 1.0
    post.settle()
    assert (float(one.model.params), float(other.model.params)) == (5.0, 8.0)
    letter.deliver()
    post.settle()
    assert float(other.model.params) == 8.0


def test_a_new_life_starts_its_numbers_again():
    graph = nx.complete_graph(2)
    post, _, other = up_to(1)
    post.dead.clear()
    post.letters.clear()
    again = Peer(PostNode(post, 0), Holder(torch.tensor([4.0], dtype=torch.float64)), graph, seed=0, incarnation=1)  # type: ignore[arg-type]
    post.services["worker 0"] = again
    again.average()
    post.settle()
    assert float(other.model.params) == float(again.model.params) == (4 + 1.75) / 2


def test_who_is_through_keeps_its_model_and_is_asked_no_more():
    post, (one, other) = peers(nx.complete_graph(2), torch.tensor([[8.0], [2.0]], dtype=torch.float64))
    leaving = post.spawn(other.leave(), "leaving")
    post.settle()
    one.average()
    post.settle()
    assert leaving.done
    assert (float(one.model.params), float(other.model.params)) == (8.0, 2.0)
    one.model.clock = 1
    one.average()
    post.run_ready()
    assert not post.letters, "nobody is left to ask"


def test_the_mean_is_of_all_who_can_be_reached_also_of_those_who_are_through():
    graph = nx.path_graph(4)
    post, everybody = peers(graph, torch.tensor([[8.0], [2.0], [5.0], [40.0]], dtype=torch.float64))
    post.spawn(everybody[2].leave(), "leaving")
    post.kill("worker 3")
    asking = post.spawn(everybody[0].look(), "asking")
    for peer, clock in zip(everybody, (5, 7, 9, 100), strict=True):
        peer.model.clock, peer.model.joined_at = clock, 2
    post.settle()
    mean, gradients = asking.result()
    assert (float(mean), gradients) == (5.0, 3 + 5 + 7)
    assert [float(peer.model.params) for peer in everybody[:3]] == [8.0, 2.0, 5.0]


def test_leaving_waits_until_what_is_open_is_settled():
    post, _, other = up_to(2)
    leaving: Operation[None] = post.spawn(other.leave(), "leaving")
    post.run_ready()
    assert not leaving.done
    post.settle()
    assert leaving.done


def test_a_newcomer_copies_the_first_neighbor_that_answers():
    graph = nx.cycle_graph(4)
    post, everybody = peers(graph, torch.arange(4, dtype=torch.float64).unsqueeze(1))
    for peer in everybody:
        peer.model.clock = 10 + peer.rank
    post.kill("worker 0")
    post.kill("worker 2")
    joining = post.spawn(everybody[1].join(), "joining")
    post.settle()
    assert joining.result() == 13, "those next to it are gone: the next one is its neighbor now"
    assert float(everybody[1].model.params) == 3.0


def test_a_newcomer_copies_a_worker_that_has_joined_after_the_start():
    post, everybody = peers(nx.cycle_graph(4), torch.arange(4, dtype=torch.float64).unsqueeze(1))
    everybody[1]._away = {2, 3}
    post.kill("worker 0")
    everybody[1].expect(["driver", "server 0", "worker 2"])
    joining = post.spawn(everybody[1].join(), "joining")
    post.settle()
    assert joining.result() == everybody[2].model.clock
    assert float(everybody[1].model.params) == 2.0


def test_neighbors_are_drawn_by_seed_rank_and_clock():
    graph = nx.complete_graph(6)
    _, everybody = peers(graph, one_hot(graph))
    orders = set()
    for one in everybody:
        for clock in range(5):
            one.model.clock = clock
            assert sorted(one._neighbors()) == [rank for rank in range(6) if rank != one.rank]
            assert one._neighbors() == one._neighbors()
            orders.add(tuple(one._neighbors()))
    assert len(orders) > 20
