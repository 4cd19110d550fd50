"""Cases of each rank in the tests of `integrations.accelerate`: `torchrun ... accelerate_cases.py FOLDER CASE...`.

Rank r writes the values of all cases to FOLDER/r.json, as `attached.py` does.
"""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, set_seed

from dure.errors import DureError
from dure.integrations.accelerate import attach

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Net(nn.Module):
    def __init__(self, *, norm=False, dropout=0.0, spare=False):
        super().__init__()
        torch.manual_seed(0)
        between = [nn.BatchNorm1d(16)] if norm else []
        self.body = nn.Sequential(nn.Linear(8, 16), *between, nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 4)
        if spare:
            self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


def samples(count=96, seed=1, dtype=torch.float32):
    """Four classes, of which the noise hides a part: no model gets near to a loss of zero."""
    made = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(count, 8, generator=made), torch.randn(count, 2, generator=made)
    halves = torch.stack([x[:, :4].sum(1), x[:, 4:].sum(1)], 1) + 2 * noise > 0
    return TensorDataset(x.to(dtype), halves[:, 0].long() + 2 * halves[:, 1].long())


def accelerator_of(**options):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def loss_of(model, batch):
    return cross_entropy(model(batch[0]).double(), batch[1])


def train(
    way, *, dtype=torch.float32, clip=None, value=None, epochs=2, count=96, net=None, options=None, kind=None,
    save_at=None, resume=None, folder=None, close=True, schedule=True, topology=None, codec=None, ddp=None
):  # fmt: skip
    """Losses of this rank's batches and of evaluations, and the state of the model; by DDP or a method."""
    if ddp:
        options = {**(options or {}), "kwargs_handlers": [DistributedDataParallelKwargs(**ddp)]}
    ordered = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerator_of(**{"dataloader_config": ordered, **(options or {})})
    set_seed(3)
    model = Net(**(net or {})).to(dtype)
    kind = kind or (lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1))
    optimizer = kind(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(samples(count, dtype=dtype), batch_size=4, shuffle=True)
    held = DataLoader(samples(32, seed=2, dtype=dtype), batch_size=8)
    model, optimizer, loader, held, scheduler = accelerator.prepare(model, optimizer, loader, held, scheduler)
    replica = None
    if way != "ddp":
        model, replica = attach(accelerator, model, optimizer, sync=way, topology=topology, codec=codec)
    losses, scores, norms, step = [], [], [], 0
    if resume:
        accelerator.wait_for_everyone()  # a rank that refuses the state leaves no other in `attach`
        accelerator.load_state(resume)
        step = json.loads(Path(resume, "step.json").read_text())
    for epoch in range(epochs):
        if step >= (epoch + 1) * len(loader):
            continue
        loader.set_epoch(epoch)
        skipped = max(step - epoch * len(loader), 0)
        model.train()
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            step += 1
            torch.manual_seed(100 * step + RANK)  # dropout
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                if accelerator.sync_gradients and value:
                    accelerator.clip_grad_value_(model.parameters(), value)
                optimizer.step()
                if schedule:
                    scheduler.step()
                optimizer.zero_grad()
            if step == save_at:
                accelerator.save_state(folder)
                if RANK == 0:
                    Path(folder, "step.json").write_text(json.dumps(step))
                accelerator.wait_for_everyone()
        if way in ("ddp", "bsp"):
            scores.append(evaluated(model, held))
        else:
            with replica.evaluation():
                scores.append(evaluated(model, held))
    if replica and close:
        replica.close()
    found = {"losses": losses, "scores": scores, "norms": norms, "state": flat(accelerator.unwrap_model(model))}
    return found if close else (found, accelerator, model, optimizer, replica)


def evaluated(model, loader):
    model.eval()
    with torch.no_grad():
        return sum(loss_of(model, batch).item() for batch in loader)


def flat(model):
    return {name: each.double().flatten().tolist() for name, each in model.state_dict().items()}


def both(ddp=None, **how):
    return [train("ddp", ddp=ddp, **how), train("bsp", **how)]


def error_of(call):
    try:
        call()
    except (DureError, TypeError) as error:
        return str(error)
    return None


# ---- cases


def case_fp64():
    return both(dtype=torch.float64, clip=0.5)


def case_fp32():
    return both(net={"dropout": 0.2})


def case_sgd():
    return both(kind=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), value=0.01)


def case_accumulation():
    """Eleven batches of each rank and epoch, three for a step: two remain."""
    return both(count=88, clip=0.5, options={"gradient_accumulation_steps": 3})


def case_bf16():
    return both(options={"mixed_precision": "bf16"}, clip=0.5)


def case_norm():
    return both(net={"norm": True})


def case_unused():
    return both(net={"spare": True}, ddp={"find_unused_parameters": True})


def case_split_batches():
    return both(options={"dataloader_config": DataLoaderConfiguration(split_batches=True)})


def case_dispatched():
    return both(options={"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)})


METHODS = {
    "bsp": {"way": "bsp"},
    "averaging": {"way": "averaging:period=8"},
    "diloco": {"way": "diloco:period=8"},
    "int8": {"way": "bsp", "codec": "int8"},
    "servers": {"way": "ssp:bound=2", "topology": "ps:shards=2"},
}


def case_methods():
    def kind(parameters):
        return torch.optim.SGD(parameters, lr=0.03)

    return {name: train(epochs=6, count=480, schedule=False, kind=kind, **how) for name, how in METHODS.items()}


RESUMED = ("bsp", "averaging:period=4", "diloco:period=4")
SAVED_AT = {"bsp": 17, "averaging:period=4": 14, "diloco:period=4": 18}
"""After step 14 of a method with period 4, half a period is over."""


def case_resume(folder):
    found = {}
    for way in RESUMED:
        place = str(Path(folder, way.partition(":")[0]))
        how = {"dtype": torch.float64, "net": {"dropout": 0.2}}
        whole = train(way, save_at=SAVED_AT[way], folder=place, **how)
        found[way] = [whole, train(way, resume=place, **how), sorted(os.listdir(Path(place, "dure")))]
    return found


def case_three_ranks_read(folder):
    return error_of(
        lambda: train("averaging:period=4", resume=str(Path(folder).parent / "averaging"), dtype=torch.float64)
    )


def case_from_ddp(folder):
    """A method goes on from a checkpoint of Accelerate's own DDP."""
    place = str(Path(folder, "plain"))
    whole = train("ddp", save_at=10, folder=place)
    return [whole, train("bsp", resume=place)]


def case_last_model(folder):
    """What `save_state`, `save_model` and `get_state_dict` give at the end is what `close` delivers."""
    place = Path(folder, "last")
    _, accelerator, model, _, replica = train("diloco:period=4", epochs=1, count=80, close=False)
    accelerator.save_state(str(place))
    with replica.evaluation():
        accelerator.save_model(model, str(place / "model"))
        inside = accelerator.get_state_dict(model)
    replica.close()
    from safetensors.torch import load_file

    delivered = model.state_dict()
    saved = [load_file(place / "model.safetensors"), load_file(place / "model" / "model.safetensors"), inside]
    return [all(torch.equal(each[name], value) for name, value in delivered.items()) for each in saved]


def case_two_models(folder):
    """Two models of one accelerator, each attached: `accumulate`, saving and loading keep them apart."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    parts = [Net(), Net(norm=True)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in parts]
    replicas = []
    for index in (0, 1):
        model, optimizers[index] = accelerator.prepare(parts[index], optimizers[index])
        parts[index], replica = attach(accelerator, model, optimizers[index], sync="averaging:period=3")
        replicas.append(replica)

    def steps(batches):
        for batch in batches:
            with accelerator.accumulate(*parts):
                for model, optimizer in zip(parts, optimizers, strict=True):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
        return [flat(each) for each in parts]

    batches = [(x + RANK, y) for x, y in DataLoader(samples(), batch_size=8)]
    steps(batches[:8])
    place = str(Path(folder, "pair"))
    accelerator.save_state(place)
    accelerator.wait_for_everyone()
    expected = steps(batches[8:])
    accelerator.load_state(place)
    same = steps(batches[8:]) == expected
    copied = copy.deepcopy(parts[0])
    for replica in replicas:
        replica.close()
    return [same, [replica.clock for replica in replicas], type(copied).__name__]


def case_overflow():
    """Accelerate has a scaler on GPUs only, so this one is put in. At its third step rank 1 overflows."""

    def scaled(way):
        accelerator = accelerator_of()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=40)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        replica = None
        if way != "ddp":
            model, replica = attach(accelerator, model, optimizer, sync=way)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # clipping unscales
        found = {"skipped": [], "scales": [], "rates": [], "norms": [], "losses": []}
        for step, batch in enumerate(DataLoader(samples(64, seed=RANK), batch_size=8)):
            loss = loss_of(model, batch)
            accelerator.backward(loss * (float("inf") if (step, RANK) == (2, 1) else 1))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found["skipped"].append(accelerator.optimizer_step_was_skipped)
            found["scales"].append(accelerator.scaler.get_scale())
            found["rates"].append(schedule.get_last_lr()[0])
            found["norms"].append(norm.item() if norm.isfinite() else -1)
            found["losses"].append(loss.item())
        if replica:
            replica.close()
        return {**found, "state": flat(accelerator.unwrap_model(model))}

    return {way: scaled(way) for way in ("ddp", "bsp", "averaging:period=3", "diloco:period=3")}


def case_uneven():
    """Rank 1 has two batches less, of a loader that is not prepared. Batches that a rank takes, and its steps."""
    accelerator = accelerator_of()
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, replica = attach(accelerator, model, optimizer, sync="averaging:period=2")
    taken = 0
    for batch in DataLoader(samples(32 - 8 * RANK), batch_size=4):
        taken += 1
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    replica.close()
    return [taken, replica.clock]


def case_refusals():
    def attaching(prepare=True, **options):
        accelerator = accelerator_of(**options)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        if prepare:
            model, optimizer = accelerator.prepare(model, optimizer)
        attach(accelerator, model, optimizer)[1].close()

    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return [error_of(lambda: attaching(prepare=False)), error_of(lambda: attaching(kwargs_handlers=[hook]))]


def case_wrapper_is_not_called():
    accelerator = accelerator_of()
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _, replica = attach(accelerator, model, optimizer)
    said = error_of(lambda: model(torch.randn(2, 8)))
    replica.close()
    return said


def main(folder):
    torch.set_num_threads(1)
    cases = {name[5:]: function for name, function in globals().items() if name.startswith("case_")}
    found = {}
    for name in sys.argv[2:] or list(cases):
        case = cases[name]
        found[name] = case(folder) if case.__code__.co_argcount else case()
        print(f"rank {RANK} {name}", file=sys.stderr, flush=True)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
