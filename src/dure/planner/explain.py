"""Explanation of a plan: bottlenecks, the reasons for the winner, and changes that would change it, or make it fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from dure.core import units
from dure.errors import DureError
from dure.partition.mesh import pipeline_of
from dure.planner.candidates import ONE, PLAIN, Scene, narrow, shape_of, sharded, single, wide
from dure.planner.ranking import Ranked, in_order, ranked, retimed
from dure.planner.side_by_side import Deadline, timings
from dure.planner.sweeps import (
    Sweep,
    of_workers,
    with_equal_workers,
    with_free_network,
    with_stragglers,
    without_limits,
)
from dure.planner.timing import Timing, largest_memory, setup_in
from dure.run.strategy import Strategy
from dure.runtime.virtual.compute import Constant

if TYPE_CHECKING:
    from dure.partition.memory import MemoryUse
    from dure.planner.search import Found
    from dure.runtime.virtual.cluster import Cluster


LARGE = 0.15
"""Share of a step from which on a cause is a bottleneck."""

BEST = 6
"""Strategies that are timed again with varying durations of steps."""


def crowded(scene: Scene) -> list[str]:
    """A caution if workers outnumber the cores of their one machine (`bench/plan.md`); none otherwise."""
    host = scene.cluster.host
    if host is None or scene.workers <= host.cores:
        return []
    return [
        f"Caution: {scene.workers} workers share {host.cores} cores. Predictions of such runs were off by 41 % in the "
        "median, and their order was often wrong: a waiting process needs a core when a message comes."
    ]


def unstated(scene: Scene) -> list[str]:
    """A caution if the speed of accelerators is assumed: the default is that of a core."""
    cluster = scene.cluster
    if not cluster.accelerated or scene.job.block_seconds is not None:
        return []
    if not any(kind.compute.assumes_speed and kind.gpu is None for kind in cluster.machines):
        return []
    assumed = units.as_flops(Constant().flops_per_second)
    return [
        f"Caution: the cluster file states no speed of its GPUs, and {assumed} is that of CPU cores. Steps are far too "
        "long, so the network seems fast. Add to machines gpu: NAME (dure devices lists names), or compute: "
        "{seconds: ...}, those of a step on one GPU."
    ]


def written_from_sends(scene: Scene, strategy: str) -> list[str]:
    """A caution if a real run sends the collectives of `strategy` itself, though accelerators have an engine."""
    topology = Strategy.parse(PLAIN if strategy == ONE else strategy).topology
    if not scene.cluster.accelerated or getattr(topology, "algorithm", "engine") == "engine":
        return []
    return [
        "Caution: these seconds are those of an engine such as NCCL or Horovod with that algorithm. A run of dure "
        "sends its messages itself, after backward, and is slower."
    ]


def valueless(scene: Scene) -> list[str]:
    """A note if the job cannot be trained, as it has shapes and no values."""
    if scene.has_values:
        return []
    return ["The job has shapes and no values: for training, put your own job with this model into the command."]


def bottlenecks(scene: Scene, rows: Sequence[Ranked], deadline: Deadline) -> dict[str, str]:
    """The bottleneck of strategies: the network, unequal workers, bubbles of a pipeline, or computation.

    The network's part of a step is the time that a free network would save. Unequal workers likewise. A strategy that
    the seconds did not suffice for has none.
    """
    cluster = scene.cluster
    scenes = [scene.on(with_free_network(cluster)), scene.on(with_equal_workers(cluster))]
    wanted = [(number, row.strategy) for row in rows for number in range(len(scenes))]
    found = dict(timings(scenes, wanted, deadline))

    def saved(number: int, row: Ranked) -> float:
        timing = found[number, row.strategy]
        return 1 - timing.seconds / row.timing.seconds if isinstance(timing, Timing) else 0.0

    late = {strategy for (_, strategy), timing in found.items() if isinstance(timing, float)}
    known = [row for row in rows if row.strategy not in late]
    return {row.strategy: _bottleneck(row, saved(0, row), saved(1, row)) for row in known}


def _bottleneck(row: Ranked, network: float, unequal: float) -> str:
    if max(network, unequal) >= LARGE:
        return f"network {network:.0%}" if network >= unequal else f"unequal workers {unequal:.0%}"
    strategy = Strategy.parse(PLAIN if row.strategy == ONE else row.strategy)
    if pipeline_of(strategy.partition) is not None and row.timing.shares["wait"] >= LARGE:
        return f"bubbles {row.timing.shares['wait']:.0%}"
    return "computation"


def why(search: Found, bottlenecks: Mapping[str, str]) -> list[str]:
    """Sentences with the reasons for the winner of a search."""
    rows, left = search.rows, search.left
    winner = rows[0]
    plain = next((row for row in rows if row.strategy == PLAIN), None)
    found = []
    if left:
        timed = f"It is the best of {len(rows)} strategies." if len(rows) > 1 else "It alone was timed."
        others = "1 other was" if len(left) == 1 else f"{len(left)} others were"
        found.append(f"{timed} {others} not timed, as the seconds were over: give more with --within.")
        better = sum(least < winner.timing.seconds for least in left.values())
        found.append(f"By their lower bounds, {better or 'none'} of these could have shorter steps.")
    if winner.strategy == ONE:
        return found + _why_alone(rows, "of those that were timed, none" if left else "no other")
    if winner is plain:
        faster = [row for row in rows[1:] if row.score > winner.score]
        others = "none of the others that were timed" if left else "no other"
        if rows[1:]:
            found.append(f"Plain data parallelism is the simplest strategy, and {others} is more than 5 % better.")
        if faster:
            found.append(f"{faster[0].strategy} is {faster[0].score / winner.score - 1:.1%} better.")
    elif plain is not None:
        ratio = plain.timing.seconds / winner.timing.seconds
        compared = f"{ratio:.2f} times as many" if ratio >= 1 else f"only {ratio:.2f} times as many"
        found.append(
            f"{winner.strategy} applies {compared} samples per second as plain data parallelism"
            + (f", whose bottleneck is: {bottlenecks[PLAIN]}." if PLAIN in bottlenecks else ".")
        )
        if winner.factor != plain.factor and winner.seconds_to_target is None:
            found.append(
                f"It is assumed to need {winner.factor:.2f} times as many samples for equal learning; --target-loss "
                "measures that."
            )
    else:
        found += _plain_refused(search) or ["Plain data parallelism was not timed."]
    second = next((row for row in rows[1:] if row is not plain), None)
    if second is not None and winner.seconds_to_target is None:
        ratio = second.score / winner.score
        compared = f"at {ratio:.0%} of its speed for learning" if ratio < 1 else "which is less simple and as fast"
        found.append(f"The next is {second.strategy}, {compared}.")
    return found


def _why_alone(rows: Sequence[Ranked], none: str) -> list[str]:
    """Sentences with the reasons for one machine. `none` stands for the other strategies."""
    alone, others = rows[0], rows[1:]
    if not others:
        return ["No strategy of all workers fits here."]
    if alone.seconds_to_target is not None:
        return ["The fastest machine alone reaches the target as soon as all workers do, within the error of a plan."]
    best = max(others, key=lambda row: row.score)
    found = [f"The fastest machine alone is as good as all workers: {none} is better by more than its known error."]
    speed = f"{best.strategy} is at {best.score / alone.score:.0%} of its speed for learning"
    return [*found, f"{speed}, with a known error of {best.error:.0%}."]


def would_change(scene: Scene, rows: Sequence[Ranked], swept: Mapping[str, Sweep], deadline: Deadline) -> list[str]:
    """Sentences with the bandwidths, workers, batches and durations of steps at which another strategy wins.

    If no value that was timed changes the answer, a sentence says so, and whether the seconds sufficed for all values.
    With a target, as many steps lead to it at another bandwidth. With other workers or samples, it is unknown.
    """
    found = []
    winner, measured = rows[0].strategy, rows[0].seconds_to_target is not None
    if measured:
        swept = {name: _to_target(sweep, rows) for name, sweep in swept.items() if name == "bandwidth"}
    for name, sweep in swept.items():
        for value, other in _others(sweep, winner):
            text = _value(name, value) + ("" if name == "bandwidth" else f" {sweep.unit}")
            if name == "bandwidth" and _has_unequal_links(scene.cluster):
                text = f"{Fraction(value / sweep.now).limit_denominator(1000)} of all bandwidths ({text})"
            side = "less" if value < sweep.now else "more"
            found.append(f"At {text} or {side}: {other}.")
    best = _winner_on(scene.on(with_stragglers(scene.cluster)), rows[:BEST], deadline)
    if best is not None and best != winner:
        found.append(f"If the durations of steps varied (log-normal, sigma 0.5): {best}.")
    found = found or [_no_change(swept, varied=best is not None)]
    return [*found, "Other numbers of workers and samples were not tried with the target."] if measured else found


def _to_target(sweep: Sweep, rows: Sequence[Ranked]) -> Sweep:
    """`sweep` with the seconds to the target of the strategies whose seconds to it are known."""
    known = {row.strategy: row for row in rows if row.seconds_to_target is not None}
    again = [[row and known.get(row.strategy) and retimed(known[row.strategy], row) for row in at] for at in sweep.rows]
    return replace(sweep, rows=again)


def _has_unequal_links(cluster: Cluster) -> bool:
    rates = {(kind.link or cluster.link).bandwidth for kind in cluster.machines}
    return len(rates) > 1 or cluster.between is not None


def _no_change(swept: Mapping[str, Sweep], *, varied: bool) -> str:
    """A sentence with the values at which the answer is the same; `varied`: durations of steps are among them."""
    tried = [f"{name} {_value(name, sweep.at[0])} to {_value(name, sweep.at[-1])}" for name, sweep in _tried(swept)]
    tried += ["varying durations of steps"] * varied
    more = "give more with --within"
    if not tried:
        return f"Not known: the seconds did not suffice to time a change; {more}."
    complete = varied and all(len(sweep.at) == sweep.wanted for sweep in swept.values())
    rest = "" if complete else f" The seconds did not suffice for all changes: {more}."
    return f"No change that was timed alters the answer: {', '.join(tried)}.{rest}"


def _tried(swept: Mapping[str, Sweep]) -> list[tuple[str, Sweep]]:
    return [(name, sweep) for name, sweep in swept.items() if len(sweep.at) > 1]


def _value(name: str, value: float) -> str:
    return units.as_rate(value) if name == "bandwidth" else f"{value:g}"


NONE_WORKS = "none of the best strategies works"


def _others(sweep: Sweep, winner: str) -> list[tuple[float, str]]:
    """The nearest value below and above at which another strategy wins, and that strategy, or that none works there."""
    found = []
    pairs = list(zip(sweep.at, sweep.winners(), strict=True))
    below = [(value, other) for value, other in reversed(pairs) if value < sweep.now]
    above = [(value, other) for value, other in pairs if value > sweep.now]
    for side in (below, above):
        change = next(((value, other) for value, other in side if other != winner), None)
        if change is not None:
            found.append((change[0], change[1] or NONE_WORKS))
    return found


def _winner_on(scene: Scene, rows: Sequence[Ranked], deadline: Deadline) -> str | None:
    before = {row.strategy: row for row in rows}
    wanted = [(0, strategy) for strategy in before]
    found = [
        retimed(before[strategy], ranked(strategy, timing, scene))
        for (_, strategy), timing in timings([scene], wanted, deadline)
        if isinstance(timing, Timing)
    ]
    return in_order(found)[0].strategy if found else None


DOUBLINGS = 6
"""Doublings of the workers, and halvings of the batch, that are tried."""


NO_ANSWER = 0.4
"""Share of the seconds of a plan in which the reason for having no answer is looked for."""


def no_answer(scene: Scene, search: Found, within: float) -> str:
    """A sentence with what makes an answer possible, where a search within so many seconds has none."""
    if not search.left:
        return smallest_change(scene, search.refused, Deadline(NO_ANSWER * within))
    enough = _enough(scene, within)
    many = scene.workers > FEWER
    return (
        f"no strategy could be timed within {within:g} seconds for {scene.workers} workers"
        + (": their number makes a simulation slow" if many else "")
        + f". Give more, such as --within {math.ceil(enough)}"
        + (", or describe fewer machines." if many else ".")
        + "".join(f" {each}" for each in _plain_refused(search))
    )


def _plain_refused(search: Found) -> list[str]:
    """A sentence with the reason for which plain data parallelism does not work, if it does not."""
    reason = search.refused.get(PLAIN)
    return [] if reason is None else [f"Plain data parallelism does not work here: {reason.removesuffix('.')}."]


FEWER = 16
"""Factor of the workers of the cluster that is timed to know what seconds suffice."""


def _enough(scene: Scene, within: float) -> float:
    """Seconds in which plain data parallelism should be timed, from those of a cluster with fewer workers."""
    kinds = tuple(
        kind.changed(count=max(1, kind.count // FEWER), speed=kind.speed if isinstance(kind.speed, float) else 1.0)
        for kind in scene.cluster.machines
    )
    fewer = scene.on(scene.cluster.changed(machines=kinds, events=(), sites=(), between=None))
    limit = Deadline(NO_ANSWER * within)
    list(timings([fewer], [(0, PLAIN)], limit))
    taken = NO_ANSWER * within - (limit.left or 0.0)
    return max(4 * within, 8 * taken * scene.workers / fewer.workers)


def smallest_change(scene: Scene, refused: Mapping[str, str], deadline: Deadline) -> str:
    """A sentence with the change that makes a strategy fit, where memory refuses all strategies.

    Beyond the deadline no more strategies are looked at.
    """
    limits = [limit for limit in map(scene.cluster.memory_of, range(scene.workers)) if limit is not None]
    if not limits:
        reasons = list(dict.fromkeys(refused.values()))
        return f"no strategy works here: {reasons[0] if reasons else 'there is none'}"
    limit = min(limits)
    free = scene.on(without_limits(scene.cluster))
    needs = _needs(free, deadline)
    known = "" if not deadline.over else " of the strategies that could be looked at in time"
    if not needs:
        return f"no strategy works here: {next(iter(refused.values()))}"
    strategy, least = min(needs.items(), key=lambda pair: pair[1].total)
    if least.total <= limit:
        return f"{strategy} fits into memory, and could not be timed: give more seconds with --within."
    changes = [f"memory of {units.as_size(least.total)} for each worker"]
    changes += _smaller_batch(free, needs, limit, deadline) + _more_workers(free, limit, deadline)
    return (
        f"no strategy fits into {units.as_size(limit)} of memory for each worker. The least{known} is needed by "
        f"{strategy}: {units.as_size(least.total)} ({least}). Any of these would make it fit: {'; '.join(changes)}."
    )


def _needs(scene: Scene, deadline: Deadline) -> dict[str, MemoryUse]:
    """The memory of a worker under each candidate that works, those that need least first."""
    found: dict[str, MemoryUse] = {}
    shape = shape_of(scene)
    for strategy in dict.fromkeys((*sharded(shape, (3, 2)), *narrow(shape), *wide(shape), *single(shape))):
        if found and deadline.over:
            break
        if " " not in strategy or ":" not in strategy:
            continue  # methods and topologies hold whole models, as plain data parallelism does
        try:
            found[strategy] = largest_memory(setup_in(scene, strategy))
        except DureError:
            continue
    return found


def _smaller_batch(scene: Scene, needs: Mapping[str, MemoryUse], limit: int, deadline: Deadline) -> list[str]:
    for halving in range(1, DOUBLINGS):
        smaller = scene.of(scene.batch >> halving)
        for strategy in sorted(needs, key=lambda name: needs[name].total):
            if deadline.over:
                return []
            try:
                if largest_memory(setup_in(smaller, strategy)).total <= limit:
                    return [f"--batch-size {smaller.batch // scene.workers} with {strategy}"]
            except DureError:
                continue
    return []


def _more_workers(scene: Scene, limit: int, deadline: Deadline) -> list[str]:
    for doubling in range(1, DOUBLINGS):
        cluster = of_workers(scene.cluster, scene.workers << doubling)
        if cluster is None:
            return []
        larger = scene.on(cluster)
        fitting = [name for name, use in _needs(larger, deadline).items() if use.total <= limit]
        if fitting:
            return [f"{larger.workers} workers with {fitting[0]}"]
    return []
