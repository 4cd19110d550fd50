"""The nodes of a run: names, machines, and what each topology says of a loss."""

from __future__ import annotations

import pytest
from support.runs import resolved

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost


def nodes(workers: int, servers: int, **beside: NodeId | None) -> Deployment:
    first = (NodeSpec(NodeId(WORKER, rank), beside.get("worker")) for rank in range(workers))
    return Deployment((*first, *(NodeSpec(NodeId(SERVER, rank), beside.get("server")) for rank in range(servers))))


def test_a_name_is_read_back():
    assert NodeId.of(str(NodeId("learner", 12))) == NodeId("learner", 12)
    with pytest.raises(ValueError):  # noqa: PT011
        NodeId.of("driver")


def test_each_node_has_a_machine_or_that_of_another():
    worker = NodeId(WORKER, 0)
    assert list(nodes(3, 2).places().values()) == [0, 1, 2, 3, 4]
    assert list(nodes(3, 2, server=worker).places().values()) == [0, 1, 2, 0, 0]
    assert set(nodes(3, 2, server=worker, worker=worker).places().values()) == {0}


@pytest.mark.parametrize(
    ("strategy", "machines", "worker_lost", "server_lost"),
    [
        ("bsp collective", [0, 1, 2], WhenLost.RE_FORM, None),
        ("bsp collective:algorithm=ring", [0, 1, 2], WhenLost.END, None),
        ("bsp collective 1bit", [0, 1, 2], WhenLost.END, None),
        ("averaging:period=4 collective", [0, 1, 2], WhenLost.RE_FORM, None),
        ("bmuf:period=4,overlap=2 collective", [0, 1, 2], WhenLost.END, None),
        ("bsp ps:shards=2", [0, 1, 2, 3, 4], WhenLost.GO_ON, WhenLost.ROLL_BACK),
        ("downpour ps:shards=4,colocated=true", [0, 1, 2, 0, 1, 2, 0], WhenLost.GO_ON, WhenLost.RESTART_ALONE),
        ("lbfgs ps", [0, 1, 2, 3], WhenLost.GO_ON, WhenLost.ROLL_BACK),
        ("hogwild", [0, 0, 0, 0], WhenLost.GO_ON, WhenLost.ROLL_BACK),
        ("ad-psgd", [0, 1, 2], WhenLost.GO_ON, None),
        ("bsp hybrid:servers=all,shards=1", [0, 1, 2, 0], WhenLost.END, WhenLost.ROLL_BACK),
    ],
)
def test_topologies_say_where_nodes_stand_and_what_their_loss_means(strategy, machines, worker_lost, server_lost):
    setup, _ = resolved("digits-mlp", strategy, workers=3)
    deployment = setup.deployment
    assert list(deployment.places().values()) == machines
    assert deployment["worker 2"].when_lost is worker_lost
    lost = {deployment[name].when_lost for name in deployment.names(SERVER)}
    assert lost == ({server_lost} if server_lost else set())
