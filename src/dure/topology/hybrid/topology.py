"""A hybrid of collectives and servers in one run: servers hold tables in rows, a group of all workers the rest.

    worker k, step t                                     every server
      read: the rows of its batch at version t ---------->  once version t is there
      <-------------------------------------------- values
      gradient; the dense part around the ring
      push: the rows touched, times the worker's share -->  kept until all have come; then added up in rank
      <-------------------------------------- has it -----  order, one step of the optimizer: version t + 1

Every worker is needed: a server makes a step once all have pushed. A worker whose batch touches no row of a server
pushes a message without a payload.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address, Apply, Call, Node, Operation, Reply, TensorSpec
from dure.core.protocol import COUNT, DRIVER, OWN, RATE, WORKERS, RemoteService, carrying, remote
from dure.core.state import State, with_prefix
from dure.core.vectors import all_finite
from dure.errors import Quarantined, Refused, StrategyError, UsageError
from dure.job.gradient import ServerGradient
from dure.job.optimizer import (
    FlatOptimizer,
    GroupRange,
    OptimizerSpec,
    RangesOptimizer,
    RowOptimizer,
    leaves_alone,
    restrict,
    vectors_of,
)
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.hybrid.placement import (
    MEASURED,
    ClusterShape,
    Placement,
    Rows,
    ServerPart,
    Table,
    decide,
    measure,
    rows_read,
    scatter,
)

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group
    from dure.job.data.dataset import Batch
    from dure.job.gradient import Gradient, GradientWork
    from dure.job.gradient_engine import GradientEngine
    from dure.topology.hybrid.choice import Hybrid
    from dure.topology.replica import WorkerReplica


def check_rule(spec: OptimizerSpec) -> None:
    """Raises `StrategyError` for an optimizer that would have to step rows that no batch touched."""
    if not leaves_alone(spec):
        raise StrategyError(
            f'"{spec}" moves rows whose gradient is zero, and servers of rows get only those that a batch touched. '
            "Use sgd or adagrad without momentum and weight decay, or topology hybrid:servers=none."
        )


def of_table(spec: OptimizerSpec, segments: Sequence[GroupRange], table: Table) -> tuple[OptimizerSpec, int]:
    """The optimizer of a table, which is one parameter, and its group."""
    for segment in segments:
        if segment.start <= table.start < segment.stop:
            return replace(spec, **segment.overrides), segment.group
    return spec, 0


class _Given(NamedTuple):
    """The push of one worker: `rows` has numbers and values (count, width) of each table."""

    whole: torch.Tensor
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    lr: float | Sequence[float] | None

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + sum(values.nbytes for _, values in self.rows)


def added(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of several workers' rows, in their order: each row that one of them has, ascending; its values.

    >>> rows, values = added([(torch.tensor([1, 4]), torch.ones(2, 1)), (torch.tensor([0, 4]), torch.ones(2, 1))])
    >>> rows.tolist(), values.squeeze(1).tolist()
    ([0, 1, 4], [1.0, 1.0, 2.0])
    """
    union, places = torch.unique(torch.cat([rows for rows, _ in parts]), return_inverse=True)
    total = parts[0][1].new_zeros(len(union), parts[0][1].shape[1])
    for place, (_, values) in zip(torch.split(places, [len(rows) for rows, _ in parts]), parts, strict=True):
        total.index_add_(0, place, values)
    return union, total


class RowShard(RemoteService):
    """One server of a hybrid: a service.

    `part` is what it holds, `values` that part's initial values (copied), `segments` the parameter groups of the whole
    model. Row numbers count through all its tables; on the wire a number is an int32. They ascend, and rows have the
    order of their numbers. `version` is the number of steps made.
    """

    called = "a server of rows"

    def __init__(
        self,
        node: Node,
        part: ServerPart,
        values: torch.Tensor,
        spec: OptimizerSpec,
        workers: int,
        segments: Sequence[GroupRange] = (),
    ) -> None:
        self.node = node
        self.part = part
        self.workers = workers
        self.values = values.clone()
        self.version = 0
        self.applied = 0
        self.refused = 0
        self._head = part.head
        self._shapes = part.shapes
        whole = restrict(restrict(segments, part.plan.whole), [part.whole])
        self._optimizer = FlatOptimizer(spec, self._head, values.dtype, segments=whole, device=values.device)
        self._rules = [
            RowOptimizer(own, values, group)
            for table, values in zip(part.plan.tables, self._tables(), strict=True)
            for own, group in [of_table(spec, segments, table)]
        ]
        self._given: dict[int, _Given] = {}
        self._awaited: list[tuple[int, Operation[None]]] = []

    @property
    def staleness(self) -> dict[int, int]:
        return {0: self.applied} if self.applied else {}

    @property
    def numbers(self) -> TensorSpec:
        """Row numbers as a tensor of a call."""
        return TensorSpec("int32", sum(rows for rows, _ in self._shapes), at_most=True)

    @property
    def pushed(self) -> Sequence[TensorSpec]:
        """The tensors of a push."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        rows = TensorSpec(dtype, len(self.values) - self._head, at_most=True)
        return TensorSpec(dtype, self._head), self.numbers, rows

    # ---- readers

    @remote(WORKERS, version=COUNT)
    @carrying(lambda shard: (shard.numbers,))
    def _read(self, call: Call) -> Reply | Awaitable[Reply]:
        """The parameters that are held whole, then the rows that the call numbers; once that version is there."""
        return self._when_there(call, partial(self._rows, self._counted(call.tensors[0])))

    @remote(WORKERS, worker=OWN, version=COUNT, lr=RATE)
    @carrying(lambda shard: shard.pushed)
    def _push(self, call: Call) -> Reply | Awaitable[Reply]:
        """Take the gradient of what is held whole, row numbers and rows; the last one makes the step."""
        worker = call.fields["worker"]
        whole, numbers, values = call.tensors
        rows = self._counted(numbers)
        sizes = [len(each) * width for each, (_, width) in zip(rows, self._shapes, strict=True)]
        self._check(worker, call.fields["version"], sum(sizes), values, whole)
        # Copies: they are kept until all have pushed, and the memory of a request is used for others once answered.
        cut = zip(torch.split(values.clone(), sizes), rows, self._shapes, strict=True)
        own = [(each, part.view(len(each), width)) for part, each, (_, width) in cut]
        self._given[worker] = _Given(whole.clone(), own, call.fields["lr"])
        return Reply() if len(self._given) < self.workers else self._step()

    @remote(WORKERS, version=COUNT)
    def _copy(self, call: Call) -> Reply | Awaitable[Reply]:
        """All values; once that version is there."""
        return self._when_there(call, lambda: Reply(tensors=[self.values]))

    @remote(DRIVER, WORKERS)
    def _status(self, call: Call) -> Reply:
        """The counters."""
        counts = {"version": self.version, "applied": self.applied, "refused": self.refused}
        return Reply({**counts, "staleness": {str(key): count for key, count in self.staleness.items()}})

    def _when_there(self, call: Call, answer: Callable[[], Reply]) -> Reply | Awaitable[Reply]:
        version = call.fields["version"]
        if version < self.version:
            raise Refused(f"version {version} is gone from {self.node.name}, which is at {self.version}.")
        if version == self.version:
            return answer()
        there = self.node.promise(f"version {version} of the rows at {self.node.name}")
        self._awaited.append((version, there))  # now: the version may come before a coroutine has its first turn
        return self._later(there, answer)

    async def _later(self, there: Operation[None], answer: Callable[[], Reply]) -> Reply:
        await there
        return answer()

    def _rows(self, rows: Sequence[torch.Tensor]) -> Reply:
        """The reply to a `read`."""
        # The parameters that are held whole are lent, not copied: they change in the step that all workers push for,
        # and each worker pushes after it has read.
        found = [table[numbers].reshape(-1) for table, numbers in zip(self._tables(), rows, strict=True)]
        return Reply(tensors=[self.values[: self._head], torch.cat([self.values[:0], *found])])

    def _tables(self) -> list[torch.Tensor]:
        """Views (rows, width) of its part of each table."""
        at, tables = self._head, []
        for rows, width in self._shapes:
            tables.append(self.values[at : at + rows * width].view(rows, width))
            at += rows * width
        return tables

    def _counted(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Split numbers that count through all tables by table. Raises `Refused` for any out of range or of order."""
        total = sum(rows for rows, _ in self._shapes)
        in_order = bool((numbers.diff() > 0).all())
        if len(numbers) and not (in_order and int(numbers[0]) >= 0 and int(numbers[-1]) < total):
            self.refused += 1
            raise Refused(f"{self.node.name} was asked for rows that are none of its {total}, or not in their order.")
        at, found = 0, []
        for rows, _ in self._shapes:
            low, high = torch.searchsorted(numbers, numbers.new_tensor([at, at + rows])).tolist()
            found.append(numbers[low:high].long() - at)
            at += rows
        return found

    # ---- gradients come in

    def _check(self, worker: int, version: int, expected: int, *tensors: torch.Tensor) -> None:
        wrong = ""
        if version != self.version or worker in self._given or not 0 <= worker < self.workers:
            wrong = f"is of step {version}, and {self.node.name} is at {self.version}, or has come before"
        elif len(tensors[0]) != expected:
            wrong = f"has {len(tensors[0])} numbers for rows of {expected}"
        elif not all(bool(torch.isfinite(each).all()) for each in tensors):
            wrong = "is not finite: the training diverged. Try a lower learning rate"
        if wrong:
            self.refused += 1
            raise Refused(f"the update of worker {worker} {wrong}.")

    async def _step(self) -> Reply:
        """Make one step of the optimizer by the sum of all workers' gradients."""
        # In rank order, whatever the order of arrival: so the sum rounds the same way in every run.
        given = [self._given[worker] for worker in range(self.workers)]
        self._given = {}
        await self.node.compute(Apply(partial(self._apply, given), sum(each.nbytes for each in given)))
        self.version += 1
        self.applied += 1
        for version, promise in self._awaited:
            if version == self.version:
                promise.resolve()
        self._awaited = [(version, promise) for version, promise in self._awaited if version > self.version]
        return Reply()

    def _apply(self, given: Sequence[_Given]) -> None:
        lr = given[0].lr
        if self._head:
            head, total = self.values[: self._head], given[0].whole
            for each in given[1:]:
                total += each.whole
            self._optimizer.apply(head, total, head, lr=lr)
        for number, (table, rule) in enumerate(zip(self._tables(), self._rules, strict=True)):
            touched = [each.rows[number] for each in given if len(each.rows[number][0])]
            if touched:
                rule.apply(table, *added(touched), lr)

    # ---- checkpoints

    def state(self) -> State:
        """The state that a checkpoint keeps between two steps; a copy."""
        counts = {"version": self.version, "applied": self.applied, "refused": self.refused}
        state = State({"values": self.values}, counts) | self._optimizer.state().under("whole", "optimizer")
        for number, rule in enumerate(self._rules):
            state.tensors |= with_prefix(f"table{number}.", rule.vectors)
        return state.cloned()

    def restore(self, state: State) -> None:
        """Continue from `state`, on a fresh server."""
        tensors, plain = state.tensors, state.plain
        self.values.copy_(tensors["values"])
        self._optimizer.restore(state.part("whole", "optimizer"))
        for number, rule in enumerate(self._rules):
            for name, vector in rule.vectors.items():
                vector.copy_(tensors[f"table{number}.{name}"])
        self.version, self.applied = int(plain["version"]), int(plain["applied"])
        self.refused = int(plain["refused"])


class RowClient:
    """A worker's calls to the servers of a hybrid.

    `rows` is the job's (`Job.rows`). Where `copies(version)` is true, all of that version is read, not only the rows of
    the batch: then the worker's parameters are the model.
    """

    def __init__(self, node: Node, rank: int, plan: Placement, rows: Rows | None, servers: Sequence[Address]) -> None:
        self.node = node
        self.rank = rank
        self.plan = plan
        self.copies: Callable[[int], bool] = lambda version: False
        self._job_rows = rows
        self._servers = [(address, plan.part(number)) for number, address in enumerate(servers)]
        self._read: list[torch.Tensor] = []

    async def read(self, inputs: Batch, params: torch.Tensor, version: int) -> None:
        """Read the parameters that a batch needs from the servers into `params`, once these are at `version`."""
        plan = self.plan
        self._read = [rows_read(self._job_rows, inputs, table) for table in plan.tables if self._job_rows is not None]
        if self.copies(version):
            await self.copy(params, version)
            return
        asked = []
        for address, part in self._servers:
            rows = [each[part.own(each)] for each in self._read]
            count = sum(len(each) * table.width for each, table in zip(rows, plan.tables, strict=True))
            into = params.new_empty(part.head), params.new_empty(count)
            # A push must not reach a server before it has made the last step. An answer to this call shows that it has;
            # around a ring, all workers have pushed for the last step before any pushes for this one.
            if part.head or count or not plan.ring:
                call = self.node.call(address, "read", part.numbered(rows), into=into, version=version)
                asked.append((part, rows, into, call))
        for part, rows, (whole, values), reply in asked:
            await reply
            scatter(params, plan.whole, part.whole[0], whole)
            sizes = [len(each) * table.width for each, table in zip(rows, plan.tables, strict=True)]
            for table, numbers, own in zip(plan.tables, rows, torch.split(values, sizes), strict=True):
                table.of(params)[numbers] = own.view(-1, table.width)

    async def copy(self, params: torch.Tensor, version: int) -> None:
        """Read all parameters that servers hold, at `version`, into `params`."""
        into = [params.new_empty(part.numel) for _, part in self._servers]
        replies = [
            self.node.call(address, "copy", into=(values,), version=version)
            for (address, _), values in zip(self._servers, into, strict=True)
        ]
        for (_, part), values, reply in zip(self._servers, into, replies, strict=True):
            await reply
            part.put_into(params, values)

    async def push(self, gradient: ServerGradient, version: int, lr: Any = None) -> None:
        """Push this worker's gradient for the step from `version`; returns once all servers have it.

        Raises `UsageError` if the gradient touches rows that the job did not say it reads.
        """
        for table, read, (rows, _) in zip(self.plan.tables, self._read, gradient.rows, strict=True):
            _check_touched(table.name, read, rows)
        replies = []
        for address, part in self._servers:
            own = [(rows[mask], values[mask]) for rows, values in gradient.rows for mask in (part.own(rows),)]
            values = torch.cat([gradient.whole[:0], *(values.reshape(-1) for _, values in own)])
            tensors = gradient.whole[slice(*part.whole)], part.numbered([rows for rows, _ in own]), values
            replies.append(self.node.call(address, "push", *tensors, worker=self.rank, version=version, lr=lr))
        for reply in replies:
            await reply


def _check_touched(name: str, read: torch.Tensor, touched: torch.Tensor) -> None:
    places = torch.searchsorted(read, touched)
    known = places < len(read)
    known[known.clone()] = read[places[known]] == touched[known]
    if not bool(known.all()):
        row = int(touched[~known][0])
        raise UsageError(
            f"the gradient touches row {row} of {name}, which Job.rows did not say that the batch reads: its value was "
            "not up to date. Have Job.rows name every row that the loss depends on."
        )


class RowSession:
    """Mean gradients over a group and servers. `client` makes the calls to servers, `group` the collectives."""

    def __init__(self, worker: WorkerReplica, client: RowClient, group: Group) -> None:
        self.client = client
        self._worker = worker
        self._group = group

    async def mean_gradient(self, work: GradientWork) -> Gradient:
        """The mean gradient of the parameters that servers do not hold. The rest is pushed to them, and they step."""
        worker, client = self._worker, self.client
        node, version, started = worker.node, worker.clock, worker.node.now()
        assert work.inputs is not None
        await client.read(work.inputs, worker.params, version)
        read = node.now()
        worker.meter.add("communicate", started, read, "read")
        gradient: Gradient
        if client.plan.ring:
            gradient = await self._group.mean_gradient(work, worker.share)
        else:
            gradient = (await node.compute(work)).scaled(worker.share)
            worker.meter.add("compute", read, node.now())
        worker.check_loss(gradient)
        self._check_parts(gradient)
        started = node.now()
        assert gradient.for_servers is not None
        await client.push(gradient.for_servers, version, worker.lr)
        worker.meter.add("communicate", started, node.now(), "push")
        gradient.checked = True
        return gradient

    def _check_parts(self, gradient: Gradient) -> None:
        """Refuse a gradient that is not finite: a sum over all ranks cannot be skipped by one of them."""
        held = gradient.for_servers
        parts = () if held is None else (held.whole, *(rows for _, rows in held.rows))
        if not all(all_finite(part.reshape(-1)) for part in (gradient.values, *parts)):
            worker = self._worker
            raise Quarantined(
                f"the gradient of worker {worker.rank} in step {worker.clock} holds NaN or infinity, and hybrid skips "
                f"no step. Try a learning rate below {worker.optimizer.spec.lr:g}, and look at the data of this step."
            )


class HybridTopology(Topology):
    """Dense gradients in a group of all workers; servers hold what a step reads few rows of (`rows`)."""

    needs_everybody = True
    uses_engine = True
    no_loop = "a loop does not say which rows its next batch reads"

    def __init__(self, choice: Hybrid, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.colocated = choice.colocated

    @property
    def servers(self) -> int:  # type: ignore[override]
        return self.rows.shards

    def check(self) -> None:
        _ = self.rows

    @cached_property
    def rows(self) -> Placement:
        """The placement, which is the same in every process, since batches are drawn from the seed.

        Raises `StrategyError` where an optimizer or a name does not suit, `UsageError` for a run without data.
        """
        plan, choice = self.plan, self.choice
        if plan.timing_only:
            raise UsageError(
                "a timing-only run has no data, so the rows that its steps read are unknown: leave out timing_only, or "
                "use another topology."
            )
        samplers, data = plan.draw_samplers(), plan.job.train
        batches = [[data.batch(sampler.next())[0] for sampler in samplers] for _ in range(MEASURED)]
        itemsize = plan.replica.params.element_size()
        shape = ClusterShape(plan.workers, choice.shards or plan.workers, choice.colocated, itemsize)
        rows = decide(choice, measure(plan.replica.layers, plan.job.rows, batches), shape)
        for table in rows.tables:
            check_rule(of_table(plan.job.optimizer, plan.model.rates.segments, table)[0])
        return rows

    @property
    def worker_vectors(self) -> float:
        return 0.0

    @property
    def server_vectors(self) -> float:
        # Workers give the gradient of what is held whole, and of rows those that they touched.
        parts = [self.rows.part(number) for number in range(self.servers)]
        whole = sum(part.head for part in parts) / sum(part.numel for part in parts)
        return 1.0 + vectors_of(self.plan.job.optimizer) + self.plan.workers * whole

    def held(self, number: int) -> int:
        return self.rows.part(number).numel

    @property
    def apart(self) -> Sequence[int]:
        return (*self.rows.parts["tables"], *self.rows.parts["whole"])

    def group(self, node: Node, meter: Meter) -> Group:
        return node.group(range(self.plan.workers))

    def shard(self, node: Node, number: int, *, log: bool = False) -> RowShard:
        plan, part = self.plan, self.rows.part(number)
        values = part.taken_from(plan.model.params)
        return RowShard(node, part, values, plan.job.optimizer, plan.workers, plan.model.rates.segments)

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        if not self.servers:
            return
        assert group is not None
        plan = self.plan
        servers = [Address(str(NodeId(SERVER, number)), "shard") for number in range(self.servers)]
        client = RowClient(worker.node, worker.rank, self.rows, plan.job.rows, servers)
        worker.sessions.rows = RowSession(worker, client, group)  # type: ignore[arg-type]
        replica, segments = plan.replica, plan.model.rates.segments
        worker.optimizer = RangesOptimizer(
            plan.job.optimizer, self.rows.ring, replica.dtype, segments=segments, device=replica.device
        )

    def result(self, shards: Sequence[Any], models: Sequence[torch.Tensor]) -> torch.Tensor:
        values = super().result(shards, models)
        if shards:
            values = values.clone()
        for shard in shards:
            shard.part.put_into(values, shard.values)
        return values

    def configure(self, engine: GradientEngine) -> None:
        if self.servers:
            engine.split_off(self.rows.parts["tables"], self.rows.parts["whole"])

    def notes(self) -> Mapping[str, Any]:
        return {"hybrid": self.rows.described()}
