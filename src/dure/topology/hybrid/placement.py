"""Placement of parameters: through servers, or around the ring. The sparsity-aware hybrid of Parallax.

Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019.

    for each parameter of V bytes, at every step, with N workers     bytes in and out of each machine
        its gradient is dense                        all_reduce       4 V (N - 1) / N
        a worker reads a share `a` of its R rows     servers          4 a V (N - 1) / N + 16 a R (N - 1) / N
            if that moves fewer bytes, else          all_reduce       4 V (N - 1) / N

| in the paper                     | here                                                                             |
|----------------------------------|----------------------------------------------------------------------------------|
| alpha, the share of rows         | `Use.rows`: distinct rows that a worker's batch reads (`Job.rows`), the mean over |
|                                  | the first `MEASURED` batches of every worker                                     |
| servers beside the workers       | `shards` of them; row r of a table is on server r modulo `shards`                |
| a server waits for all workers   | so does ours: it adds their rows up in rank order and makes one step             |
| all_gather of rows, as Horovod's | counted for comparison; from three workers on it always moves more than servers  |

This rule spreads rows that are read often even if they are neighbors, as in a vocabulary sorted by frequency. With
equal ranges of the vocabulary of `embedding-text`, the first of eight servers has most of the traffic.

The number of a row takes 4 bytes; a worker sends those that it reads, and again those that its gradient touches, so
that it exchanges W = 2 a (V + 4 R) with servers. With S of them beside as many workers, the busiest machine has
W (1 + (N - 2) / S) in and out: a worker's own, but for what stays on the machine, and a server's share of the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from dure.core.spec_text import names, nearest
from dure.core.vectors import Ranges, ShapedSlice, equal_ranges, gather, size
from dure.errors import StrategyError, UsageError

if TYPE_CHECKING:
    from dure.job.data.dataset import Batch
    from dure.topology.hybrid.choice import Hybrid

MEASURED = 4
"""Batches of each worker that are measured before the run."""

NUMBER_NBYTES = 4
"""Bytes of a row's number on its way."""


class Slice(ShapedSlice, Protocol):
    """The place of a parameter among the flat parameters, such as a `replica.Layer`."""

    @property
    def name(self) -> str: ...


class Table(NamedTuple):
    """A parameter that servers hold in rows: `rows` of `width` numbers, from `start` on in the flat parameters."""

    name: str
    start: int
    rows: int
    width: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view (rows, width) of this table in `flat`, all parameters."""
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)


class PlacementCost(NamedTuple):
    """Bytes in and out of the busiest machine per step, by each way."""

    servers: float
    all_reduce: float
    all_gather: float


class ClusterShape(NamedTuple):
    """The numbers of workers and servers, and whether servers are on the workers' machines."""

    workers: int
    shards: int
    colocated: bool
    itemsize: int

    @property
    def exchanged(self) -> float:
        """The bytes at the busiest machine, as a multiple of what one worker exchanges with servers."""
        if self.colocated:
            return 1 + (self.workers - 2) / min(self.shards, self.workers)
        return max(1.0, self.workers / self.shards)


class Use(NamedTuple):
    """A parameter, and how much of it a step uses. `rows` is None where a batch always reads all of it."""

    layer: Slice
    rows: float | None
    union: float | None = None

    def cost(self, place: ClusterShape) -> PlacementCost:
        """The bytes of each way. A dense gradient has no row numbers."""
        n = place.workers
        nbytes = (self.layer.stop - self.layer.start) * place.itemsize
        used = float(nbytes) if self.rows is None else self.rows * (nbytes / self.layer.shape[0] + NUMBER_NBYTES)
        return PlacementCost(2 * used * place.exchanged, 4 * nbytes * (n - 1) / n, 2 * used * (n - 1))

    def by_servers(self, place: ClusterShape) -> bool:
        """Whether servers move fewer bytes, of a parameter of which a batch reads only some rows."""
        cost = self.cost(place)
        return self.rows is not None and cost.servers < cost.all_reduce


@dataclass(frozen=True)
class Placement:
    """The way of each parameter: through servers, or by all_reduce.

    Servers hold `tables` in rows, and of the flat parameters the ranges `whole` whole; all workers reduce `ring`.
    `parts` are the numbers of the parameters in each.
    """

    shards: int
    tables: Sequence[Table]
    whole: Ranges
    ring: Ranges
    parts: Mapping[str, Sequence[int]]
    uses: Sequence[Use]
    place: ClusterShape

    def described(self) -> dict[str, Any]:
        """An entry of the record for each parameter: its way, the share that is read, and the bytes of each way."""
        where = {index: part for part, indices in self.parts.items() for index in indices}
        return {use.layer.name: self._described(use, where[index]) for index, use in enumerate(self.uses)}

    def _described(self, use: Use, part: str) -> dict[str, Any]:
        said: dict[str, Any] = {"by": "all_reduce" if part == "ring" else "servers"}
        if use.rows is not None:
            count = use.layer.shape[0]
            said |= {"share_read": use.rows / count, "share_read_by_all": (use.union or 0.0) / count}
        return said | {"nbytes": use.cost(self.place)._asdict()}

    def part(self, number: int) -> ServerPart:
        """The part of the model that server `number` holds."""
        return ServerPart(number, equal_ranges(size(self.whole), self.shards)[number], self)


class ServerPart(NamedTuple):
    """The part of server `number`: the range `whole` of the parameters that are held whole, and its rows of each table.

    Its values are one flat vector: `whole` first, then the rows of each table. Its row numbers count through all
    tables.
    """

    number: int
    whole: tuple[int, int]
    plan: Placement

    @property
    def head(self) -> int:
        """Elements that are held whole."""
        return self.whole[1] - self.whole[0]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, width) of its part of each table."""
        return [(len(range(self.number, t.rows, self.plan.shards)), t.width) for t in self.plan.tables]

    @property
    def numel(self) -> int:
        return self.head + sum(rows * width for rows, width in self.shapes)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """A mask of those `rows` of a table that this server holds."""
        return rows % self.plan.shards == self.number

    def numbered(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of each table, all here and ascending, as their numbers here: int32."""
        first = 0
        numbers = []
        for each, (count, _) in zip(rows, self.shapes, strict=True):
            numbers.append(each // self.plan.shards + first)
            first += count
        return torch.cat(numbers).int() if numbers else torch.empty(0, dtype=torch.int32)

    def taken_from(self, flat: torch.Tensor) -> torch.Tensor:
        """Its values out of all parameters; a copy."""
        tables = [table.of(flat)[self.number :: self.plan.shards].reshape(-1) for table in self.plan.tables]
        return torch.cat([gather(flat, self.plan.whole)[slice(*self.whole)], *tables])

    def put_into(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Write its values to where they belong in all parameters."""
        scatter(flat, self.plan.whole, self.whole[0], values[: self.head])
        at = self.head
        for table, (rows, width) in zip(self.plan.tables, self.shapes, strict=True):
            table.of(flat)[self.number :: self.plan.shards] = values[at : at + rows * width].view(rows, width)
            at += rows * width


def scatter(flat: torch.Tensor, ranges: Ranges, first: int, values: torch.Tensor) -> None:
    """Write `values` into `ranges` of `flat`, seen as one vector, from its element `first` on."""
    last, at = first + len(values), 0
    for start, stop in ranges:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            flat[start + low - at : start + high - at] = values[low - first : high - first]
        at += stop - start


Rows = Callable[[Any], Mapping[str, torch.Tensor]]


def rows_read(rows: Rows, inputs: Batch, table: Table) -> torch.Tensor:
    """The rows of `table` that a batch reads, each once, ascending. Raises `UsageError` for what are no rows of it."""
    said = rows(inputs)
    if table.name not in said:
        raise UsageError(
            f"Job.rows names {names(said) or 'nothing'} for this batch, and not {table.name} as for the first one: "
            "give the rows of the same parameters for every batch."
        )
    found: torch.Tensor = torch.unique(said[table.name])
    if found.dtype != torch.int64 or (len(found) and not 0 <= int(found[0]) <= int(found[-1]) < table.rows):
        what = f"{found.dtype}, {found[:1].tolist()} to {found[-1:].tolist()}"
        raise UsageError(
            f"Job.rows must give int64 row numbers from 0 to {table.rows - 1} for {table.name}, got {what}."
        )
    return found


def table_of(layer: Slice) -> Table:
    """`layer` as a table: a row for each place in its first dimension."""
    return Table(layer.name, layer.start, layer.shape[0], (layer.stop - layer.start) // max(layer.shape[0], 1))


def measure(layers: Sequence[Slice], rows: Rows | None, steps: Sequence[Sequence[Batch]]) -> list[Use]:
    """Measure how much of each parameter `steps` use; each has the inputs of every worker's batch."""
    declared = set(rows(steps[0][0])) if rows is not None else set()
    unknown = declared - {layer.name for layer in layers if len(layer.shape) > 1}
    if unknown:
        known = [layer.name for layer in layers if len(layer.shape) > 1]
        raise UsageError(f"Job.rows names {names(sorted(unknown))}; parameters with rows are {names(known)}.")
    return [_use(layer, rows if layer.name in declared else None, steps) for layer in layers]


def _use(layer: Slice, rows: Rows | None, steps: Sequence[Sequence[Batch]]) -> Use:
    if rows is None:
        return Use(layer, None)
    table = table_of(layer)
    found = [[rows_read(rows, inputs, table) for inputs in step] for step in steps]
    counts = [len(each) for step in found for each in step]
    unions = [len(torch.unique(torch.cat(step))) for step in found]
    return Use(layer, sum(counts) / len(counts), sum(unions) / len(unions))


def decide(topology: Hybrid, uses: Sequence[Use], place: ClusterShape) -> Placement:
    """Decide which parameters servers hold. Raises `StrategyError` for a name that is no parameter's."""
    held = [index for index, use in enumerate(uses) if _is_held(topology.servers, use, place)]
    known = [use.layer.name for use in uses]
    for name in topology.servers:
        if name not in ("auto", "none", "all", *known):
            raise StrategyError(f'no parameter is called "{name}": there are {names(known)}.{nearest(name, known)}')
    tables = [index for index in held if uses[index].rows is not None]
    parts = {
        "tables": tables,
        "whole": [index for index in held if index not in tables],
        "ring": [index for index in range(len(uses)) if index not in held],
    }
    whole, ring = ([_range(uses[index].layer) for index in parts[part]] for part in ("whole", "ring"))
    shards = place.shards if held else 0
    return Placement(shards, [table_of(uses[i].layer) for i in tables], whole, ring, parts, uses, place)


def _is_held(servers: Sequence[str], use: Use, place: ClusterShape) -> bool:
    return use.layer.name in servers or "all" in servers or ("auto" in servers and use.by_servers(place))


def _range(layer: Slice) -> tuple[int, int]:
    return layer.start, layer.stop
