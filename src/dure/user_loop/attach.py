"""`dure.attach`: a method of `sync/` in a training loop that the user owns.

    replica = dure.attach(model, optimizer, sync="ssp:bound=3")
    for x, y in loader:
        loss_fn(model(x), y).backward()
        replica.step()                      # in place of optimizer.step() and zero_grad()

It runs alone, or at every rank that `torchrun` starts.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from dure.errors import UsageError
from dure.job.replica import Replica
from dure.partition.methods.zero import Zero
from dure.partition.whole import Whole
from dure.run.strategy import Strategy, catalogue, member_text, name_of, resolved
from dure.runtime.launch.monitor import RankMonitor
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous, credentials_of, met, place
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity, WireLimits
from dure.sync.base import traits_of
from dure.sync.worker_state import Boundary, WorkerState
from dure.topology.base import topology_of
from dure.topology.gossip.choice import Gossip
from dure.user_loop.attached import Attached, report_failure
from dure.user_loop.checks import check_unwrapped
from dure.user_loop.gossip import LoopGossip
from dure.user_loop.groups import Lines, PartReplica, check_across, check_strategy, place_of
from dure.user_loop.optimizer import UserOptimizer, check_free, check_step, unwrapped
from dure.user_loop.peers import LoopCollectives
from dure.user_loop.saved import model_text
from dure.user_loop.servers import LoopServers, name_of_run
from dure.user_loop.shards import LoopShards
from dure.user_loop.source import LoopSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dure.codec.base import Codec
    from dure.run.strategy import Partition
    from dure.runtime.wire import Credentials
    from dure.runtime.wire.seals import Integrity
    from dure.sync.base import Sync
    from dure.topology.collective.choice import Collective
    from dure.topology.parameter_server.choice import ParameterServer
    from dure.user_loop.attached import Ties


BufferRule = Literal["mean", "rank0"]
"""The rule by which the buffers of all ranks become one."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sync: Sync | str | None = None,
    topology: Collective | ParameterServer | Gossip | str | None = None,
    codec: Codec | str | None = None,
    partition: Partition | str | None = None,
    shard: Zero | str | None = None,
    batch_size: int = 1,
    frozen_after: float = 30.0,
    key_file: str | Path | None = None,
    integrity: Integrity = "mac",
    buffers: BufferRule = "mean",
    across: DeviceMesh | None = None,
) -> Attached:
    """Attach `model` to a method, for a training loop of the user's own on all ranks that were started together.

    Every rank calls this in the same place, with the same model and optimizer; all start from rank 0's values. `sync`,
    `topology` and `codec` are those of a `Strategy`. A `partition` other than "none" is refused, because each rank has
    the whole model; the message names the call to use instead. With `shard="zero:stage=1"` each rank holds the
    optimizer's state of its part of the model alone, with `"zero:stage=2"` also its part of the gradient alone; both
    need `bsp` over collectives, and parameters stay whole at each rank. `batch_size` is this rank's weight in means, if
    batch sizes differ. If a rank or a server sends no heartbeat for `frozen_after` seconds, the training of all ranks
    that wait for it ends.

    A parameter without a gradient in a step (under `bsp` over collectives: at every rank) stays as it is. If servers
    take the step, the missing gradient counts as zero.

    Buffers that training changes, such as running statistics, are each rank's own until the end, and until an
    `evaluation()` that all ranks enter. There `buffers="mean"` averages them, and takes the largest of a count, and
    `buffers="rank0"` takes those of rank 0; the latter, under `bsp` over collectives, also after each step, as
    DistributedDataParallel does.

    The ranks and their servers admit only processes that have the key of the run: the content of `key_file`, 32 random
    bytes or more in a file of mode 0600; without it rank 0 draws one and hands it out through the store where the ranks
    meet. Tensors between machines have an authentication code, or with `integrity="checksum"` a checksum alone.

    `across` is for a model that `fully_shard` has split over one dimension of a device mesh: it is the other dimension,
    along which the method averages the parts that the ranks hold. The method is then `averaging`, `one-shot`, `bmuf`,
    `diloco`, `easgd` or `eamsgd` over collectives. All groups start from the first one's values.

    Raises:
        UsageError: the strategy makes no sense, servers or shards cannot do what the optimizer does, the model is
            attached already, a wrapper such as DistributedDataParallel synchronizes it, torch.distributed has another
            number of ranks than the environment, or others may read the key file.
        ReplicaError: the model cannot be laid out flat.
        PeerLost: another rank has failed before all were there.
    """
    strategy = _chosen(sync, topology, codec, partition) if shard is None else _sharded(sync, topology, codec, shard)
    _check_numbers(batch_size, frozen_after)
    if buffers not in get_args(BufferRule):
        raise UsageError(f'buffers is "mean" or "rank0", got {buffers!r}. Leave it out for "mean".')
    _check_module(model)
    if across is not None:
        check_across(across)
        check_strategy(strategy)
    check_unwrapped(model, allowed="" if across is None else "fully_shard")
    optimizer = unwrapped(optimizer)
    check_free(model, optimizer)
    check_step(optimizer)
    _check_values(model)
    replica = Replica(model, keep_strides=True, marked=shard is None) if across is None else PartReplica(model)
    rendezvous = met(_place(), "attach", None if key_file is None else Path(key_file))
    caller = traceback.extract_stack(limit=2)[0]
    with ExitStack() as undo:
        undo.push(partial(_tell_if_failed, rendezvous))
        mine = UserOptimizer(optimizer, replica)
        undo.callback(mine.close)
        run, sizes, lines = _introduce(rendezvous, strategy, replica, batch_size, across)
        credentials = credentials_of(rendezvous, integrity)
        rank = rendezvous.place.rank
        node = ProcessNode(
            Identity(run, f"worker {rank}", rank),
            credentials,
            device=replica.device,
            limits=WireLimits(silent_seconds=frozen_after),
        )
        undo.callback(node.wire.close)
        monitor = RankMonitor(rendezvous, credentials, frozen_after)
        undo.callback(monitor.close)
        node.loop.check = monitor.check
        name = f"{type(model).__name__} (model {mine.number}, attached at {Path(caller.filename).name}:{caller.lineno})"
        worker = _worker(node, replica, mine, sizes, lines, name, buffers)
        ties = _ties(strategy, node, rendezvous, replica, mine, credentials, lines)
        undo.pop_all()
    return Attached(strategy, rendezvous, replica, mine, worker, ties, monitor, buffers)


def _ties(
    strategy: Strategy,
    node: ProcessNode,
    rendezvous: Rendezvous,
    replica: Replica,
    optimizer: UserOptimizer,
    credentials: Credentials,
    lines: Lines,
) -> Ties:
    if topology_of(strategy.topology).clocked:
        return LoopServers(node, rendezvous, replica, strategy, optimizer, credentials)
    if isinstance(strategy.topology, Gossip):
        return LoopGossip(node, rendezvous, replica, strategy.topology)
    if isinstance(strategy.partition, Zero):
        return LoopShards(node, rendezvous, replica, strategy, optimizer)
    return LoopCollectives(node, rendezvous, replica, strategy, optimizer.missing.unused, lines.lines)


def _chosen(sync: Any, topology: Any, codec: Codec | str | None, partition: Partition | str | None) -> Strategy:
    """The strategy of these members. Raises `UsageError` for one that runs with `dure.train` only."""
    strategy = Strategy.of(sync, topology, codec, partition)
    if isinstance(strategy.partition, Zero):
        text = member_text("partition", strategy.partition)
        raise UsageError(f'dure.attach has the whole model at every rank: write shard="{text}" in place of partition.')
    if not isinstance(strategy.partition, Whole):
        raise UsageError(
            f"dure.attach has the whole model at every rank, and {member_text('partition', strategy.partition)} gives "
            "a rank a part of it. Describe the training as a dure.Job and call dure.train(job, partition=...), or "
            "split the model in the loop itself, as torch.distributed.pipelining does."
        )
    _check_strategy(strategy)
    return strategy


def _sharded(sync: Any, topology: Any, codec: Codec | str | None, shard: Zero | str) -> Strategy:
    """The strategy of these members, with `shard` as its partition. Raises `UsageError` where a loop cannot shard."""
    zero = resolved("partition", shard)
    if not isinstance(zero, Zero):
        raise UsageError(
            f'shard is "zero:stage=1" or "zero:stage=2", got {member_text("partition", zero)}: other partitions run '
            "with dure.train(job, partition=...)."
        )
    if zero.stage == 3:
        raise UsageError(
            "zero:stage=3 gathers and frees the parameters of each block in forward and backward, and dure.attach has "
            'them whole at every rank. Write shard="zero:stage=2"; or shard the model by fully_shard of '
            "torch.distributed.fsdp, without dure.attach; or describe the training as a dure.Job and call "
            'dure.train(job, partition="zero:stage=3").'
        )
    if zero.within is not None:
        raise UsageError(
            f"within={zero.within} makes shard groups of some ranks, and dure.attach shards over all ranks: leave it "
            'out, or call dure.train(job, partition="zero:...,within=...").'
        )
    strategy = Strategy.of(sync, topology, codec, zero)
    _check_strategy(strategy)
    return strategy


def _check_strategy(strategy: Strategy) -> None:
    because = traits_of(strategy.sync).reasons.loop
    if because:
        raise UsageError(f"{member_text('sync', strategy.sync)} does not run in a loop of one's own: {because}.")
    name = name_of("topology", strategy.topology)
    because = topology_of(strategy.topology).no_loop
    if not because and name not in catalogue("topology"):
        because = "a loop has the groups and the servers of dure's own topologies"
    if because:
        raise UsageError(
            f'{name} does not run in a loop of one\'s own: {because}. Write topology="collective" or "ps".'
        )


def _place() -> RankEnvironment:
    """The place of this rank. Raises `UsageError` where the script has met other ranks of which dure is not told."""
    found = place() or RankEnvironment()
    known = dist.get_world_size() if dist.is_available() and dist.is_initialized() else found.world_size
    if known != found.world_size:
        raise UsageError(
            f"torch.distributed has {known} ranks, and the environment names {found.world_size}: this rank would train "
            "with others than the script. Start the script by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT in each process before dure.attach: torch.multiprocessing.spawn sets none of them."
        )
    return found


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"dure.attach needs a torch.nn.Module first, and got an object of type {type(model).__name__}. Write "
            "dure.attach(model, optimizer)."
        )


def _check_numbers(batch_size: int, frozen_after: float) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size is this rank's weight, a whole number of at least 1; got {batch_size!r}.")
    if not frozen_after > 0:
        raise UsageError(f"frozen_after is a number of seconds above 0, got {frozen_after!r}. Leave it out for 30.")


def _check_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} is on the meta device, which holds no values: call model.to_empty(device=...), "
                "initialize the model or load its state, then attach."
            )


def _introduce(
    rendezvous: Rendezvous, strategy: Strategy, replica: Replica, batch_size: int, across: DeviceMesh | None
) -> tuple[str, list[int], Lines]:
    """Exchange the names and sizes of all ranks; returns the run's name, the batch size of each rank, and the lines.

    Raises `UsageError` if ranks attach different strategies, or ranks of a line different models.
    """
    model = {
        "parameters": replica.numel,
        "dtype": str(replica.dtype),
        "contiguous": sum(parameter.is_contiguous() for parameter in replica.parameters),
        "buffers": replica.buffers_flat().numel(),
        "constants": sum(each.numel() for each in replica.constants.values()),
        "layers": model_text(replica),
    }
    mine = {"run": name_of_run(), "strategy": str(strategy), "model": model, "batch_size": batch_size}
    ranks = rendezvous.exchange("about", mine | place_of(replica, across))
    lines = Lines.of(ranks)
    for what, alike in (("strategy", range(len(ranks))), ("model", lines.line(rendezvous.place.rank))):
        first = alike[0]
        for rank in alike:
            if ranks[rank][what] != ranks[first][what]:
                raise UsageError(
                    f"all ranks must attach the same {what}: rank {first} has {ranks[first][what]}, rank {rank} "
                    f"{ranks[rank][what]}."
                )
    return ranks[0]["run"], [theirs["batch_size"] for theirs in ranks], lines


def _worker(
    node: ProcessNode,
    replica: Replica,
    optimizer: UserOptimizer,
    sizes: Sequence[int],
    lines: Lines,
    name: str,
    rule: BufferRule,
) -> WorkerState:
    buffers, weights, line = replica.buffers_flat(), lines.of_groups(sizes), lines.line(node.rank)

    def merge(snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge buffers of a line or of all ranks, weighted by batch size unless those of a rank are missing."""
        if rule == "rank0":
            return snapshots[0]
        return replica.merge_buffers(snapshots, {len(each): each for each in (weights, sizes)}.get(len(snapshots)))

    return WorkerState(
        node=node,
        rank=line.index(node.rank),
        world_size=len(line),
        params=replica.params,
        optimizer=optimizer,
        source=LoopSource(node, replica, weights[line.index(node.rank)], name),
        meter=node.meter,
        boundary=Boundary(None),
        total_weight=float(sum(sizes)),
        buffers=buffers if buffers.numel() else None,
        merge_buffers=merge,
    )


def _tell_if_failed(
    rendezvous: Rendezvous, kind: type[BaseException] | None, error: BaseException | None, _: object
) -> None:
    if error is not None:
        report_failure(rendezvous, error)
