"""Collectives as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dure.core.catalogue import parameter

HOSTED = ("hierarchical", "torus")
"""Algorithms that distinguish the ranks of a host from others."""


@dataclass(frozen=True, slots=True)
class Collective:
    """All workers communicate by collective operations (all_reduce, broadcast), without a server.

    With `algorithm="engine"` `torch.distributed` carries them out; in virtual time they cost its closed form. The other
    algorithms are written from sends (`topology.collective`). For "hierarchical" and "torus", `per_host` is the number
    of consecutive ranks on one host; None: the ranks of one machine of the run.
    """

    paper: ClassVar[str] = (
        "Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005"
    )

    algorithm: Literal["engine", "ring", "tree", "halving-doubling", "hierarchical", "torus", "all-to-all"] = parameter(
        "engine",
        "engine: that of torch.distributed, in virtual time its closed form; the others: written from sends",
        shown=False,
    )
    per_host: int | None = parameter(
        None,
        "hierarchical and torus: ranks in a row that are on one host; none: those of one machine",
        range=">= 1",
        unit="workers",
    )

    offers: ClassVar[frozenset[str]] = frozenset({"group", "codec", "stages"})
    deployed_as: ClassVar[str] = "dure.topology.collective.topology:CollectiveTopology"

    def __post_init__(self) -> None:
        if self.per_host is not None and self.per_host < 1:
            raise ValueError(
                f"per_host, the workers on each host, must be at least 1, got {self.per_host}. Write "
                "collective:algorithm=hierarchical,per_host=2, or leave per_host out to use the machines of the run."
            )
        if self.algorithm not in HOSTED and self.per_host is not None:
            raise ValueError(
                f"per_host={self.per_host} is for {' and '.join(HOSTED)}, and algorithm is {self.algorithm}: drop one."
            )
