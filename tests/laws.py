"""What every method promises, one row each: the table that `tests/oracles/test_laws.py` tries in both runtimes.

Whoever adds a method adds a row here. A method's own oracles are in `tests/sync`, what must equal what in
`tests/oracles/test_equivalence_graph.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Law:
    """What a method promises of `digits-mlp`.

    It reaches `accuracy` in `steps` steps of each of four virtual workers, of which one is five times slower, and of
    two real processes; `options` are those of `TrainConfig` that it needs for it. `survives`: it goes on without
    a worker that has died, and takes in one that comes late; otherwise a death ends the run with one sentence, unless
    its workers form their group again on processes (`re_forms`).
    `tensors`: it needs the values of gradients to know what to do, so that there is no timing-only run of it.
    `stands_for`: the family of methods or codecs for which it stands in `make test`. The other laws of the family take
    the same code of sessions, servers and checkpoints, and are tried in `make all`.
    """

    strategy: str
    accuracy: float = 0.93
    steps: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)
    survives: bool = True
    re_forms: bool = False
    tensors: bool = False
    stands_for: str = ""

    @property
    def method(self) -> str:
        """The name in the catalogue; of a method from a file, the file's."""
        return self.strategy.split()[0].partition("+")[0].partition(":")[0]

    @property
    def remedies(self) -> list[str]:
        """The names of its wrappers."""
        return [call.partition(":")[0] for call in self.strategy.split()[0].split("+")[1:]]

    def __str__(self) -> str:
        return self.strategy


EXAMPLES = Path(__file__).parents[1] / "examples"
POST_LOCAL, FLOAT8, STAR = (EXAMPLES / f"{name}.py" for name in ("03_post_local", "08_float8", "09_star"))
LEFT = Path(__file__).parent / "support" / "left_neighbors.py"

LAWS = [
    Law("bsp collective", survives=False, re_forms=True, stands_for="synchronous, over a collective"),
    Law("bsp collective:algorithm=ring", survives=False),
    Law("bsp ps:shards=2"),
    Law("bsp hybrid:servers=all,shards=2", survives=False, tensors=True, stands_for="hybrid"),
    Law("one-shot collective", survives=False),
    Law("one-shot ps:shards=2"),
    Law("averaging:period=3 collective", survives=False, re_forms=True),
    Law("averaging:period=3 ps:shards=2,split=layer", stands_for="averages of models, over servers"),
    Law("averaging:period=6,schedule=decay,interval=6,weights=uniform ps", options={"optimizer": "momentum"}),
    Law("averaging:period=6,schedule=adaptive,interval=6,weights=loss ps:shards=2", tensors=True),
    Law("averaging:period=4,pace=time ps:shards=2"),
    Law("averaging:schedule=epoch ps:shards=2"),
    Law(
        "averaging:schedule=overhead,overhead=0.3,weights=fisher,state=average collective",
        survives=False,
        re_forms=True,
    ),
    Law("bmuf:period=4,momentum=0.5 collective", survives=False, re_forms=True),
    Law("bmuf:period=4,momentum=0.5,nesterov=true ps:shards=2"),
    Law(
        "bmuf:period=4,momentum=0.5,overlap=3,fragments=3 collective",
        survives=False,
        stands_for="averages of models, beside the work",
    ),
    Law("bmuf:period=4,overlap=2,fragments=2 collective:algorithm=hierarchical,per_host=3", survives=False),
    Law("diloco:period=4 collective", survives=False, re_forms=True, options={"lr": 0.003}),
    Law("diloco:period=4 ps:shards=2", options={"lr": 0.003}),
    Law("easgd:period=4 collective", survives=False),
    Law("easgd:period=4 ps:shards=2"),
    Law("eamsgd:period=4 collective", survives=False),
    Law("eamsgd:period=4 ps:shards=2,split=layer", stands_for="elastic averages"),
    Law("backup ps:shards=2"),
    Law("k-sync ps:shards=2"),
    Law("k-batch-sync ps:shards=2", stands_for="quorums"),
    Law("k-async ps:shards=2"),
    Law("k-batch-async ps:shards=2"),
    Law("ssp:bound=3 ps:shards=2", options={"lr": 0.05}),
    Law("ssp:bound=3,form=rmw ps:shards=2", options={"lr": 0.05}, stands_for="bounded staleness"),
    Law("downpour ps:shards=2", options={"lr": 0.05}),
    Law(
        "downpour:n_push=2,n_fetch=3,warm_start=0.1,overlap=true ps:shards=2",
        options={"lr": 0.03},
        stands_for="asynchronous",
    ),
    Law("downpour+dc-asgd ps:shards=2", options={"lr": 0.05}),
    Law("downpour:at_once=true+dc-asgd ps", options={"lr": 0.05}),
    Law("k-batch-async:k=2+dc-asgd:mode=adaptive+staleness-lr ps:shards=2", stands_for="remedies"),
    Law("ssp:bound=3+staleness-lr+momentum-compensation:target=0.5 ps:shards=2", options={"lr": 0.03}),
    Law("hogwild", options={"lr": 0.05}),
    Law(
        "hogwild:decay=0.9 shared:mode=atomic",
        options={"lr": 0.05, "optimizer": "momentum:momentum=0.5"},
        stands_for="shared memory",
    ),
    Law("hogbatch:batch=2"),
    Law("hogbatch:batch=3,scale=sum shared:mode=atomic,locks=1", options={"lr": 0.02}),
    Law("asysvrg", options={"lr": 0.05}),
    Law("asysvrg:lock=readwrite", options={"lr": 0.05}),
    Law(f"{POST_LOCAL}:PostLocal:switch=10,period=4 collective", survives=False),
    Law(f"bsp {STAR}:Star:hub=1", survives=False),
    Law(f"averaging:period=3 {STAR}:Star", survives=False),
    Law(f"{LEFT}:DPSGD {LEFT}:LeftNeighbors", survives=False, tensors=True),
    Law("lbfgs:batch=128,push_every=2 ps:shards=2", tensors=True, stands_for="batch methods"),
    Law("bsp collective 1bit", survives=False, tensors=True),
    Law(f"bsp collective {FLOAT8}:Float8", survives=False, tensors=True),
    Law(f"downpour ps:shards=2 {FLOAT8}:Float8", tensors=True),
    Law("averaging:period=3 collective 1bit", survives=False, tensors=True, stands_for="codecs, over a collective"),
    Law(
        "bsp collective:algorithm=ring it-sign:start=20,zeros=random",
        survives=False,
        tensors=True,
        options={"lr": 0.003},
    ),
    Law("bsp ps:shards=2 it-sign:start=20", tensors=True, options={"lr": 0.003}),
    Law(
        "downpour ps:shards=2,split=layer strom:threshold=0.01",
        tensors=True,
        options={"lr": 0.05},
        stands_for="codecs, over servers",
    ),
    Law("ad-psgd gossip:graph=ring", stands_for="gossip"),
    Law("ad-psgd gossip:graph=exponential"),
]


def representatives(laws: Sequence[Law]) -> list[Any]:
    """The laws that stand for a family, and the others for `make all`."""
    return [law if law.stands_for else pytest.param(law, marks=pytest.mark.long) for law in laws]
