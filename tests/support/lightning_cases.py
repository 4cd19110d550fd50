"""Cases of each rank in the tests of `DureStrategy`: `torchrun --nproc-per-node 2 lightning_cases.py FOLDER CASE...`.

Rank r writes the values of all cases to FOLDER/r.json, as `attached.py` does.
"""

import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from dure.errors import DureError  # noqa: E402
from dure.integrations.lightning import DureStrategy  # noqa: E402

RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
WORLD = int(os.environ.get("WORLD_SIZE", 2))  # not set where Lightning's own launcher starts
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def data(samples, dtype):
    made = torch.Generator().manual_seed(1)
    x, noise = torch.randn(samples, 8, generator=made), torch.randn(samples, 2, generator=made)
    halves = torch.stack([x[:, :3].sum(1), x[:, 3:].sum(1)], 1) + 2 * noise > 0
    return TensorDataset(x.to(dtype), halves[:, 0].long() + 2 * halves[:, 1].long())


class Net(lightning.LightningModule):
    """A classifier of four classes. `losses` are those of this rank's batches, `scores` those of validations."""

    def __init__(
        self,
        *,
        norm=False,
        unused=False,
        schedule=False,
        sgd=False,
        manual=False,
        fails=False,
        quiet=False,
        samples=48,
        dtype=torch.float32,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)
        if unused:
            self.spare = nn.Linear(4, 4)
        self.automatic_optimization, self.fails, self.quiet = not manual, fails, quiet
        self.sgd, self.schedule, self.samples, self.kind = sgd, schedule, samples, dtype
        self.losses, self.scores = [], []

    def training_step(self, batch, _):
        torch.manual_seed(10 * self.global_step + RANK)  # dropout: Lightning does not restore random numbers
        if self.fails and RANK == 1 and self.global_step == 3:
            raise RuntimeError("an error of the user's")
        loss = cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        loss = cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.scores.append(loss.item())
        if not self.quiet:
            self.log("score", loss, sync_dist=True)

    def configure_optimizers(self):
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.03)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        if not self.schedule:
            return optimizer
        steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)
        return [optimizer], [{"scheduler": steps, "interval": "step"}]

    def train_dataloader(self):
        return DataLoader(data(self.samples, self.kind), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(self.samples // 3, self.kind), batch_size=8)


def fit(strategy, *, net=None, resume=None, epochs=2, **options):
    """Losses of this rank, scores, and the state of the module afterwards."""
    dtype = torch.float64 if options.get("precision") == "64-true" else torch.float32
    module = Net(dtype=dtype, **(net or {}))
    trainer = lightning.Trainer(**{**QUIET, "devices": WORLD, "max_epochs": epochs, "strategy": strategy, **options})
    torch.manual_seed(7)
    trainer.fit(module, ckpt_path=resume)
    state = {name: each.double().flatten().tolist() for name, each in module.state_dict().items()}
    return {"losses": module.losses, "scores": module.scores, "state": state}


def both(ddp=None, **how):
    """The same training by Lightning's DDP and by dure's `bsp`."""
    return [fit(DDPStrategy(**(ddp or {})), **how), fit(DureStrategy(sync="bsp"), **how)]


def error_of(call):
    try:
        call()
    except DureError as error:
        return str(error)
    return None


# ---- cases


def case_fp64():
    return both(precision="64-true", net={"schedule": True}, gradient_clip_val=0.5)


def case_fp32():
    return both(net={"schedule": True})


def case_sgd():
    return both(net={"sgd": True}, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def case_accumulation():
    """Six batches in an epoch: one step of four, and one of the two that are left."""
    return both(accumulate_grad_batches=4, gradient_clip_val=0.5, epochs=3, val_check_interval=2)


def case_bf16():
    return both(precision="bf16-mixed")


def case_fp16():
    return both(precision="16-mixed", gradient_clip_val=0.5)


def case_norm():
    return both(net={"norm": True})


def case_unused():
    return both({"find_unused_parameters": True}, net={"unused": True})


def case_methods():
    """Losses at the end of five ways, beside those of `bsp`."""
    ways = {
        "bsp": DureStrategy(),
        "averaging": DureStrategy("averaging:period=8"),
        "diloco": DureStrategy("diloco:period=8"),
        "int8": DureStrategy(codec="int8"),
    }
    return {name: fit(way, epochs=6, net={"sgd": True, "samples": 480}) for name, way in ways.items()}


def case_validation():
    """Scores of the same samples at all ranks, whose replicas differ."""
    return fit(DureStrategy("averaging:period=100"), use_distributed_sampler=False)


def case_raises():
    """The last case: it breaks Lightning's process group."""
    try:
        fit(DureStrategy("averaging:period=4"), net={"fails": True})
    except (DureError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def case_uneven():
    """Rank 1 has a batch less. Also a last case."""
    try:
        fit(DureStrategy(frozen_after=3), net={"samples": 48 - 4 * RANK, "quiet": True}, use_distributed_sampler=False)
    except DureError as error:
        return str(error)


# ---- checkpoints


def saving(folder, **how):
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, **how)


def case_resume(folder):
    """Uninterrupted, and resumed after the second of four epochs, in the middle of a period."""
    found = {}
    for sync in ("bsp", "averaging:period=8", "diloco:period=8", "bsp 1bit"):
        here = Path(folder) / sync.replace(":", "-")
        method, *codec = sync.split()
        strategy = partial(DureStrategy, method, codec=codec[0] if codec else None)
        how = {"net": {"norm": True, "schedule": True}, "enable_checkpointing": True}
        whole = fit(strategy(), epochs=4, callbacks=[saving(here)], **how)
        first = here / "epoch=1.ckpt"
        rest = fit(strategy(), epochs=4, resume=first, callbacks=[saving(here / "again")], **how)
        alike = [
            torch.load(place / "epoch=3.ckpt", weights_only=False)["state_dict"] for place in (here, here / "again")
        ]
        found[sync] = [whole, rest, all(torch.equal(alike[0][name], alike[1][name]) for name in alike[0])]
        found[sync] += [{name: each.double().flatten().tolist() for name, each in alike[0].items()}]
    return found


def case_several_checkpoints(folder):
    """Files that are left of `save_top_k=1` and a link to the last, and a resumed run by that link."""
    here = Path(folder) / "several"
    keeping = ModelCheckpoint(here, filename="{epoch}", save_last="link", monitor="score", every_n_epochs=1)
    whole = fit(DureStrategy("averaging:period=8"), epochs=3, enable_checkpointing=True, callbacks=[keeping])
    left = sorted(str(each.relative_to(here)) for each in here.rglob("*"))
    rest = fit(DureStrategy("averaging:period=8"), epochs=4, resume=here / "last.ckpt")
    return {"left": left, "steps": [len(whole["losses"]), len(rest["losses"])]}


def case_refusals(folder):
    here = Path(folder) / "refusals"
    ways = {
        "manual": lambda: fit(DureStrategy(), net={"manual": True}),
        "hook": lambda: DureStrategy(ddp_comm_hook=len),
        "unused": lambda: DureStrategy(find_unused_parameters=True),
        "shared": lambda: fit(DureStrategy("hogwild")),
    }
    found = {name: error_of(way) for name, way in ways.items()}
    fit(DureStrategy("averaging:period=4"), enable_checkpointing=True, callbacks=[saving(here)])
    if RANK == 0:
        path = here / "epoch=0.ckpt"
        torch.save(torch.load(path, weights_only=False) | {"dure": {"clock": 2}}, here / "old.ckpt")
        (here / "epoch=0.ckpt.dure").rename(here / "old.ckpt.dure")
    torch.distributed.barrier()
    found["other strategy"] = error_of(lambda: fit(DureStrategy(), resume=here / "epoch=1.ckpt"))
    found["moved alone"] = error_of(lambda: fit(DureStrategy("averaging:period=4"), resume=here / "epoch=0.ckpt"))
    found["interrupted"] = error_of(lambda: fit(DureStrategy("averaging:period=4"), resume=here / "old.ckpt"))
    return {name: (text or "").replace(str(folder), "FOLDER") for name, text in found.items()}


def case_two_ranks_write(folder):
    for sync in ("bsp", "averaging:period=8"):
        fit(DureStrategy(sync), enable_checkpointing=True, callbacks=[saving(Path(folder) / "two" / sync[:3])])


def case_three_ranks_read(folder):
    two = Path(folder) / "two"
    steps = len(fit(DureStrategy(), epochs=3, resume=two / "bsp" / "epoch=1.ckpt")["losses"])
    refused = error_of(lambda: fit(DureStrategy("averaging:period=8"), resume=two / "ave" / "epoch=1.ckpt"))
    return {"steps": steps, "refused": refused}


def case_servers(folder):
    here = Path(folder) / "servers"
    first = fit(DureStrategy("ssp:bound=2"), enable_checkpointing=True, callbacks=[saving(here)], net={"sgd": True})
    rest = fit(DureStrategy("ssp:bound=2"), epochs=3, resume=here / "epoch=1.ckpt", net={"sgd": True})
    left = sorted(each.name for each in here.rglob("*"))
    return {"left": left, "steps": [len(first["losses"]), len(rest["losses"])], "state": rest["state"]}


def case_from_ddp(folder):
    """A checkpoint of Lightning's DDP, continued by `bsp`, beside Lightning's DDP to the end; and by `averaging`."""
    here = Path(folder) / "ddp"
    whole = fit(DDPStrategy(), epochs=3, enable_checkpointing=True, callbacks=[saving(here)])
    rest = fit(DureStrategy(), epochs=3, resume=here / "epoch=1.ckpt")
    other = fit(DureStrategy("averaging:period=4"), epochs=3, resume=here / "epoch=1.ckpt")
    return [whole, rest, other]


def case_twice(folder):
    """One trainer fits twice; in between it validates and tests. A checkpoint is saved after the end."""
    module = Net()
    trainer = lightning.Trainer(**QUIET, devices=WORLD, max_epochs=1, strategy=DureStrategy("averaging:period=4"))
    trainer.fit(module)
    score = trainer.validate(module, verbose=False)
    trainer.save_checkpoint(Path(folder) / "end.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    resumed = fit(DureStrategy("averaging:period=4"), resume=Path(folder) / "end.ckpt")
    return {"score": score, "steps": len(module.losses), "resumed": len(resumed["losses"])}


def case_overflow():
    """A scale that overflows at first: all ranks skip the same steps."""
    found = {}
    for name, strategy in (
        ("ddp", DDPStrategy()),
        ("bsp", DureStrategy()),
        ("mean", DureStrategy("averaging:period=3")),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        found[name] = fit(strategy, plugins=MixedPrecision("16-mixed", "cpu", scaler))
        found[name]["scale"] = scaler.get_scale()
    return found


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[2:]:
        case = globals()[f"case_{name}"]
        started = time.monotonic()
        found[name] = case(folder) if case.__code__.co_argcount else case()
        print(f"rank {RANK} {name} {time.monotonic() - started:.2f} s", file=sys.stderr, flush=True)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
