"""Cases of each rank in the tests of `shard=` in a user's loop: `torchrun --nproc-per-node N sharded.py FOLDER NAMES`.

Rank r writes what the cases return to FOLDER/r.json.
"""

import contextlib
import copy
import functools
import io
import json
import math
import os
import sys
from pathlib import Path

import torch
from support.storages import Peak
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.errors import DureError, Quarantined

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
STAGES = ("zero:stage=1", "zero:stage=2")
RULES = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.001, eps=1e-4),
}


class Net(nn.Module):
    """A tied and a frozen parameter, batch norm, and layers that are slices of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 32)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.wide = nn.Linear(32, 20000)  # of slices of their own, with the next
        self.narrow = nn.Linear(20000, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.narrow(torch.relu(self.wide(self.embedding(tokens))))
        return self.head(torch.relu(self.frozen(self.norm(hidden))))


def groups(net):
    """The biases learn at half the rate; the other parameters decay."""
    trained = [each for each in net.parameters() if each.requires_grad]
    small = [each for each in trained if each.dim() == 1]
    return [{"params": small, "lr": 0.01}, {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]


def batches(steps, size=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(10, (size,), generator=generator)
        yield tokens.chunk(WORLD)[RANK], ((tokens + 3) % 10).chunk(WORLD)[RANK]


def flat(net):
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()])


def digest(values):
    """Of the bits, and some of the values."""
    values = values.detach()
    return [values.view(torch.int32).sum(dtype=torch.int64).item(), values[:: max(len(values) // 4000, 1)].tolist()]


def train(rule="adamw", *, shard=None, steps=4, clip=None, net=None, between=lambda replica, number: None, **more):
    """The model after `steps` steps; `between` is called after the backward of each."""
    net = net or Net()
    optimizer = RULES[rule](groups(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with dure.attach(net, optimizer, sync="bsp", shard=shard, **more) as replica:
        for number, (tokens, targets) in enumerate(batches(steps)):
            cross_entropy(net(tokens), targets).backward()
            between(replica, number)
            if clip:
                replica.clip_grad_norm_(clip)
            replica.step()
            scheduler.step()
    return net


def error_of(function):
    try:
        function()
    except (DureError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- cases


def case_equal():
    """Parameters and running means with shards, without, and of DistributedDataParallel."""
    return compared("adamw")


def case_equal_too():
    return compared("sgd", "momentum")


def case_unequal():
    """Parameters of ranks whose batches count 1 and 3, and 5 at a third rank, with shards and without."""
    return [digest(flat(train("sgd", shard=shard, steps=2, batch_size=1 + 2 * RANK))) for shard in (None, *STAGES)]


def compared(*rules):
    gave = {}
    for rule in rules:
        for shard in (None, *STAGES):
            net = train(rule, shard=shard, buffers="rank0")
            gave[f"{rule} {shard}"] = [digest(flat(net)), net.norm.running_mean.tolist()]
        gave[f"{rule} ddp"] = beside(rule, rule)
    return gave


def beside(rule, name, clip=None, steps=4):
    """The same under DistributedDataParallel."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.PrefixStore(name, torch.distributed.TCPStore(*place, is_master=False))
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = RULES[rule](groups(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for tokens, targets in batches(steps):
        optimizer.zero_grad()
        cross_entropy(ddp(tokens), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    del ddp
    torch.distributed.destroy_process_group()
    return [digest(flat(net)), net.norm.running_mean.tolist()]


def case_clipped():
    """`clip_grad_norm_` of the replica, beside that of PyTorch on whole means."""
    gave = {str(shard): digest(flat(train("momentum", shard=shard, clip=0.1)))[1] for shard in (None, *STAGES)}
    return gave | {"ddp": beside("momentum", "clipped", clip=0.1)[0][1]}


def case_norms():
    """The norm before each clipping, and after it; and the part of a rank that clips without a backward."""
    gave = {}
    for shard in (None, *STAGES):
        seen = []

        def clip(replica, number, seen=seen):
            seen.append([float(replica.clip_grad_norm_(0.1)), float(replica.clip_grad_norm_(10.0))])

        train("sgd", shard=shard, between=clip)
        gave[str(shard)] = seen
    return gave


def case_clips_without_backward():
    """Ranks but the first have no batch for the last step, and clip all the same."""
    gave = {}
    for shard in (None, *STAGES):
        net = Net()
        with dure.attach(net, RULES["sgd"](groups(net)), sync="bsp", shard=shard) as replica:
            for number, (tokens, targets) in enumerate(batches(3)):
                if number < 2 or not RANK:
                    cross_entropy(net(tokens), targets).backward()
                replica.clip_grad_norm_(0.01)
                replica.step()
        gave[str(shard)] = digest(flat(net))[1]
    return gave


def case_memory():
    """Bytes of the optimizer's state, of all gradients at the peak of a step, and of the parameters."""
    return {shard: measured(shard) for shard in STAGES}


def measured(shard):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(640, 640, bias=False) for _ in range(40)))  # 66 MB
    optimizer = torch.optim.AdamW(net.parameters())
    params = sum(each.nbytes for each in net.parameters())
    with dure.attach(net, optimizer, sync="bsp", shard=shard) as replica:
        vectors = replica._worker.optimizer._rule.vectors
        state = sum(each.untyped_storage().nbytes() for each in vectors.values())
        flat_gradient = replica._replica.marked_grads.untyped_storage().nbytes()
        with Peak(1 << 16).without(replica._replica.params, replica._replica.marked_grads, *vectors.values()) as peak:
            for _ in range(2):
                net(torch.ones(1, 640)).sum().backward()
                after = sum(each.grad.untyped_storage().nbytes() for each in net.parameters() if usable(each.grad))
                replica.step()
    users = sum(len(each) for each in optimizer.state.values())
    return {
        "params": params,
        "state": state,
        "users": users,
        "kept": flat_gradient,
        "peak": peak.nbytes,
        "after": after,
    }


def usable(gradient):
    return gradient is not None and type(gradient) is torch.Tensor


def case_accumulated():
    """Two backwards of half a batch before each step."""
    gave = {}
    for shard in (None, *STAGES):
        net = Net().eval()
        with dure.attach(net, RULES["momentum"](groups(net)), sync="bsp", shard=shard) as replica:
            for tokens, targets in batches(3):
                with replica.accumulate():
                    cross_entropy(net(tokens[:2]), targets[:2]).backward()
                cross_entropy(net(tokens[2:]), targets[2:]).backward()
                replica.step()
        gave[str(shard)] = digest(flat(net))
    return gave


def case_discarded():
    """A gradient that belongs to no step is discarded by each `zero_grad()`; then a rank skips a step, then both."""
    gave = {}
    for shard in (None, *STAGES):
        net = Net().eval()
        optimizer = RULES["momentum"](groups(net))
        with dure.attach(net, optimizer, sync="bsp", shard=shard) as replica:
            for number, (tokens, targets) in enumerate(batches(6)):
                if number in (1, 2, 3):
                    (cross_entropy(net(tokens), targets) * 100).backward()
                    {1: net.zero_grad, 2: optimizer.zero_grad, 3: replica.zero_grad}[number]()
                if number == 5 or (number == 4 and RANK):
                    replica.skip()
                    continue
                cross_entropy(net(tokens), targets).backward()
                replica.step()
        gave[str(shard)] = digest(flat(net))
    return gave


def case_nan():
    """One element of a gradient is NaN in step 1, in the part of one rank: the model after each step."""
    gave = {}
    for shard in (None, *STAGES):
        seen = []
        net = Net().eval()
        with dure.attach(net, RULES["adamw"](groups(net)), sync="bsp", shard=shard) as replica:
            for number, (tokens, targets) in enumerate(batches(3)):
                spoiling = net.narrow.weight.register_hook(spoilt if RANK == WORLD - 1 and number == 1 else torch.clone)
                cross_entropy(net(tokens), targets).backward()
                spoiling.remove()
                replica.step()
                seen.append(digest(flat(net)))
        gave[str(shard)] = seen
    return gave


def spoilt(gradient):
    gradient = gradient.clone()
    gradient[0, 0] = math.nan
    return gradient


def case_quarantined():
    """The gradients of rank 1 hold NaN in every step."""
    gave = {}
    for shard in STAGES:
        net = Net().eval()
        with (
            contextlib.suppress(Quarantined),
            dure.attach(net, RULES["sgd"](groups(net)), sync="bsp", shard=shard) as replica,
        ):
            for tokens, targets in batches(5):
                (cross_entropy(net(tokens), targets) * (math.nan if RANK else 1.0)).backward()
                gave[shard] = error_of(replica.step)
                if gave[shard]:
                    break
    return gave


def case_resumed():
    """Saved in the middle and resumed, beside a training without a break; and what is refused."""
    gave = {}
    for shard in STAGES:
        torch.manual_seed(0)
        whole = digest(flat(train(shard=shard, steps=5)))
        net, states = Net(), []
        optimizer = RULES["adamw"](groups(net))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        every = list(batches(5))
        for part in (every[:3], every[3:]):
            copied = copy.deepcopy(net)
            again = RULES["adamw"](groups(copied))
            again.load_state_dict(optimizer.state_dict())
            schedule = torch.optim.lr_scheduler.StepLR(again, 2, 0.5)
            schedule.load_state_dict(scheduler.state_dict())
            with dure.attach(copied, again, sync="bsp", shard=shard) as replica:
                if states:
                    saved = io.BytesIO()
                    torch.save(states[-1], saved)
                    saved.seek(0)
                    replica.load_state_dict(torch.load(saved))
                for tokens, targets in part:
                    cross_entropy(copied(tokens), targets).backward()
                    replica.step()
                    schedule.step()
                states.append(replica.state_dict())
            net, optimizer, scheduler = copied, again, schedule
        numels = sorted(each.numel() for each in states[0]["tensors"].values())
        gave[shard] = [whole, digest(flat(net)), numels, flat(net).numel()]
    return gave


def case_refused():
    """Errors of calls between backward and step that would find other values at each rank."""
    return {shard: {name: spoiled(shard, name) for name in MISUSES} for shard in STAGES}


MISUSES = {
    "clip": lambda net, replica: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "clip_value": lambda net, replica: nn.utils.clip_grad_value_(net.parameters(), 1.0),
    "norm": lambda net, replica: net.head.weight.grad.norm(),
    "backward": lambda net, replica: net(torch.tensor([1])).sum().backward(),
    "optimizer": lambda net, replica: replica.optimizer.step(),
    "scaler": lambda net, replica: replica.step(torch.amp.GradScaler("cpu")),
    "group": lambda net, replica: change(replica),
    "closure": lambda net, replica: replica.routed_optimizer.step(lambda: net(torch.tensor([1])).sum().backward()),
    "state": lambda net, replica: replica.optimizer.load_state_dict(used(net)),
}


def change(replica):
    replica.optimizer.param_groups[0]["momentum"] = 0.5
    replica.step()


def used(net):
    other = copy.deepcopy(net)
    optimizer = RULES["momentum"](groups(other))
    other(torch.tensor([1])).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def spoiled(shard, name):
    net = Net().eval()
    replica = dure.attach(net, RULES["momentum"](groups(net)), sync="bsp", shard=shard)
    ((tokens, targets),) = batches(1)
    cross_entropy(net(tokens), targets).backward()
    said = error_of(functools.partial(MISUSES[name], net, replica))
    replica.failed(RuntimeError("the end of this case"))
    return said


def case_two_models():
    """A second model that is attached beside the first, without shards."""
    one, other = Net().eval(), Net().eval()
    with (
        dure.attach(one, RULES["sgd"](groups(one)), sync="bsp", shard=STAGES[1]) as sharded,
        dure.attach(other, RULES["sgd"](groups(other)), sync="bsp") as whole,
    ):
        for tokens, targets in batches(3):
            for net, replica in ((one, sharded), (other, whole)):
                cross_entropy(net(tokens), targets).backward()
                replica.step()
    return [digest(flat(one)), digest(flat(other))]


def case_stops():
    """Rank 1 has a batch less: both end at the same step; with bytes that were sent, and the model at the end."""
    gave = {}
    for shard in STAGES:
        net, took = Net().eval(), 0
        with dure.attach(net, RULES["sgd"](groups(net)), sync="bsp", shard=shard) as replica:
            for tokens, targets in [*batches(3)][: 3 - RANK]:
                cross_entropy(net(tokens), targets).backward()
                replica.clip_grad_norm_(1.0)
                took += replica.step()
            sent = replica.bytes_sent
        gave[shard] = [took, digest(flat(net)), sent / flat(net).numel() / 4]
    return gave


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    gave = {name: globals()[f"case_{name}"]() for name in names}
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(gave))
