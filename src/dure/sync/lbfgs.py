"""Sandblaster L-BFGS: a coordinator commands vectors on shards; workers evaluate small portions of a large batch.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 4.2 and algorithm 7.2;
Nocedal and Wright, "Numerical Optimization", 2006, algorithms 7.4 and 7.5.

    for k = 0, 1, 2, ...                                       at the coordinator
        p  <- g                                                every vector stays on its shards
        for i = newest, ..., oldest                            of at most m pairs (s, y)
            a_i  <- s_i'p / y_i's_i;     p  <- p - a_i y_i
        p  <- gamma p                                          gamma = s'y / y'y of the newest pair
        for i = oldest, ..., newest
            c    <- y_i'p / y_i's_i;     p  <- p + (a_i - c) s_i
        p  <- -p
        t       by a line search: each trial is an evaluation at x = w + t p, of loss, g_x and g_x'p
        s, y  <- x - w, g_x - g;         kept if s'y > EPSILON |s| |y|
        w, g  <- x, g_x

    for every portion that the coordinator gives               at every replica
        fetch x, if it is another than before
        sum  <- sum + gradient of the portion at x;            push the sum now and then

| in the paper                          | here                                                              |
|---------------------------------------|-------------------------------------------------------------------|
| coordinator                           | `coordinate`, beside the clock on server 0                        |
| operations on named vectors           | commands of `topology/parameter_server/vectors.py`                |
| portions, load balancing, backup tasks | `coordinator.py` there: a portion is a mini-batch                 |
| gradients sent after a few portions   | `push_every`                                                      |
| line search                           | `search`: strong Wolfe, backtracking or exact                     |
| replicas over several machines        | partitions that share layers and no parameter: `neurons:ways=2`   |
| the whole batch                       | all samples, or `batch` of them; both gradients of y are of the same batch |

The job's optimizer and its rate are not used. A run has as many mini-batches as with any other method, `steps` times
the workers. It ends before an evaluation that would begin after the last of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.errors import DivergedError
from dure.sync import line_search
from dure.sync.base import Reasons, ServerRule, Traits
from dure.sync.line_search import Trial
from dure.topology.parameter_server.portion_client import Sums

if TYPE_CHECKING:
    import torch

    from dure.job.gradient import Gradient
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker
    from dure.topology.parameter_server.coordinator import Command, Coordinator

EPSILON = 1e-10
"""A pair is kept if s'y exceeds this factor times |s| |y|, that is, if the function is convex along s."""

LONGEST = 1e6
"""The longest first trial of a line search."""


@dataclass(frozen=True, slots=True)
class LBFGS:
    """Distributed L-BFGS: workers evaluate parts of a large batch, and a coordinator commands vectors on servers."""

    paper: ClassVar[str] = "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012"

    m: int = parameter(
        10,
        "pairs (change of model, change of gradient) that are kept; 0: steepest descent",
        range=">= 0",
        unit="pairs",
        symbol="m",
    )
    search: Literal["wolfe", "backtracking", "exact"] = parameter(
        "wolfe", "line search: strong Wolfe, backtracking, or exact"
    )
    batch: int = parameter(0, "samples of an evaluation; 0: all", range=">= 0", unit="samples")
    push_every: int = parameter(
        8, "most portions (mini-batches) that a worker evaluates for one push", range=">= 1", unit="portions"
    )
    gamma: bool = parameter(True, "scale the direction by the newest pair's curvature", symbol="γ")
    iterations: float = parameter(
        math.inf, "iterations after which the run ends; inf: when its steps are spent", range=">= 1", unit="iterations"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("coordinator",),
        reasons=Reasons(
            loop="its coordinator asks for gradients of any data at any point, and a loop has its own",
            topology="its vectors live on servers, where a coordinator commands them",
            stages="it computes the gradient of a whole batch in portions, and a stage works on the next mini-batch",
        ),
        lockstep=True,
        chooses_samples=True,
        keeps={},
    )

    def __post_init__(self) -> None:
        if self.m < 0:
            raise ValueError(f"m counts pairs of vectors and must be >= 0, got {self.m}. Use 0 for steepest descent.")
        if self.batch < 0:
            raise ValueError(f"batch counts samples and must be >= 0, got {self.batch}. Use 0 for all of them.")
        if self.push_every < 1:
            raise ValueError(f"push_every counts portions and must be >= 1, got {self.push_every}. Use 1 for each.")
        if not self.iterations >= 1:
            raise ValueError(f"iterations must be >= 1, got {self.iterations}. Leave it out to go on to the end.")

    def adapted(self) -> Traits:
        """The traits under these parameters: beside w, servers hold g, p, a trial and its gradient, and the pairs."""
        pairs = (f"{name}{slot}" for slot in range(self.m + 1) for name in "sy")
        return replace(self.traits, keeps={"server": ("g", "p", "x", "h", *pairs)})

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(replace(optimizer, name="assign"), reduce="sum")

    # ---- the replicas

    async def work(self, worker: Worker) -> None:
        work_queue = worker.state.work_queue
        while True:
            assignment = await work_queue.ask(worker.state)
            sums = Sums(worker.params)
            for indices, draw in assignment.portions(work_queue.batches):
                gradient = await self.evaluate(worker, indices, draw)
                sums.add(gradient.values, gradient.loss, len(indices))
            await work_queue.push(worker.state, assignment, sums)

    async def evaluate(self, worker: Worker, indices: torch.Tensor, draw: int) -> Gradient:
        """Compute the mean gradient over the samples `indices`, as a step of this worker.

        It passes no boundary: the coordinator decides when the work ends. It checks the loss of the whole batch.
        """
        state = worker.state
        started = state.node.now()
        gradient = await state.data.gradient_at(state, state.params, indices, draw=draw)
        if state.source.whole:
            state.meter.add("compute", started, state.node.now())
        state.count_step(gradient)
        return gradient

    # ---- the coordinator

    async def coordinate(self, lead: Coordinator) -> None:
        kept = lead.kept
        kept.setdefault("iteration", 0)
        pairs: list[dict[str, Any]] = kept.setdefault("pairs", [])
        await lead.order(("model", "w"))
        while kept["iteration"] < self.iterations:
            await lead.boundary()
            batch = kept["iteration"] if lead.batches.change else 0
            if kept.get("batch") != batch:
                kept["batch"] = batch
                kept["loss"], _ = await lead.evaluate("w", "g", batch=batch)
                if not math.isfinite(kept["loss"]):
                    raise DivergedError(
                        f"the loss is {kept['loss']} where a line search begins, and must be finite. Look for NaN "
                        "and very large values in the data and the initial parameters."
                    )
            slope = await self.direction(lead, pairs)
            trial = await self.line(lead, slope) if slope < 0 or lead.timing_only else None
            if trial is not None:
                await self.accept(lead, pairs, trial)
                if kept["decrease"] <= 0 and not (lead.batches.change or lead.timing_only):
                    return  # the loss cannot decrease further in floating point
            elif pairs:
                pairs.clear()  # no step was found along this direction: start again with steepest descent
            elif not lead.batches.change:
                return
            else:
                kept["iteration"] += 1

    async def direction(self, lead: Coordinator, pairs: list[dict[str, Any]]) -> float:
        """Compute p = -H g by the two loops; return g'p. Commands between two dot products are sent in one message."""
        a = []
        then: list[Command] = [("copy", "p", "g")]
        for pair in reversed(pairs):
            (sp,) = await lead.order(*then, ("dot", pair["s"], "p"))
            a.append(sp / pair["sy"])
            then = [("axpy", "p", -a[-1], pair["y"])]
        if pairs and self.gamma:
            then.append(("scale", "p", pairs[-1]["sy"] / pairs[-1]["yy"]))
        for pair in pairs:
            (yp,) = await lead.order(*then, ("dot", pair["y"], "p"))
            then = [("axpy", "p", a.pop() - yp / pair["sy"], pair["s"])]
        (slope,) = await lead.order(*then, ("scale", "p", -1.0), ("dot", "g", "p"))
        return slope

    async def line(self, lead: Coordinator, slope: float) -> Trial | None:
        """Search a step along p. Afterwards x and h are the new point and its gradient."""

        async def attempt(step: float) -> Trial:
            go: Command = ("combine", "x", 1.0, "w", step, "p")
            batch = lead.kept["batch"]
            loss, dots = await lead.evaluate("x", "h", batch=batch, first=[go], then=[("dot", "h", "p")])
            return Trial(step, loss, dots[0] if dots else math.nan)

        if lead.timing_only:
            return await attempt(1.0)
        first = self.first_step(lead.kept, slope)
        search = getattr(line_search, self.search)
        found: Trial | None = await search(attempt, Trial(0.0, lead.kept["loss"], slope), first)
        return found

    def first_step(self, kept: dict[str, Any], slope: float) -> float:
        """Return the first trial: 1 if pairs are kept; else by the last decrease, or at most a move of length 1."""
        if kept["pairs"]:
            return 1.0
        if kept.get("decrease", 0.0) > 0:
            return min(2.0 * float(kept["decrease"]) / -slope, LONGEST)
        return min(1.0, 1.0 / math.sqrt(-slope))

    async def accept(self, lead: Coordinator, pairs: list[dict[str, Any]], trial: Trial) -> None:
        """Keep the pair (s, y), and make x the model."""
        kept = lead.kept
        if self.m:
            await self.remember(lead, pairs)
        moved: list[Command] = [("copy", "w", "x"), ("copy", "g", "h"), ("publish", "w", lead.spent)]
        await lead.order(*moved, *(("free", name) for name in "xhp"))
        kept["iteration"] += 1
        kept["decrease"], kept["loss"] = kept["loss"] - trial.loss, trial.loss

    async def remember(self, lead: Coordinator, pairs: list[dict[str, Any]]) -> None:
        slots = {pair["s"] for pair in pairs}
        free = next(slot for slot in range(self.m + 1) if f"s{slot}" not in slots)
        s, y = f"s{free}", f"y{free}"
        make: list[Command] = [("combine", s, 1.0, "x", -1.0, "w"), ("combine", y, 1.0, "h", -1.0, "g")]
        sy, ss, yy = await lead.order(*make, ("dot", s, y), ("dot", s, s), ("dot", y, y))
        if sy > EPSILON * math.sqrt(ss * yy):
            pairs.append({"s": s, "y": y, "sy": sy, "yy": yy})
            del pairs[: -self.m]
