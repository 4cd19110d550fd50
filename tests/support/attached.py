"""Cases of each rank in the tests of `dure.attach`: `torchrun --nproc-per-node 2 attached.py FOLDER`.

Each case returns plain values; rank r writes all of them to FOLDER/r.json. Cases run one after another in the same
processes, so most of the time that processes take to start is spent once.
"""

import contextlib
import copy
import functools
import io
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.job.data import load_digits

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
REMEDIED = "downpour+dc-asgd+staleness-lr+momentum-compensation:target=0.5"
RING = "bsp collective:algorithm=ring"
WHOLE = ("bsp", "bsp ps:shards=2,split=layer", "averaging:period=1", RING)
ADVERSARIAL = ("bsp", RING)
PINNED = ("bsp", RING, "ssp ps:shards=2")
LEARNING = ("ad-psgd", "ssp:bound=2", "averaging:period=4", REMEDIED)
SKIPPING = ("bsp",)
CHANNELS_LAST = ("bsp", "bsp ps")
RESUMED = ("averaging:period=4,schedule=decay,factor=0.5,interval=4",)
RESUMED_TOO = ("bsp", "averaging:period=4", "diloco:period=4", "bmuf:period=4")
ENCODED = {"averaging:period=4": "1bit"}
ENCODED_TOO = {"bsp": "1bit", "bmuf:period=3": "top-k"}
MEETING = ("averaging:period=4", "averaging:period=4,weights=uniform", "one-shot", "bmuf:period=4", "diloco:period=4")
OVERFLOWING = ("bsp", "averaging:period=5", f"averaging:period=5 {RING.split()[1]}")
ALL = ("bsp", "averaging:period=3", "downpour", "ssp:bound=3", "bsp ps", "averaging:period=3 ps", RING)

LONG = (
    "accumulate",
    "adversaries",
    "beside_ddp",
    "bytes_sent",
    "channels_last",
    "constants",
    "groups",
    "encoded_too",
    "learns",
    "leaves_during_backward_with_ddp",
    "loads_alone",
    "other_fails",
    "owner_fails",
    "quorum_of_the_living",
    "repeats_a_wide_backward",
    "resumed_too",
    "uneven",
    "uneven_whole",
    "waits_for_each_other",
    "unused_beside_ddp",
)
"""Cases that start servers several times, train for epochs, or wait for seconds: for `make all`."""


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def batches(steps, size=32):
    """The batches of one worker; two workers have half of each."""
    data = load_digits().train
    for step in range(steps):
        rows = torch.arange(step * size, (step + 1) * size) % len(data)
        yield data.batch(rows)


def mine(steps):
    for x, y in batches(steps):
        yield x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK]


def loss_of(module, batch):
    return cross_entropy(module(batch[0]), batch[1])


def flat(module):
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()]).tolist()


def attach(module, optimizer, strategy, **more):
    sync, *topology = strategy.split()
    return dure.attach(module, optimizer, sync=sync, topology=topology[0] if topology else None, **more)


def groups(module, kind=torch.optim.SGD, **more):
    """Two parameter groups: the first layer learns at half the rate of the second, and decays."""
    first, second = list(module[0].parameters()), list(module[2].parameters())
    return kind([{"params": first, "lr": 0.05, "weight_decay": 0.01}, {"params": second}], lr=0.1, **more)


def train(strategy, *, make=torch.optim.SGD, steps=9, schedule=None, seed=RANK, **more):
    """Parameters after `steps` steps, each rank with its half of every batch."""
    module = model(seed)
    optimizer = make(module.parameters(), lr=0.1) if make is torch.optim.SGD else make(module)
    scheduler = schedule(optimizer) if schedule else None
    with attach(module, optimizer, strategy, **more) as replica:
        for batch in mine(steps):
            loss_of(module, batch).backward()
            replica.step()
            if scheduler:
                scheduler.step()
    return flat(module)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


# ---- cases


def case_means():
    """Every way to be one worker with the whole batch."""
    return {strategy: train(strategy) for strategy in WHOLE}


def case_groups():
    """Two parameter groups, whose rates a schedule halves every other step."""

    def make(module):
        return groups(module, momentum=0.9, nesterov=True)

    return {strategy: train(strategy, make=make, schedule=halving) for strategy in ("bsp", "bsp ps")}


def adversaries():
    """A generator and a discriminator of the digits' 64 pixels."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 64)),
        nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1)),
    )


def verdict(discriminator, inputs, wanted):
    said = discriminator(inputs)
    return binary_cross_entropy_with_logits(said, torch.full_like(said, wanted))


def compete(models, steps, own_loss=contextlib.nullcontext, size=32, zeroing=True):
    """The loop of PyTorch's DCGAN example. `own_loss()` is around the first of the discriminator's two backwards."""
    (generator, step_generator), (discriminator, step_discriminator) = models
    noise = torch.Generator().manual_seed(0)
    for real, _ in batches(steps, size):
        z = torch.randn(size, 4, generator=noise)
        real, z = real.chunk(WORLD)[RANK], z.chunk(WORLD)[RANK]
        if zeroing:
            discriminator.zero_grad()
        with own_loss():
            verdict(discriminator, real, 1.0).backward()
        fake = generator(z)
        verdict(discriminator, fake.detach(), 0.0).backward()
        step_discriminator()
        generator.zero_grad()
        verdict(discriminator, fake, 1.0).backward()
        step_generator()
    return [flat(generator), flat(discriminator)]


def two_attached(strategy, steps=6, **more):
    generator, discriminator = adversaries()
    with (
        attach(generator, torch.optim.Adam(generator.parameters(), lr=0.01), strategy) as first,
        attach(discriminator, torch.optim.Adam(discriminator.parameters(), lr=0.01), strategy) as second,
    ):
        models = (generator, first.step), (discriminator, second.step)
        return compete(models, steps, second.accumulate, **more)


def case_adversaries():
    return {strategy: two_attached(strategy) for strategy in ADVERSARIAL}


def case_adversaries_without_zero_grad():
    return error_of(lambda: two_attached("bsp", zeroing=False))


def case_learns():
    data = load_digits()
    found = {}
    for strategy in LEARNING:
        module = model(RANK)
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy) as replica:
            sampler = replica.sampler(data.train.inputs)
            for _ in range(6):
                for rows in torch.tensor(list(sampler)).split(32):
                    loss_of(module, data.train.batch(rows)).backward()
                    replica.step()
        right = (module(data.test.inputs).argmax(dim=1) == data.test.targets).double().mean()
        found[strategy] = [float(right), flat(module)]
    return found


def normalized():
    torch.manual_seed(RANK)
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def case_uneven():
    """Rank 1 has fewer batches. The model's running statistics differ between ranks while they train."""
    found = {}
    for strategy in ALL:
        module = normalized()
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.05), strategy) as replica:
            going = []
            for batch in list(mine(10))[: 10 - 4 * RANK]:
                loss_of(module, batch).backward()
                going.append(replica.step())
            own = module[1].running_mean.tolist()
        found[strategy] = {
            "clock": replica.clock,
            "going": going,
            "params": flat(module),
            "own": own,
            "merged": module[1].running_mean.tolist(),
            "batches": int(module[1].num_batches_tracked),
        }
    return found


def case_uneven_whole():
    """What BSP leaves when both ranks have as many batches as rank 1 had in `case_uneven`."""
    module = normalized()
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.05), "bsp") as replica:
        for batch in list(mine(10))[:6]:
            loss_of(module, batch).backward()
            replica.step()
    return flat(module)


class Pinned(nn.Module):
    """A frozen layer, and every kind of buffer that training leaves alone, other at each rank."""

    def __init__(self, *, normalize):
        super().__init__()
        torch.manual_seed(100 + RANK)
        self.frozen = nn.Linear(64, 8).to(torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.norm = nn.BatchNorm1d(8) if normalize else nn.Identity()
        self.head = nn.Linear(8, 10)
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("phase", torch.randn(2, 3, dtype=torch.complex64).t())
        self.register_buffer("table", torch.randint(100, (5,)), persistent=False)
        self.register_buffer("nothing", torch.empty(0, dtype=torch.bool))
        self.register_buffer("everywhere", torch.ones(1).expand(4), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.frozen(x.to(torch.bfloat16)).float() * self.scale))

    def pinned(self):
        tensors = [*self.frozen.parameters(), self.scale, self.mask, torch.view_as_real(self.phase), self.table]
        return [tensor.tolist() for tensor in tensors]


def case_constants():
    """What training leaves alone: at first, after a step, and what was trained beside it."""
    found = {}
    for strategy in PINNED:
        module = Pinned(normalize=strategy == PINNED[-1])
        before = module.pinned()
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), strategy) as replica:
            inside = module.pinned()
            loss_of(module, next(mine(1))).backward()
            replica.step()
        found[strategy] = {"before": before, "inside": inside, "after": module.pinned(), "head": flat(module.head)}
    return found


def case_different_constants():
    module = model()
    module.register_buffer("table", torch.zeros(3 + RANK), persistent=False)
    return error_of(lambda: attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp"))


def case_clipping():
    """After backward, gradients under BSP are the mean: every rank clips the same."""
    module = model(RANK)
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp") as replica:
        for batch in mine(3):
            replica.optimizer.zero_grad()  # a habit that detaches gradients from the flat buffer
            loss_of(module, batch).backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            replica.step()
    return [float(norm), flat(module)]


def case_accumulate():
    """Two halves of this rank's share, one after the other."""
    module = model(RANK)
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp") as replica:
        for x, y in mine(9):
            first, second = zip(x.chunk(2), y.chunk(2), strict=True)
            with replica.accumulate():
                (loss_of(module, first) / 2).backward()
            (loss_of(module, second) / 2).backward()
            replica.step()
    return flat(module)


def wide():
    """Two layers of 1.6 MB: each is a slice of the gradient."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 640), nn.Tanh(), nn.Linear(640, 640), nn.Tanh(), nn.Linear(640, 640))


def accumulated(module, step, alone, steps=3, parts=4):
    """A loop of nanoGPT's shape: accumulation over micro-batches, clipping, AdamW. `alone(part)` is the context."""
    norms = []
    for batch in mine(steps):
        for part, (x, y) in enumerate(zip(*(each.chunk(parts) for each in batch), strict=True)):
            with alone(part == parts - 1):
                (loss_of(module, (x, y)) / parts).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        step()
    return {"norms": norms, "params": flat(module)}


def case_leaves_during_backward():
    """The order of events in the first step under BSP: complete gradients, and collectives."""
    module = wide()
    events = []
    with attach(module, torch.optim.AdamW(module.parameters(), lr=1e-3), "bsp") as replica:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        group = replica._source.exchange._group
        start = group.all_reduce
        group.all_reduce = lambda tensor: [events.append(tensor.numel()), start(tensor)][1]

        def alone(last):
            events.append("last micro-batch" if last else "micro-batch")
            return contextlib.nullcontext() if last else replica.accumulate()

        def step():
            events.append("step")
            replica.step()

        found = accumulated(module, step, alone)
    return {**found, "events": events[: events.index("step")]}


def join_group(name):
    """Make the default process group; a second one in the same store needs keys of its own."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.PrefixStore(name, torch.distributed.TCPStore(*place, is_master=False))
    limit = timedelta(seconds=20)  # of a wait for a rank that has left the group
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=limit)


def case_leaves_during_backward_with_ddp():
    """The same loop under DistributedDataParallel."""
    join_group("with ddp")
    model = DistributedDataParallel(wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    found = accumulated(model, optimizer.step, lambda last: contextlib.nullcontext() if last else model.no_sync())
    torch.distributed.destroy_process_group()
    return found


def case_beside_ddp():
    """A wrapper that nobody calls, and calls of one that is made before attach, or after it."""
    join_group("beside ddp")
    found = {}
    module = DistributedDataParallel(model(RANK)).module
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp") as replica:
        for batch in mine(9):
            loss_of(module, batch).backward()
            replica.step()
    found["uncalled"] = flat(module)
    for strategy, before, more in (
        ("bsp", True, {}),
        ("bsp", False, {"static_graph": True}),
        ("downpour ps", True, {"find_unused_parameters": True}),
        ("downpour ps", False, {"gradient_as_bucket_view": True}),
    ):
        module = model()
        wrapper = DistributedDataParallel(module, **more) if before else None
        replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy)
        wrapper = wrapper or DistributedDataParallel(module, **more)
        other = DistributedDataParallel(model())
        loss_of(other, next(mine(1))).backward()
        with torch.no_grad():
            wrapper(next(mine(1))[0])
        found[f"{strategy} {before}"] = error_of(functools.partial(wrapper, next(mine(1))[0]))[:2]
        replica.__exit__(OverflowError, OverflowError("enough"), None)
        loss_of(wrapper, next(mine(1))).backward()  # the training has ended, and DDP is on its own
    torch.distributed.destroy_process_group()
    return found


def case_skipped():
    """The model before and after a step that both ranks skip, and after one that only rank 0 skips."""
    found = {}
    for strategy in SKIPPING:
        module = model(RANK)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with attach(module, optimizer, strategy) as replica:
            for batch in mine(3):
                loss_of(module, batch).backward()
                replica.step()
            seen = [flat(module)]
            replica.skip()
            seen.append(flat(module))
            if RANK == 0:
                replica.skip()
            else:
                loss_of(module, next(mine(1))).backward()
                replica.step()
            found[strategy] = [*seen, flat(module), replica.clock]
    return found


def case_overflow():
    """At step 3 the scaled loss of rank 1 overflows: scales, clock, and whether the step moved anything."""
    return {strategy: overflowing(strategy) for strategy in OVERFLOWING}


def overflowing(strategy):
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, unmoved = [], []
    with attach(module, optimizer, strategy) as replica:
        for step, batch in enumerate(mine(6)):
            loss = loss_of(module, batch)
            scaler.scale(loss * float("inf") if (step, RANK) == (3, 1) else loss).backward()
            before = flat(module), copy.deepcopy(optimizer.state_dict())
            replica.step(scaler)
            scaler.update()
            unmoved.append(flat(module) == before[0] and str(optimizer.state_dict()) == str(before[1]))
            scales.append(scaler.get_scale())
        clock = replica.clock
    return {"scales": scales, "unmoved": unmoved, "clock": clock, "model": flat(module)}


def case_weights():
    """Rank 0 has three quarters of each batch, and says so."""
    module = model(RANK)
    size = 24 if RANK == 0 else 8
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp", batch_size=size) as replica:
        for x, y in batches(9):
            loss_of(module, (x.split([24, 8])[RANK], y.split([24, 8])[RANK])).backward()
            replica.step()
    return flat(module)


def case_evaluation():
    """What is shown inside is the mean; afterwards the replica is as it was, and trains on."""
    found = {}
    for strategy in ("averaging:period=100", "bsp"):
        module = model(RANK)
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy) as replica:
            for batch in mine(3):
                loss_of(module, batch).backward()
                replica.step()
            before = flat(module)
            with replica.evaluation():
                inside = flat(module)
            found[strategy] = {"before": before, "inside": inside, "after": flat(module)}
        found[strategy]["end"] = flat(module)
    return found


def case_delivers():
    """In evaluation, within a block and at its end, the model is that of a `close()` after as many steps."""
    return {strategy: [delivering(strategy, steps) for steps in (3, 4, 6)] for strategy in MEETING}


def delivering(strategy, steps):
    """The models inside an evaluation after each of `steps` steps, and at the end; the replica before and after it."""
    module = nn.Sequential(*model(RANK)[:2], nn.BatchNorm1d(16), nn.Linear(16, 10))
    inside, around = [], []
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy) as replica:
        for batch in mine(steps):
            loss_of(module, batch).backward()
            replica.step()
            before = whole(module)
            with replica.evaluation():
                inside.append(whole(module))
            around.append(whole(module) == before)
    return {"inside": inside[-1], "around": all(around), "end": whole(module)}


def whole(module):
    """Parameters and buffers."""
    return torch.cat([each.detach().double().reshape(-1) for each in module.state_dict().values()]).tolist()


def case_resumed_too():
    return {strategy: [resuming(strategy, breaks) for breaks in ((), (5, 8))] for strategy in RESUMED_TOO}


def case_resumed():
    """Steps without a break, and steps in two trainings, the second of which begins with the files of the first."""
    return {strategy: [resuming(strategy, breaks) for breaks in ((), (5, 8))] for strategy in RESUMED}


def resuming(strategy, breaks, steps=11):
    """The model after `steps` steps with AdamW; after the steps `breaks` a new process would begin here."""
    loaded = {}
    for first, last in zip((0, *breaks), (*breaks, steps), strict=True):
        module = model(RANK + first)  # other values, which the files replace
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        replica = attach(module, optimizer, strategy)
        if loaded and strategy == "bsp":  # whose ranks have one model and one optimizer, which the loop saves
            module.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        if loaded:
            replica.load_state_dict(loaded["rank"])
        assert replica.clock == first
        for batch in [*mine(steps)][first:last]:
            loss_of(module, batch).backward()
            replica.step()
        with replica.evaluation():
            saved = {"model": module, "optimizer": optimizer, "rank": replica}
            for name, each in saved.items():
                file = io.BytesIO()
                torch.save(each.state_dict(), file)
                file.seek(0)
                loaded[name] = torch.load(file, weights_only=True)
        replica.close()
    return flat(module)


class Heads(nn.Module):
    """One trunk, a head of each rank, and a head of none."""

    def __init__(self, rank):
        super().__init__()
        self.trunk = model(rank)
        self.heads = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, inputs):
        return self.heads[RANK](self.trunk(inputs))


def with_heads(wrap, step, steps=5):
    """The parameters after steps with AdamW, whose decay moves what has a gradient alone."""
    module = Heads(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3)
    called = wrap(module, optimizer)
    for number, batch in enumerate(mine(steps)):
        if number == 3:  # a step whose loss reaches the trunk alone, in two micro-batches
            with called.no_sync() if hasattr(called, "no_sync") else called.accumulate():
                loss_of(module.trunk, batch).backward()
        used = 0.0 if (number, RANK) == (2, 0) else 1.0  # a gradient of zeros is one, unlike none
        (loss_of(called if hasattr(called, "no_sync") else module, batch) * used).backward()
        step(called, optimizer)
    if not hasattr(called, "no_sync"):
        called.close()
    return flat(module)


def encoded(codec, sync="bsp", topology=None, *, steps=12, evaluates=False, breaks=()):
    """The model after steps with a codec, and what the model was inside each evaluation."""
    loaded, inside = {}, []
    for first, last in zip((0, *breaks), (*breaks, steps), strict=True):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        replica = dure.attach(module, optimizer, sync=sync, topology=topology, codec=codec)
        if loaded:
            module.load_state_dict(loaded["model"])
            replica.load_state_dict(loaded["rank"])
        for batch in [*mine(steps)][first:last]:
            loss_of(module, batch).backward()
            replica.step()
            if evaluates:
                with replica.evaluation():
                    inside.append(flat(module))
        loaded = {"model": copy.deepcopy(module.state_dict()), "rank": None if topology else replica.state_dict()}
        replica.close()
    return {"end": flat(module), "inside": inside[-1:]}


def narrow_and_encoded(codec):
    """Parameters of 16 bits after steps, where a codec encodes their gradients."""
    module = model().bfloat16()
    with dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), codec=codec) as replica:
        for inputs, targets in mine(8):
            cross_entropy(module(inputs.bfloat16()).float(), targets).backward()
            replica.step()
    return flat(module.float())


def case_codecs():
    """Codecs over collectives and servers."""
    return {
        "bfloat16": [narrow_and_encoded(codec) for codec in (None, "strom:threshold=0.0001")],
        "fp16": encoded("fp16"),
        "fp16 ps": encoded("fp16", topology="ps:shards=2"),
    }


def remembering(sync, codec):
    """A training with an error memory, the same with evaluations between steps, and the same in parts."""
    return [encoded(codec, sync), encoded(codec, sync, evaluates=True), encoded(codec, sync, breaks=(3, 7))]


def case_encoded():
    return {sync: remembering(sync, codec) for sync, codec in ENCODED.items()}


def case_encoded_too():
    return {sync: remembering(sync, codec) for sync, codec in ENCODED_TOO.items()}


def error_beside_a_group(name, loop):
    """The error of a loop with a process group of its own."""
    join_group(name)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = error_of(lambda: loop(module, attach(module, optimizer, "bsp", frozen_after=2.0)))
    torch.distributed.destroy_process_group()
    return found


def case_waits_for_each_other():
    """Rank 1 has ended its loop, and waits for rank 0 in a barrier of its own."""

    def loop(module, replica):
        for batch in mine(3 - RANK):
            if RANK == 1:
                time.sleep(3.0)  # a slow rank, for whom the other waits
            loss_of(module, batch).backward()
            replica.step()
        if RANK == 1:
            with contextlib.suppress(RuntimeError):  # once the other rank has ended
                torch.distributed.barrier()
            replica.step()

    return error_beside_a_group("uneven", loop)


def case_gossip():
    """Constant gradients, different at each rank: averagings leave the mean of all models as it is."""
    found = {}
    for uneven in (False, True):
        torch.manual_seed(RANK)
        module = nn.Sequential(nn.Linear(4, 1, bias=False), nn.BatchNorm1d(1))
        start = module[0].weight.detach().clone()
        with attach(module, torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.5), "ad-psgd gossip") as replica:
            for _ in range(20 - 8 * RANK * uneven):
                (module[0].weight * (1.0 + RANK)).sum().backward()
                replica.step()
                time.sleep(0.004 * (1 + RANK))
            apart = module[0].weight.detach().clone()
            with replica.evaluation():
                inside = module[0].weight.tolist()
            assert torch.equal(module[0].weight, apart)
            averaged = replica._worker.sessions.peer.averaged
        end = module[0].weight.tolist()
        found[str(uneven)] = {"start": start.tolist(), "inside": inside, "end": end, "averaged": averaged}
    return found


def case_gossip_evaluates():
    """Rank 1 takes its last step, and evaluates, late; then each waits for the other in a barrier of its own."""
    join_group("gossip evaluates")
    module = nn.Sequential(nn.Linear(4, 1, bias=False), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    with attach(module, optimizer, "ad-psgd gossip", batch_size=1 + RANK, frozen_after=5.0) as replica:
        for step in range(6):
            (module(torch.arange(12.0).reshape(3, 4) * (1.0 + RANK + step)) * torch.eye(3, 1)).sum().backward()
            (module[0].weight * (1.0 + RANK)).sum().backward()
            time.sleep(0.2 * RANK * (step == 5))
            replica.step()
        time.sleep(0.2 * RANK)
        with replica.evaluation():
            inside = [flat(module), module[1].running_mean.tolist()]
        torch.distributed.barrier()
        with replica.evaluation() if RANK == 0 else contextlib.nullcontext():  # rank 1 has ended
            again = flat(module) if RANK == 0 else inside[0]
    torch.distributed.destroy_process_group()
    return {"inside": inside, "again": again, "end": [flat(module), module[1].running_mean.tolist()]}


def case_bytes_sent():
    """The bytes that each of four steps sends."""
    found = {}
    for strategy, codec in (("bsp", None), (RING, None), ("bsp", "int8"), ("bsp ps", None)):
        module, seen = model(), []
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy, codec=codec) as replica:
            for batch in mine(4):
                before = replica.bytes_sent
                loss_of(module, batch).backward()
                replica.step()
                seen.append(replica.bytes_sent - before)
        assert replica.bytes_sent >= sum(seen)
        found[f"{strategy} {codec}"] = seen
    return found


def case_loads_alone():
    """Rank 1 loads no state, and waits for rank 0 in a barrier of its own."""

    def loop(module, replica):
        if RANK == 0:
            replica.load_state_dict(replica.state_dict())
        with contextlib.suppress(RuntimeError):  # once the other rank has ended
            torch.distributed.barrier()
        replica.step()

    return error_beside_a_group("loads alone", loop)


def case_codec_of_nan():
    """A gradient that holds NaN at rank 1 skips the step of both; the next one is exchanged as before."""
    module = model()
    seen = []
    with dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), sync="bsp", codec="int8") as replica:
        for step, batch in enumerate(mine(3)):
            (loss_of(module, batch) * (float("nan") if (step, RANK) == (1, 1) else 1.0)).backward()
            replica.step()
            seen.append(flat(module))
    return seen


def case_codec_of_a_stray_gradient():
    """The gradient of another loss is exchanged, and its error would be added to the next."""
    module = model()
    replica = dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), sync="bsp", codec="1bit")
    batch = next(mine(1))
    loss_of(module, batch).backward()
    module.zero_grad()
    return error_of(lambda: loss_of(module, batch).backward()), error_of(replica.step)


def case_unused():
    """Heads that no rank uses, or one rank alone, over collectives: models, and what no gradient has reached."""
    found = {}
    for strategy in ("bsp", RING, "averaging:period=2"):
        found[strategy] = with_heads(
            lambda module, optimizer, strategy=strategy: attach(module, optimizer, strategy),
            lambda replica, _: replica.step(),
        )
    return found


def case_unused_beside_ddp():
    join_group("unused beside ddp")

    def step(_, optimizer):
        optimizer.step()
        optimizer.zero_grad()

    found = with_heads(lambda module, _: DistributedDataParallel(module, find_unused_parameters=True), step)
    torch.distributed.destroy_process_group()
    return found


def case_buffers_of_rank_0():
    """The running statistics of both ranks after each step, and at the end."""
    found = {}
    for strategy in ("bsp", "averaging:period=2", "bsp ps"):
        module = nn.Sequential(*model()[:2], nn.BatchNorm1d(16), nn.Linear(16, 10))
        seen = []
        with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy, buffers="rank0") as replica:
            for batch in mine(4):
                loss_of(module, batch).backward()
                replica.step()
                seen.append(module[2].running_mean.tolist())
        found[strategy] = [*seen, module[2].running_mean.tolist(), module[2].num_batches_tracked.item()]
    return found


def error_of(function):
    started = time.monotonic()
    try:
        function()
    except dure.DureError as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return None


def case_ranks_unknown_to_the_environment():
    """As in processes of torch.multiprocessing.spawn, which have met by `init_process_group` alone."""
    join_group("ranks unknown")
    removed = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    module = model()
    try:
        return error_of(lambda: attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp"))
    finally:
        os.environ.update(removed)
        torch.distributed.destroy_process_group()


def case_one_fails():
    """Rank 1's loop raises at its third step; it lives on, and rank 0 hears of it at once."""
    found = {}
    for strategy in ("bsp", "averaging:period=2", RING):
        module = model(RANK)
        replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy)
        try:
            with replica:
                for step, batch in enumerate(mine(6)):
                    loss_of(module, batch).backward()
                    if step == 2 and RANK == 1:
                        raise OverflowError("the user's own mistake")
                    started = time.monotonic()
                    replica.step()
        except (dure.DureError, OverflowError, RuntimeError) as error:
            found[strategy] = [type(error).__name__, str(error), time.monotonic() - started]
            try:
                replica.step()
            except (dure.DureError, OverflowError) as again:
                found[strategy].append(again is error or str(again) == str(error))
    return found


def case_owner_fails():
    """Rank 0, beside which the server is, gives up: rank 1 cannot go on."""
    module = model(RANK)
    replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "ssp:bound=0")

    def on():
        while True:
            replica.step()

    if RANK == 1:
        return error_of(on)
    replica.step()  # returns once rank 1 is in its first step too
    replica.__exit__(OverflowError, OverflowError("out of luck"), None)
    return None


def giving_up(strategy, steps):
    """Rank 1 gives up at its third step; the clock of rank 0 at its end."""
    module = model(RANK)
    replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy)
    for step, batch in enumerate(mine(steps)):
        if step == 2 and RANK == 1:
            replica.__exit__(OverflowError, OverflowError("out of luck"), None)
            return None
        loss_of(module, batch).backward()
        replica.step()
    replica.close()
    return replica.clock


def case_other_fails():
    """Rank 1 owns no server: under SSP rank 0 goes on."""
    return giving_up("ssp:bound=1", 12)


def case_quorum_of_the_living():
    """Rank 0 alone is the quorum, and goes on."""
    return giving_up("k-sync:k=2", 6)


def images(memory_format=torch.channels_last):
    """A network for the digits as images, in a memory format."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers).to(memory_format=memory_format)


def train_images(strategy, steps=6):
    """The parameters, and the strides of parameters and gradients, after steps with each rank's half of a batch."""
    module = images()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    strides = set()
    with attach(module, optimizer, strategy) as replica:
        for batch in mine(steps):
            loss_of(module, batch).backward()
            strides.add(str([(each.stride(), each.grad.stride()) for each in module.parameters()]))
            replica.step()
    assert [each.stride() for each in module.parameters()] == [each.stride() for each in images().parameters()]
    return {"params": flat(module), "strides": list(strides)}


def case_channels_last():
    return {strategy: train_images(strategy) for strategy in CHANNELS_LAST}


def case_different_strides():
    module = images(torch.channels_last if RANK else torch.contiguous_format)
    return error_of(lambda: attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp"))


def case_different_models():
    module = model() if RANK == 0 else nn.Linear(64, 10)
    return error_of(lambda: attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp"))


def case_backward_twice():
    module = model(RANK)
    replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp")
    batch = next(mine(1))
    loss_of(module, batch).backward()
    error = error_of(lambda: loss_of(module, batch).backward())
    replica.__exit__(OverflowError, OverflowError("enough"), None)
    return error


def case_one_evaluates():
    """One rank looks at the mean while the other steps."""
    module = model(RANK)
    replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "averaging:period=5")
    loss_of(module, next(mine(1))).backward()

    def look():
        with replica.evaluation():
            pass

    return error_of(look if RANK == 0 else replica.step)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("in the middle of backward")


def repeating(make, failing, steps=3):
    """Parameters after `steps` steps; in the second, the first backward of the ranks `failing` raises halfway."""
    module, on = make(), False
    module[1].register_forward_hook(lambda module, given, out: Failing.apply(out) if on else None)
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp") as replica:
        for step, batch in enumerate(mine(steps)):
            if step == 1 and RANK in failing:
                on = True
                with contextlib.suppress(MemoryError):
                    loss_of(module, batch).backward()
                on = False
                module.zero_grad()
            loss_of(module, batch).backward()
            replica.step()
    return flat(module)


def case_repeats_a_backward():
    return [repeating(model, (0,)), repeating(model, ())]


def case_repeats_a_wide_backward():
    return error_of(lambda: repeating(wide, (0, 1)))


def case_goes_on_after_two_backwards():
    module = model(RANK)
    replica = attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp")
    batch = next(mine(1))
    loss_of(module, batch).backward()
    error_of(lambda: loss_of(module, batch).backward())
    return error_of(replica.step)


def case_adds_a_group():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def add():
        with attach(module, optimizer, "bsp") as replica:
            module.append(nn.Linear(10, 4))
            optimizer.add_param_group({"params": list(module[-1].parameters())})
            module(next(mine(1))[0]).sum().backward()
            replica.step()

    return error_of(add)


def leaving_out(at, strategy="bsp"):
    """Parameters after three steps; the ranks for which `at` names a step skip it after its backward."""
    module = model(RANK)
    with attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy) as replica:
        for step, batch in enumerate(mine(3)):
            loss_of(module, batch).backward()
            replica.skip() if at == step else replica.step()
    return flat(module)


def case_all_leave_out():
    return leaving_out(1)


def case_one_leaves_out():
    return error_of(lambda: leaving_out(1 if RANK == 0 else None))


def case_one_leaves_out_its_last():
    return error_of(lambda: leaving_out(2 if RANK == 1 else None, RING))


def main(folder):
    torch.set_num_threads(1)
    cases = {name[5:]: function for name, function in globals().items() if name.startswith("case_")}
    only = sys.argv[2:] or list(cases)
    found = {}
    for name in only:
        started = time.monotonic()
        found[name] = copy.deepcopy(cases[name]())
        print(f"rank {RANK} {name} {time.monotonic() - started:.2f} s", file=sys.stderr, flush=True)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
