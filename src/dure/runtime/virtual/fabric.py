"""The network between machines: uplinks of racks, and lines between sites, which several machines share.

    sites: [{machines: 32}, {machines: 16}]           # machines 0 to 31, and machines 32 to 47
    between: {bandwidth: 1 Gbit/s, latency: 30 ms}    # of any two sites
    racks: {machines: 16, oversubscription: 3}        # consecutive machines of a site

Racks are counted anew at each site, and the last rack of a site may have fewer machines. A message to another rack
takes the uplink of its own rack and the downlink of the other one. To another site it takes the line there too:

    bandwidth of an uplink, and of a downlink    of all cards of the rack / oversubscription
    bandwidth of a line                          as given, in each direction
    latency                                      of the cards, of leaving a rack (`racks.latency`), of the line

At an oversubscription of 1 an uplink carries as much as all cards of its rack. Then messages share the cards alone.
Machines of servers are at the first site and in no rack: their messages take the uplink or downlink of the other end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from dure.core import units
from dure.core.collective_cost import SharedLink, Transit
from dure.core.units import Rate, Seconds
from dure.core.validated import FieldError, Validated

MOST_SITES = 100
"""Each two sites have a line in each direction."""

_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Racks(Validated):
    """Racks of consecutive machines, each behind an uplink."""

    machines: _Count
    """Consecutive machines of a rack. The last rack of a site may have fewer."""
    oversubscription: float = Field(default=1.0, ge=1, le=1e6)
    """Bandwidth of all cards of a rack, over that of its uplink."""
    latency: Seconds = 0.0
    """Time of a message between two racks beside the latency of the cards."""


class Site(Validated):
    """A site with the next machines of the cluster."""

    machines: _Count
    """Machines of the site: the next ones, in the order of the cluster's `machines`. The sites have all machines
    together.
    """


class SiteLine(Validated):
    """The line between two sites."""

    bandwidth: Rate
    """Bandwidth of each direction of the line between two sites."""
    latency: Seconds
    """Time of a message over that line beside the latency of the cards."""


class SitePair(SiteLine):
    """The line between two given sites."""

    sites: tuple[Annotated[int, Field(ge=0)], ...]
    """In a list of lines: the numbers of the two sites, from 0. The list names each pair once."""

    @model_validator(mode="after")
    def _two_sites(self) -> SitePair:
        if len(set(self.sites)) != 2 or len(self.sites) != 2:
            raise FieldError(("sites",), f"{list(self.sites)} is no pair: write two different sites, such as [0, 1]")
        return self


def _lines(given: Any) -> str:
    return "pairs" if isinstance(given, (list, tuple)) else "all"


SiteLines = Annotated[
    Annotated[SiteLine, Tag("all")] | Annotated[tuple[SitePair, ...], Tag("pairs")], Discriminator(_lines)
]
"""One line for all pairs of sites, or one for each pair."""


def check_sites(sites: Sequence[Site], between: SiteLine | Sequence[SitePair] | None, machines: int) -> None:
    """Raise `FieldError` unless the sites have all `machines` and each two sites have one line."""
    if not sites:
        if between is not None:
            raise FieldError(("between",), "it joins sites, and there are none: write sites, or leave it out")
        return
    if not 2 <= len(sites) <= MOST_SITES:
        problem = f"the number of sites is {len(sites)}: write 2 to {MOST_SITES}, or leave sites and between out"
        raise FieldError(("sites",), problem)
    total = sum(site.machines for site in sites)
    if total != machines:
        problem = f"they have {total} machines, and the cluster has {machines}: give each machine a site"
        raise FieldError(("sites",), problem)
    if between is None:
        right = "write it, such as between: {bandwidth: 1 Gbit/s, latency: 30 ms}"
        raise FieldError(("between",), f"the line between the sites is not there: {right}")
    if not isinstance(between, SiteLine):
        _check_pairs(len(sites), between)


def _check_pairs(sites: int, pairs: Sequence[SitePair]) -> None:
    missing = dict.fromkeys(combinations(range(sites), 2))
    for i, pair in enumerate(pairs):
        here, there = sorted(pair.sites)
        if there >= sites:
            problem = f"there is no site {there} among {sites}: write 0 to {sites - 1}"
            raise FieldError(("between", i, "sites"), problem)
        if (here, there) not in missing:
            problem = f"sites {here} and {there} have a line already: name each pair once"
            raise FieldError(("between", i, "sites"), problem)
        del missing[here, there]
    if missing:
        names = ", ".join(map(str, map(list, list(missing)[:3]))) + (" and others" if len(missing) > 3 else "")
        raise FieldError(("between",), f"the line of the sites {names} is missing: name each pair once")


class Fabric:
    """The shared links of a cluster with racks or sites. `cards`: the bandwidth of all cards of each machine."""

    def __init__(
        self,
        cards: Sequence[float],
        racks: Racks | None,
        sites: Sequence[Site],
        between: SiteLine | Sequence[SitePair] | None,
    ) -> None:
        self.racks = racks
        self._sites: list[range] = []  # the machines of each site
        self._site_of: list[int] = []  # of each rack; a site without racks counts as one
        self._rack_of: list[int] = []  # of each machine
        self._uplinks: list[tuple[SharedLink, SharedLink] | None] = []  # up and down, of each rack
        for site in sites or [Site(machines=len(cards))]:
            first = len(self._rack_of)
            self._sites.append(range(first, first + site.machines))
            for machines in _cut(self._sites[-1], racks):
                self._rack_of += [len(self._site_of)] * len(machines)
                self._site_of.append(len(self._sites) - 1)
                self._uplinks.append(_uplink(machines, cards, racks))
        # Servers: beside the racks of the first site; without racks, the first site.
        self._of_servers = 0 if racks is None else len(self._site_of)
        if racks is not None:
            self._site_of.append(0)
            self._uplinks.append(None)
        self._lines = _lines_of(self._sites, between)
        self._transits: dict[tuple[int, int], Transit] = {}

    @property
    def shared_links(self) -> tuple[SharedLink, ...]:
        """All links that several machines share: up and down of each rack, then the lines between sites."""
        up_and_down = [link for pair in self._uplinks if pair is not None for link in pair]
        return (*up_and_down, *(link for link, _ in self._lines.values()))

    def rack_of(self, machine: int) -> int:
        """The number of the rack of a machine; a site without racks counts as one."""
        return self._rack_of[machine] if machine < len(self._rack_of) else self._of_servers

    def transit(self, here: int, there: int) -> Transit | None:
        """The way of a message between two machines beside their cards; None within a rack."""
        racks = self.rack_of(here), self.rack_of(there)
        if racks[0] == racks[1]:
            return None
        if racks not in self._transits:
            self._transits[racks] = self._transit(*racks)
        return self._transits[racks]

    def _transit(self, one: int, other: int) -> Transit:
        up, down = self._uplinks[one], self._uplinks[other]
        links = [] if up is None else [up[0]]
        latency = 0.0 if self.racks is None else self.racks.latency
        line = self._lines.get((self._site_of[one], self._site_of[other]))
        if line is not None:
            links.append(line[0])
            latency += line[1]
        return Transit((*links, *([] if down is None else [down[1]])), latency)

    def about(self) -> str:
        """The racks and the sites in a few words."""
        found = []
        if self.racks is not None:
            count, factor = self._of_servers, self.racks.oversubscription
            found.append(f"{count} rack{'s' if count > 1 else ''} with an oversubscription of {factor:g}")
        if self._lines:
            rates = [line.bandwidth for line, _ in self._lines.values()]
            ends = dict.fromkeys(units.as_rate(end(rates)) for end in (min, max))
            found.append(f"{len(self._sites)} sites with {' to '.join(ends)} between them")
        return ", ".join(found)


def _cut(site: range, racks: Racks | None) -> Iterator[range]:
    size = len(site) if racks is None else racks.machines
    return (site[first : first + size] for first in range(0, len(site), size))


def _uplink(machines: range, cards: Sequence[float], racks: Racks | None) -> tuple[SharedLink, SharedLink] | None:
    """Up and down of a rack; None where it carries as much as the cards."""
    if racks is None or racks.oversubscription == 1:
        return None
    bandwidth = sum(cards[machine] for machine in machines) / racks.oversubscription
    return SharedLink("uplink", bandwidth, machines), SharedLink("downlink", bandwidth, machines)


def _lines_of(
    sites: Sequence[range], between: SiteLine | Sequence[SitePair] | None
) -> dict[tuple[int, int], tuple[SharedLink, float]]:
    """The line from each site to each other, and its latency."""
    if between is None:
        return {}
    if isinstance(between, SiteLine):
        of_pair = dict.fromkeys(combinations(range(len(sites)), 2), between)
    else:
        of_pair = {(min(pair.sites), max(pair.sites)): pair for pair in between}
    found = {}
    for here, there in permutations(range(len(sites)), 2):
        line = of_pair[min(here, there), max(here, there)]
        found[here, there] = SharedLink("line", line.bandwidth, sites[here]), line.latency
    return found
