"""Cases of four ranks in the tests of `dure.attach(across=...)`: `torchrun --nproc-per-node 4 fsdp_groups.py FOLDER`.

Each case returns plain values; rank r writes all of them to FOLDER/r.json, as in `attached.py`. `by_hand` is an oracle:
`fully_shard` inside a group, and the equations of the papers along a line, by calls of torch.distributed.

`Linears` is linear in its parameters, and its data, rates and initial values are dyadic: in float64 all sums are exact,
so an equation has the same bits in each order of its operations.
"""

import copy
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import dure

RANK = int(os.environ.get("RANK", 0))
STEPS, PERIOD = 5, 2
SHAPES = {
    (2, 2): ("averaging", "fisher", "bmuf", "classical", "diloco", "overlapped", "easgd", "eamsgd"),
    (1, 4): ("bmuf",),
    (4, 1): ("bmuf",),
}
"""Groups and ranks of a group, and the methods that run there."""

METHODS = {
    "averaging": f"averaging:period={PERIOD}",
    "fisher": f"averaging:period={PERIOD},weights=fisher",
    "bmuf": f"bmuf:period={PERIOD},momentum=0.5,zeta=0.75",
    "classical": f"bmuf:period={PERIOD},momentum=0.5,zeta=0.75,nesterov=false",
    "diloco": f"diloco:period={PERIOD},momentum=0.5,lr=0.75",
    "overlapped": f"diloco:period={PERIOD},momentum=0.5,lr=0.75,overlap=1",
    "easgd": f"easgd:period={PERIOD},elasticity=0.25",
    "eamsgd": f"eamsgd:period={PERIOD},elasticity=0.25,momentum=0.5",
}
SIZES = (1, 1, 2, 4)
"""Batch sizes of the ranks in `case_weights`: the groups of two weigh 1/4 and 3/4."""


def mesh_of(shape=(2, 2)):
    return init_device_mesh("cpu", shape, mesh_dim_names=("groups", "inside"))


class Linears(nn.Module):
    """Columns of linear layers with 5, 1 and 3 rows: no number of ranks above 1 divides them all."""

    def __init__(self, seed):
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(3, rows, dtype=torch.float64) for rows in (5, 1, 3))
        for parameter in self.parameters():
            parameter.data = torch.randint(-8, 9, parameter.shape, generator=numbers).double() / 8

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], 1)


def dyadic(step, rank):
    """Four samples of one rank: inputs of -1, 0 and 1, and targets of halves."""
    numbers = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(-1, 2, (4, 3), generator=numbers).double()
    return x, torch.randint(-4, 5, (4, 9), generator=numbers).double() / 2


def squares(module, batch):
    x, y = batch
    return (module(x) - y).square().sum() / 8


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.25, momentum=0.5)


def exact(mesh):
    """The model whose arithmetic is exact, split inside the groups of `mesh`, each with other values; its optimizer."""
    module = Linears(mesh["groups"].get_local_rank())
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["inside"])
    fully_shard(module, mesh=mesh["inside"])
    return module, sgd(module)


def net(mesh, frozen=False):
    """A network of float32 with AdamW, whose layers have odd numbers of rows."""
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    if frozen:
        module[2].requires_grad_(False)
    for layer in module[:4:2]:
        fully_shard(layer, mesh=mesh["inside"])
    fully_shard(module, mesh=mesh["inside"])
    return module, torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def samples(step, rank=RANK):
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=numbers), torch.randint(3, (8,), generator=numbers)


def entropy(module, batch):
    return cross_entropy(module(batch[0]), batch[1])


def part(module):
    """The values of this rank, flat."""
    with torch.no_grad():
        return torch.cat([each.to_local().reshape(-1) for each in module.parameters() if each.requires_grad])


def whole(module):
    """The values of the whole model; all ranks of a group call this."""
    return torch.cat([each.full_tensor().detach().reshape(-1) for each in module.parameters()]).tolist()


# ---- the oracle


class Line:
    """The equations of the papers on the parts of a line, whose ranks count by `share`."""

    def __init__(self, method, mesh, start, share=None):
        self.group = mesh["groups"].get_group()
        self.size = mesh["groups"].size()
        self.share = 1 / self.size if share is None else share
        dist.broadcast(start, group=self.group, group_src=0)
        self.method = method
        self.model, self.begun, self.delta = start.clone(), start.clone(), torch.zeros_like(start)
        self.squared = torch.zeros_like(start)
        self.outer = nn.Parameter(start.clone())
        self.sgd = torch.optim.SGD([self.outer], lr=0.75, momentum=0.5, nesterov=True)

    def sum(self, values):
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, values):
        return self.sum(values * self.share)

    def next(self, values):
        """The values with which a rank goes on after a block that has ended at `values`."""
        if self.method == "averaging":
            self.model = self.mean(values)
            return self.model
        if self.method == "fisher":
            weight = self.squared + 1e-12
            self.squared = torch.zeros_like(weight)
            self.model = self.sum(values * weight) / self.sum(weight)
            return self.model
        if self.method in ("diloco", "overlapped"):  # the outer optimizer of the paper, on the outer gradient
            self.outer.grad = self.outer.detach() - self.mean(values)
            self.sgd.step()
            delta = -0.75 * self.sgd.state[self.outer]["momentum_buffer"]
            self.model = self.outer.detach() - 0.5 * delta
            return self.outer.detach().clone()
        change = self.mean(values) - self.begun
        self.delta = 0.5 * self.delta + 0.75 * change
        self.model = self.model + self.delta
        self.begun = self.model + 0.5 * self.delta if self.method == "bmuf" else self.model.clone()
        return self.begun


def put(module, values):
    """Write the flat values of a rank to the parts of its parameters."""
    with torch.no_grad():
        parts = [each.to_local() for each in module.parameters() if each.requires_grad]
        for home, some in zip(parts, values.split([each.numel() for each in parts]), strict=True):
            home.copy_(some.view_as(home))


def gradient(module):
    with torch.no_grad():
        return torch.cat([each.grad.to_local().reshape(-1) for each in module.parameters() if each.requires_grad])


def by_hand(method, make, loss, batch, mesh, *, steps=STEPS, left_out=(), share=None, clip=None):
    """This rank's values after each step, and at the end the part and the whole of the model that is delivered.

    If the mean comes one step late (`overlapped`), that step stays.
    """
    module, optimizer = make(mesh)
    line = Line(method, mesh, part(module), share)
    put(module, line.model)
    trace, sent = [], None
    for step in range(steps):
        loss(module, batch(step, RANK)).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        if step not in left_out:
            line.squared += gradient(module) ** 2
            optimizer.step()
        optimizer.zero_grad()
        if sent is not None:
            put(module, line.next(sent) + (part(module) - sent))
            sent = None
        if (step + 1) % PERIOD == 0 and method == "overlapped":
            sent = part(module)
        elif (step + 1) % PERIOD == 0:
            put(module, line.next(part(module)))
        trace.append(part(module).tolist())
    if steps % PERIOD:
        line.next(part(module))
    put(module, line.model)
    return {"trace": trace, "part": part(module).tolist(), "whole": whole(module)}


def elastic_by_hand(mesh, alpha=0.25, momentum=0.0):
    """EASGD: x <- x - rate g - alpha (x - z), z <- z + sum of alpha (x - z), both by the values before.

    EAMSGD has the gradient at x + momentum v, where v is the last step from there and momentum times the last v. In its
    trace are these points, to which the method goes on before the next gradient.
    """
    module, optimizer = exact(mesh)
    line = Line("", mesh, part(module))
    center = line.model.clone()
    put(module, center)
    trace, velocity = [], torch.zeros_like(center)
    for step in range(STEPS):
        force = torch.zeros_like(center)
        if step % PERIOD == 0:
            force = alpha * (part(module) - center)
            center = center + line.sum(force)
        velocity = momentum * velocity
        ahead = part(module) + velocity
        put(module, ahead)
        squares(module, dyadic(step, RANK)).backward()
        optimizer.step()
        optimizer.zero_grad()
        velocity = velocity + part(module) - ahead
        put(module, part(module) - force)
        trace.append((part(module) + momentum * velocity).tolist())
    if STEPS % PERIOD == 0:
        center = center + line.sum(alpha * (part(module) - center))
    put(module, center)
    return {"trace": trace, "part": part(module).tolist(), "whole": whole(module)}


def attached(sync, make, loss, batch, mesh, *, steps=STEPS, between=None, clip=None, **more):
    """The same by dure; `between` is called with the module, the replica and the step in front of each step."""
    module, optimizer = make(mesh)
    trace = []
    given = {"topology": "collective", "across": mesh["groups"], **more}
    with dure.attach(module, optimizer, sync=sync, **given) as replica:
        for step in range(steps):
            loss(module, batch(step, RANK)).backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            if between is None or not between(module, replica, step):
                replica.step()
            trace.append(part(module).tolist())
    return {"trace": trace, "part": part(module).tolist(), "whole": whole(module)}


def error_of(function):
    try:
        function()
    except dure.DureError as error:
        return [type(error).__name__, str(error)]
    return None


# ---- cases


def case_exact():
    """Bits of each method, by hand and by dure, for groups of one, two and four ranks."""
    found = {}
    for shape, names in SHAPES.items():
        mesh = mesh_of(shape)
        for name in names:
            if name in ("easgd", "eamsgd"):
                hand = elastic_by_hand(mesh, momentum=0.5 if name == "eamsgd" else 0.0)
            else:
                hand = by_hand(name, exact, squares, dyadic, mesh)
            found[f"{name} {shape[0]}x{shape[1]}"] = [hand, attached(METHODS[name], exact, squares, dyadic, mesh)]
    return found


def case_adamw():
    """A network of float32 with AdamW inside a block: sums are rounded."""
    mesh = mesh_of()
    return {
        name: [
            by_hand(name, net, entropy, samples, mesh, clip=0.5),
            attached(METHODS[name], net, entropy, samples, mesh, clip=0.5),
        ]
        for name in ("averaging", "bmuf", "diloco")
    }


def case_weights():
    mesh, share = mesh_of(), (0.25, 0.75)[RANK // 2]
    sync = METHODS["averaging"]
    return [
        by_hand("averaging", exact, squares, dyadic, mesh, share=share),
        attached(sync, exact, squares, dyadic, mesh, batch_size=SIZES[RANK]),
    ]


def case_accumulated():
    """Halves of a batch one after another, whose gradients fully_shard exchanges once, or each."""

    def halves(sync):
        module, optimizer = exact(mesh)
        with dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"]) as replica:
            for step in range(STEPS):
                first, second = zip(*(each.chunk(2) for each in dyadic(step, RANK)), strict=True)
                module.set_requires_gradient_sync(sync)
                with replica.accumulate():
                    squares(module, first).backward()
                module.set_requires_gradient_sync(True)
                squares(module, second).backward()
                replica.step()
        return part(module).tolist()

    mesh = mesh_of()
    return [halves(False), halves(True)]


def case_bytes_sent():
    """Bytes of each step, and the size of this rank's part."""
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    found = []
    with dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"]) as replica:
        for step in range(4):
            before = replica.bytes_sent
            squares(module, dyadic(step, RANK)).backward()
            replica.step()
            found.append(replica.bytes_sent - before)
    return [found, 8 * part(module).numel()]


def spoil(module, replica, step):
    """One element of the gradient of one rank is not a number: no other rank sees it."""
    if step == 1 and RANK == 2:
        with torch.no_grad():
            module.layers[0].weight.grad.to_local()[0, 0] = torch.nan


def leave_out(module, replica, step):
    return step == 1 and RANK == 3 and replica.skip()


def case_left_out():
    """A step with a gradient of NaN at one rank, one that one rank skips, and one that all take."""
    mesh, sync = mesh_of(), METHODS["averaging"]
    return [
        by_hand("averaging", exact, squares, dyadic, mesh, left_out=(1,)),
        attached(sync, exact, squares, dyadic, mesh, between=spoil),
        attached(sync, exact, squares, dyadic, mesh, between=leave_out),
    ]


def case_nan_stays():
    def spoil_all(module, replica, step):
        if RANK == 2:
            with torch.no_grad():
                module.layers[0].weight.grad.to_local()[0, 0] = torch.nan

    return error_of(lambda: attached(METHODS["averaging"], exact, squares, dyadic, mesh_of(), between=spoil_all))


def case_scaler():
    """Scaled losses; the second step of one rank overflows."""
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    with dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"]) as replica:
        for step in range(STEPS):
            loss = squares(module, dyadic(step, RANK))
            scaler.scale(loss * torch.inf if step == 1 and RANK == 3 else loss).backward()
            replica.step(scaler)
            scaler.update()
    return {"scale": scaler.get_scale(), "part": part(module).tolist()}


def case_evaluation():
    """A look at the mean after each step, with a forward, which leaves whole parameters in the root module."""

    def look(module, replica, step):
        replica.step()
        own = part(module)
        with replica.evaluation():
            seen.append(whole(module))
            with torch.no_grad():
                outputs.append(module(dyadic(0, RANK)[0]).tolist())
        assert torch.equal(part(module), own)
        return True

    seen, outputs = [], []
    found = attached(METHODS["bmuf"], exact, squares, dyadic, mesh_of(), between=look)
    return {**found, "seen": seen, "outputs": outputs}


def case_delivered():
    """The model that `close()` delivers after two steps, and after three."""
    return [attached(METHODS["bmuf"], exact, squares, dyadic, mesh_of(), steps=steps)["whole"] for steps in (2, 3)]


def case_changes_inside():
    """A change inside `evaluation()` is refused at its end; one between two steps counts."""
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    with dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"]) as replica:

        def change():
            with replica.evaluation():
                put(module, part(module) + 1)

        refused = error_of(change)
        put(module, part(module) * 0 + 2)
        replica.skip()
        counts = part(module).tolist()
        put(module, part(module) + 1)
    return [refused, counts, part(module).tolist()]


def normalized(mesh):
    torch.manual_seed(RANK)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    fully_shard(module, mesh=mesh["inside"])
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def case_buffers():
    """Running statistics: each rank's own after three steps, and merged after close."""
    mesh = mesh_of()
    module, optimizer = normalized(mesh)
    with dure.attach(module, optimizer, sync="averaging:period=9", across=mesh["groups"]) as replica:
        for step in range(3):
            entropy(module, samples(step)).backward()
            replica.step()
        own = module[1].running_mean.tolist()
    return {"own": own, "merged": module[1].running_mean.tolist(), "batches": int(module[1].num_batches_tracked)}


def case_frozen():
    """A frozen layer takes the values of the first group, and keeps them."""
    mesh = mesh_of()
    module, optimizer = net(mesh, frozen=True)
    before = module[2].weight.to_local().tolist()
    with dure.attach(module, optimizer, sync=METHODS["bmuf"], across=mesh["groups"]) as replica:
        for step in range(3):
            entropy(module, samples(step)).backward()
            replica.step()
    return {"before": before, "after": module[2].weight.to_local().tolist(), "whole": whole(module)}


def case_uneven_loaders():
    """The second group has fewer batches: all ranks end at the same step."""
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    with dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"]) as replica:
        going = []
        for step in range(5 if RANK < 2 else 3):
            squares(module, dyadic(step, RANK)).backward()
            going.append(replica.step())
    return {"clock": replica.clock, "going": going, "whole": whole(module)}


def case_codecs():
    """Codecs encode a part; a rank has no part of a model of one row."""
    found = {}
    for codec in ("int8", "1bit", "top-k"):
        for make in (net, one_row):
            mesh = mesh_of()
            module, optimizer = make(mesh)
            with dure.attach(module, optimizer, sync=METHODS["bmuf"], codec=codec, across=mesh["groups"]) as replica:
                for step in range(4):
                    module(samples(step)[0]).square().mean().backward()
                    replica.step()
            found[f"{codec} {make.__name__}"] = whole(module)
    return found


def one_row(mesh):
    torch.manual_seed(RANK)
    module = nn.Linear(6, 1)
    fully_shard(module, mesh=mesh["inside"])
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def parts_of_a_training(folder, sync, *, save=False, load=False):
    """Steps 0 to 3, 3 to 7, or all seven, with AdamW: the state is saved in the middle of a period."""
    mesh = mesh_of()
    module, optimizer = net(mesh)
    file = Path(folder) / f"{sync.partition(':')[0]}-{RANK}.pt"
    with dure.attach(module, optimizer, sync=sync, across=mesh["groups"]) as replica:
        if load:
            replica.load_state_dict(torch.load(file))
        for step in range(replica.clock, 3 if save else 7):
            entropy(module, samples(step)).backward()
            replica.step()
        if save:
            with replica.evaluation(), torch.no_grad():
                module(samples(0)[0])
                torch.save(replica.state_dict(), file)
    return part(module).tolist()


RESUMED = ("averaging", "diloco")


def case_saves():
    return {name: parts_of_a_training(sys.argv[1], METHODS[name], save=True) for name in RESUMED}


def case_resumes():
    return {
        name: [
            parts_of_a_training(sys.argv[1], METHODS[name], load=True),
            parts_of_a_training(sys.argv[1], METHODS[name]),
        ]
        for name in RESUMED
    }


def case_state_of_another_rank():
    """The state of the rank beside this one, in the same group."""
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    replica = dure.attach(module, optimizer, sync=METHODS["averaging"], across=mesh["groups"])
    states = [None] * 4
    dist.all_gather_object(states, {**replica.state_dict(), "optimizer": {}, "tensors": {}})
    return error_of(lambda: replica.load_state_dict(states[RANK ^ 1]))


def case_over_both_dimensions():
    """`fully_shard` over all ranks, in two ways."""
    mesh = mesh_of()
    found = []
    for inside in (mesh, init_device_mesh("cpu", (4,))):
        module = Linears(0)
        fully_shard(module, mesh=inside)
        found.append(error_of(lambda m=module: dure.attach(m, sgd(m), sync="averaging", across=mesh["groups"])))
    return found


def case_the_other_dimension():
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    return error_of(lambda: dure.attach(module, optimizer, sync="averaging", across=mesh["inside"]))


def case_different_models():
    mesh = mesh_of()
    module = nn.Linear(3, 5 if RANK < 2 else 6)
    fully_shard(module, mesh=mesh["inside"])
    return error_of(lambda: dure.attach(module, sgd(module), sync="averaging", across=mesh["groups"]))


@dataclass(frozen=True, slots=True)
class MeanOfGradients:
    """A method of a user's own that says it runs on parts, and averages gradients."""

    traits: ClassVar = dure.Traits(needs=("group",), lockstep=True, delivers="mean", staged=True, keeps={})

    async def work(self, worker):
        while True:
            worker.step(await worker.mean_gradient())


def case_mean_of_gradients():
    mesh = mesh_of()
    module, optimizer = exact(mesh)
    return error_of(lambda: dure.attach(module, optimizer, sync=MeanOfGradients(), across=mesh["groups"]))


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = {name[5:]: function for name, function in globals().items() if name.startswith("case_")}
    found = {}
    for name in sys.argv[2:]:
        started = time.monotonic()
        found[name] = copy.deepcopy(cases[name]())
        print(f"rank {RANK} {name} {time.monotonic() - started:.2f} s", file=sys.stderr, flush=True)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
