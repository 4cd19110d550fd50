"""Facts that a cluster leaves open, with the values that they may have beside the assumed one.

Of machines with accelerators:

    fact                      values                                   origin
    speed of a GPU            0.6 and 2.1 of the catalogue's           26 of 28 published rates of one GPU, K80 to A100
                                                                       (studies/, `one`); 0.44 and 0.59 are the others
    links inside a machine    mesh, switch, pcie, pcie-host; for a     `accelerators.INSIDE`
                              device with PCIe, the last two
    network cards of one      4 and 8, from 100 Gbit/s on              published hosts with 1 and 4 of 100, and 8 of 400
                              2 below                                  Gbit/s (studies/); the ports of a usual card
    transport of the network  RDMA with a share of 0.82 and 0.92; TCP  `accelerators.Card`
                              with 8 and 18 Gbit/s, 80 and 25 us
    spread of equal steps     0.01 and 0.03                            published rows (docs/research/published.md)

NVLink of an SXM module is known, and not open. Descriptions that `dure probe` measured have no open facts. Nor have
machines with CPUs, as nothing says in what range the speed of an unknown core is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dure.core import units
from dure.runtime.virtual.accelerators import INSIDE, Card
from dure.runtime.virtual.cluster import PCIE, device_inside, usual_inside

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster, Machines

V = TypeVar("V")

SPEEDS = {"0.6 of the catalogue's speed": 0.6, "2.1 of the catalogue's speed": 2.1}
SHARES = {"RDMA at 82 % of a card": 0.82, "RDMA at 92 % of a card": 0.92}
FLOWS = ((8e9 / 8, 80e-6), (18e9 / 8, 25e-6))
"""Bytes per second of a flow of TCP, and seconds of a hop."""

MANY_CARDS, CARDS, PORTS = 100e9 / 8, (4, 8), (2,)
"""Bandwidth from which on hosts have several cards, their numbers, and those of slower ones."""

SPREADS = {"a spread of 1 %": 0.01, "a spread of 3 %": 0.03}

INSIDE_WORDS = {
    "mesh": "an NVLink mesh",
    "switch": "NVSwitch",
    "pcie": "PCIe below one switch",
    "pcie-host": "PCIe through the host",
}


@dataclass(frozen=True, slots=True)
class ClusterFact:
    """A fact that a cluster leaves open: the value that is `assumed`, in words, and changes to the other ones.

    `state` says how a cluster file states it, at `key`. `in_line` has the fields of a `MachinesLine` that state it.
    `look` is a sentence on where a person finds it.
    """

    name: str
    key: str
    assumed: str
    values: Mapping[str, Callable[[Cluster], Cluster]]
    state: str
    look: str
    in_line: Mapping[str, Any] = field(default_factory=dict)


def open_facts(cluster: Cluster) -> list[ClusterFact]:
    """The facts that `cluster` leaves open, whose machines have the seconds of a step (`step_shape.referred`)."""
    if not cluster.accelerated or cluster.hosts:
        return []
    made = (_speed, _inside, _cards, _transport, _spread)
    return [fact for each in made if (fact := each(cluster)) is not None]


def extremes(
    assumed: float, tried: Mapping[str, Iterable[tuple[float, V]]]
) -> tuple[dict[str, V], dict[str, V], dict[str, float]]:
    """The values of facts that make a figure smallest and largest, and by how much each fact alone changes it.

    `assumed` is the figure of the assumed values. `tried` has for each fact its other values with the figure of each.

    >>> extremes(1.0, {"cards": [(1.5, 4), (1.6, 8)], "share": [(0.9, 0.82), (1.1, 0.92)]})[:2]
    ({'share': 0.82}, {'cards': 8, 'share': 0.92})
    """
    lowest: dict[str, V] = {}
    highest: dict[str, V] = {}
    changes = {}
    for name, pairs in tried.items():
        found = [*pairs]
        (least, small), (most, large) = min(found, key=_figure), max(found, key=_figure)
        lowest |= {name: small} if least < assumed else {}
        highest |= {name: large} if most > assumed else {}
        changes[name] = max(most, assumed) - min(least, assumed)
    return lowest, highest, changes


def _figure(pair: tuple[float, Any]) -> float:
    return pair[0]


# ---- the facts


def _speed(cluster: Cluster) -> ClusterFact | None:
    names = dict.fromkeys(kind.gpu for kind in cluster.machines if kind.gpu and _leaves_speed(kind))
    if not names:
        return None
    return ClusterFact(
        name="the speed of a GPU",
        key="machines[].compute.seconds",
        assumed=f"that of the catalogue for {' and '.join(names)}",
        values={words: partial(_with_speed, factor=factor) for words, factor in SPEEDS.items()},
        state="machines: [{..., compute: {seconds: SECONDS}}]",
        look="Time a step of this job on one GPU.",
    )


def _leaves_speed(kind: Machines) -> bool:
    compute = kind.compute
    return kind.gpu is not None and compute.seconds is not None and "seconds" not in compute.model_fields_set


def _with_speed(cluster: Cluster, factor: float) -> Cluster:
    def faster(kind: Machines) -> Machines:
        seconds = (kind.compute.seconds or 0.0) / factor
        return kind.changed(compute=kind.compute.changed(seconds=max(seconds, kind.compute.call or 0.0)))

    return cluster.changed(machines=tuple(faster(kind) if _leaves_speed(kind) else kind for kind in cluster.machines))


def _inside(cluster: Cluster) -> ClusterFact | None:
    kinds = [kind for kind in cluster.machines if _leaves_inside(cluster, kind)]
    known = {None if kind.gpu is None else device_inside(kind.gpu).kind for kind in kinds}
    if not known - {"mesh", "switch"}:
        return None
    usual = next(iter(known)) if len(known) == 1 else None
    names = [name for name in (INSIDE if None in known else PCIE) if name != usual]
    assumed = "a slot of PCIe 3" if usual is None else INSIDE_WORDS[usual]
    shown = usual_inside(kinds[0].gpu, names[0])
    return ClusterFact(
        name="the links inside a machine",
        key="machines[].inside.kind",
        assumed=assumed,
        values={INSIDE_WORDS[name]: partial(_with_inside, name=name) for name in names},
        state=f"inside: {{kind: {shown.kind}, bandwidth: {units.as_memory_rate(shown.bandwidth)}}}",
        look="nvidia-smi topo -m shows them.",
        in_line={"inside": shown.kind},
    )


def _leaves_inside(cluster: Cluster, kind: Machines) -> bool:
    if kind.workers == 1 or kind.inside is not None or cluster.inside.model_fields_set:
        return False
    return kind.gpu is None or device_inside(kind.gpu).kind in (None, *PCIE)


def _with_inside(cluster: Cluster, name: str) -> Cluster:
    return cluster.changed(
        machines=tuple(
            kind.changed(inside=usual_inside(kind.gpu, name)) if _leaves_inside(cluster, kind) else kind
            for kind in cluster.machines
        )
    )


def _cards(cluster: Cluster) -> ClusterFact | None:
    kinds = [kind for kind, card in _kinds_with_cards(cluster) if "count" not in card.model_fields_set]
    gpus = max((kind.workers for kind in kinds), default=1)
    several = [count for count in (CARDS if _fastest(cluster) >= MANY_CARDS else PORTS) if count <= gpus]
    if not several:
        return None
    return ClusterFact(
        name="the network cards of a machine",
        key="card.count",
        assumed="one",
        values={f"{count} cards": partial(_with_card, given={"count": count}) for count in several},
        state=f"card: {{count: {several[-1]}}}",
        look="nvidia-smi topo -m shows them.",
        in_line={"cards": several[-1]},
    )


def _transport(cluster: Cluster) -> ClusterFact | None:
    cards = [card for _, card in _kinds_with_cards(cluster)]
    if not cards:
        return None
    if all({"transport", "flow"} & card.model_fields_set for card in cards):
        return _by_tcp(cluster, cards) or _by_rdma(cards)
    return ClusterFact(
        name="the transport of the network",
        key="card.transport",
        assumed="RDMA at 88 % of a card",
        values=_shares() | _flows(cluster),
        state="card: {transport: rdma} or {transport: tcp}",
        look="NCCL_DEBUG=INFO names it: NET/IB or NET/Socket.",
        in_line={"transport": "rdma"},
    )


def _by_rdma(cards: Iterable[Card]) -> ClusterFact | None:
    if all("share" in card.model_fields_set or card.transport == "tcp" for card in cards):
        return None
    return ClusterFact(
        name="the share of a card that RDMA uses",
        key="card.share",
        assumed="RDMA at 88 % of a card",
        values=_shares(),
        state="card: {share: 0.88}",
        look="nccl-tests between two machines measures it.",
    )


def _by_tcp(cluster: Cluster, cards: Iterable[Card]) -> ClusterFact | None:
    if all("flow" in card.model_fields_set or card.transport == "rdma" for card in cards):
        return None
    return ClusterFact(
        name="the flow of TCP",
        key="card.flow",
        assumed="TCP at 13 Gbit/s of a card",
        values=_flows(cluster),
        state="card: {flow: 13 Gbit/s}",
        look="iperf3 between two machines measures it.",
    )


def _shares() -> dict[str, Callable[[Cluster], Cluster]]:
    return {words: partial(_with_card, given={"share": share}) for words, share in SHARES.items()}


def _flows(cluster: Cluster) -> dict[str, Callable[[Cluster], Cluster]]:
    """The values of TCP. Where a flow is wider than the cards, only the hops differ."""
    usual = Card(transport="tcp").share * _fastest(cluster)
    found: dict[str, Callable[[Cluster], Cluster]] = {}
    for flow, hop in FLOWS:
        rate, hops = f"TCP at {units.as_rate(flow)} of a card", f"TCP with hops of {units.as_seconds(hop)}"
        found[rate if flow < usual else hops] = partial(
            _with_card, given={"transport": "tcp", "flow": flow, "hop": hop}
        )
    return found


def _kinds_with_cards(cluster: Cluster) -> list[tuple[Machines, Card]]:
    """The kinds of machines whose messages leave them, with their cards."""
    if sum(kind.count for kind in cluster.machines) == 1:
        return []
    return [(kind, kind.card or cluster.card) for kind in cluster.machines]


def _fastest(cluster: Cluster) -> float:
    return max((kind.link or cluster.link).bandwidth for kind in cluster.machines)


def _with_card(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    """`cluster` with values of cards, where these are not stated."""

    def of(card: Card) -> Card:
        return Card(**{**given, **{name: getattr(card, name) for name in card.model_fields_set}})

    kinds = tuple(kind.changed(card=of(kind.card or cluster.card)) for kind in cluster.machines)
    return cluster.changed(machines=kinds)


def _spread(cluster: Cluster) -> ClusterFact | None:
    if cluster.workers == 1 or not cluster.engine_in_use.spread or "spread" in cluster.engine.model_fields_set:
        return None
    return ClusterFact(
        name="the spread of equal steps",
        key="engine.spread",
        assumed="a spread of 2 %",
        values={words: partial(_with_spread, spread=spread) for words, spread in SPREADS.items()},
        state="engine: {spread: 0.02}",
        look="It is the standard deviation of equal steps of one GPU, over their mean.",
    )


def _with_spread(cluster: Cluster, spread: float) -> Cluster:
    return cluster.changed(engine=cluster.engine.changed(spread=spread))
