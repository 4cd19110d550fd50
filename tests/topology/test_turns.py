"""Turns: one task at a time, in the order in which they came."""

from __future__ import annotations

from support.nodes import World

from dure.topology.turns import Turns


def test_turns_are_taken_one_at_a_time_in_the_order_of_arrival():
    world, turns, inside = World(), Turns("the shard"), []

    async def visit(rank: int) -> None:
        if turns.busy:
            await turns.wait(world.node(f"worker {rank}"))
        turns.busy = True
        inside.append(rank)

    visits = [world.spawn(visit(rank), f"worker {rank}") for rank in range(5)]
    world.settle()
    assert inside == [0]
    visits[2].kill()  # while it waits
    turns.end()
    world.settle()
    assert inside == [0, 1]
    turns.end()
    visits[3].kill()  # after its turn was given to it, before it ran
    world.settle()
    assert inside == [0, 1, 4]
    turns.end()
    assert not turns.busy
    world.run(visit(5))
    assert inside == [0, 1, 4, 5]
