"""Cases of each rank in the tests of `DureTrainer`: `torchrun --nproc-per-node 2 trainer_cases.py FOLDER CASE...`.

Rank r writes the values of all cases to FOLDER/r.json, as `attached.py` does. Models are made from a configuration.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")

from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback

from dure.errors import DureError
from dure.integrations.transformers import DureTrainer, DureTrainerMixin

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Words(torch.utils.data.Dataset):
    """Words that follow each other by one rule, and some that do not; sequences differ in length where `ragged`."""

    def __init__(self, count=96, seed=1, ragged=True):
        made = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            steps = torch.where(torch.rand(12, generator=made) < 0.3, 5, 1)
            ids = (torch.randint(16, (1,), generator=made) + steps.cumsum(0)) % 16
            labels = ids.clone()
            if ragged:
                labels[int(torch.randint(4, 12, (1,), generator=made)) :] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def words_model(dropout=0.0, dtype=torch.float32):
    set_seed(0)
    size = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, **size, **chances)).to(dtype)


class Rows(Words):
    """Inputs of a plain module."""

    def __init__(self, count=96, seed=1):
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 8, generator=made)
        right = (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4:].sum(1) > 0).long()
        self.rows = [{"x": each, "labels": label} for each, label in zip(x, right, strict=True)]


class Plain(nn.Module):
    """A module that is none of transformers: batch norm, dropout, and a layer that no batch uses."""

    def __init__(self, spare=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)
        if spare:
            self.spare = nn.Linear(4, 4)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Watch(TrainerCallback):
    """The logs of all ranks."""

    def __init__(self):
        self.losses, self.scores, self.norms = [], [], []

    def on_log(self, args, state, control, logs, **_):
        for name, to in (("loss", self.losses), ("eval_loss", self.scores), ("grad_norm", self.norms)):
            if name in logs:
                to.append(logs[name])


NOTHING = object()


def made(way, folder, *, model=None, data=None, held=None, kind=None, callbacks=(), **options):
    """A trainer and its log: `way` is "ddp", or a method, then a topology, or a codec after "codec="."""
    arguments = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    model = words_model() if model is None else model
    parts = (model, TrainingArguments(str(folder), **{**arguments, **options}))
    sets = {"train_dataset": data or Words(), "eval_dataset": held or Words(20, seed=2)}
    watch = Watch()
    sets["callbacks"] = [watch, *callbacks]
    if way == "ddp":
        trainer = (kind or Trainer)(*parts, **sets)
    else:
        sync, *more = way.split()
        parted = [each.split("=", 1) if each.startswith("codec=") else ["topology", each] for each in more]
        trainer = (kind or DureTrainer)(*parts, sync=sync, **dict(parted), **sets)
    trainer.remove_callback(PrinterCallback)
    return trainer, watch


def train(way, folder, *, resume=None, **how):
    """Logs of this rank, and the state of the model."""
    trainer, watch = made(way, folder, **how)
    trainer.train(resume_from_checkpoint=resume)
    logs = {"losses": watch.losses, "scores": watch.scores, "norms": watch.norms}
    return {**logs, "state": flat(trainer.model), "clock": trainer.state.global_step}


def flat(model):
    return {name: each.double().flatten().tolist() for name, each in model.state_dict().items()}


def both(folder, model=words_model, **how):
    return [train(way, Path(folder, "both"), model=model(), **how) for way in ("ddp", "bsp")]


def error_of(call):
    try:
        call()
    except (DureError, RuntimeError) as error:  # of the rank itself, or because another one has ended
        return str(error)
    return None


# ---- cases


def case_fp64(folder):
    return both(folder, lambda: words_model(dtype=torch.float64), max_grad_norm=0.3)


def case_fp32(folder):
    return both(folder, lambda: words_model(0.1), lr_scheduler_type="cosine", warmup_steps=3)


def case_sgd(folder):
    return both(folder, optim="sgd", max_grad_norm=0)


def case_accumulation(folder):
    """Twelve batches of each rank and epoch, five for a step: two remain."""
    return both(folder, gradient_accumulation_steps=5, num_train_epochs=2, max_steps=-1)


def case_bf16(folder):
    return both(folder, bf16=True)


def case_plain(folder):
    """Batch norm, dropout and an unused layer, whose zeros would count in the sum of a norm."""
    sets = {"data": Rows(), "held": Rows(20, seed=2)}
    return both(folder, Plain, **sets, ddp_find_unused_parameters=True, max_grad_norm=0)


def case_checkpointing(folder):
    return both(folder, gradient_checkpointing=True, neftune_noise_alpha=5.0)


class Doubling(Trainer):
    """A subclass with a loss of its own, as the documentation of transformers shows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class DureDoubling(DureTrainerMixin, Doubling):
    pass


def case_subclass(folder):
    return [train(way, folder, kind=kind) for way, kind in (("ddp", Doubling), ("bsp", DureDoubling))]


WAYS = ("bsp", "averaging:period=4", "diloco:period=4", "bsp codec=int8", "ssp:bound=2 ps:shards=2")


def case_methods(folder):
    """The Trainer's optimizer, schedule and clipping, until the loss is near to the entropy of the words, 0.611."""
    how = {"max_steps": 400, "learning_rate": 3e-3, "weight_decay": 0, "per_device_train_batch_size": 8}
    how |= {"data": Words(480), "held": Words(200, seed=2), "eval_steps": 400, "logging_strategy": "no"}
    return {way: train(way, folder, **how) for way in WAYS}


RESUMED = {"bsp": 7, "averaging:period=4": 6, "diloco:period=4": 7}
"""The step of the checkpoint: in the middle of a period of 4."""


def saving(step):
    return {"save_strategy": "steps", "save_steps": step, "eval_strategy": "no", "gradient_accumulation_steps": 2}


def case_resume(folder):
    found = {}
    for way, step in RESUMED.items():
        place = Path(folder, way.partition(":")[0])
        how = {"model": words_model(0.1, torch.float64), **saving(step)}
        whole = train(way, place, **how)
        how["model"] = words_model(0.1, torch.float64)
        goes_on = train(way, place, resume=str(place / f"checkpoint-{step}"), **how)
        found[way] = [whole, goes_on, sorted(os.listdir(place / f"checkpoint-{step}" / "dure"))]
    return found


def case_three_ranks_read(folder):
    place = Path(folder).parent / "averaging" / "checkpoint-6"
    return error_of(lambda: train("averaging:period=4", folder, resume=str(place), **saving(6)))


def case_from_ddp(folder):
    """A method goes on from a checkpoint of the Trainer's own DDP."""
    whole = train("ddp", folder, **saving(5))
    return [whole, train("bsp", folder, resume=str(Path(folder, "checkpoint-5")), **saving(5))]


def case_best_model(folder):
    """The best model is the last word, though the replica delivers another one at the end."""
    found = {}
    for way in ("bsp", "averaging:period=3", "diloco:period=4"):
        place = Path(folder, "best", way.partition(":")[0])
        how = {"learning_rate": 0.3, "lr_scheduler_type": "constant", "max_steps": 16, "optim": "sgd"}
        saved = {"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
        trainer, watch = made(way, place, eval_steps=2, save_total_limit=2, **how, **saved)
        trainer.train()
        best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
        own = trainer.model.state_dict()
        found[way] = [
            min(watch.scores),
            trainer.evaluate()["eval_loss"],
            all(torch.equal(own[name], value) for name, value in best.items()),
        ]
    return found


class Deliveries(TrainerCallback):
    """Evaluates within a step of training, and predicts."""

    def __init__(self):
        self.trainer, self.found = None, []

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            self.found = [
                self.trainer.evaluate()["eval_loss"],
                self.trainer.predict(Words(20, seed=2)).metrics["test_loss"],
            ]
            self.trainer.save_model(str(Path(args.output_dir, "five")))


def case_last_checkpoint(folder):
    """The last checkpoint is the final model, and `evaluate` in a callback sees a delivered model."""
    found = {}
    for way in ("averaging:period=4", "diloco:period=4"):
        place = Path(folder, "last", way.partition(":")[0])
        five = Deliveries()
        trainer, watch = made(way, place, save_strategy="steps", save_steps=12, callbacks=[five])
        five.trainer = trainer
        trainer.train()
        last = load_file(place / "checkpoint-12" / "model.safetensors")
        own = trainer.model.state_dict()
        same = all(torch.equal(own[name], value) for name, value in last.items())
        found[way] = [same, watch.scores[-1], trainer.evaluate()["eval_loss"], five.found]
        trainer.save_model(str(place / "end"))
    return found


def case_again(folder):
    """Two calls of `train`, and another number of steps of the second."""
    trainer, watch = made("averaging:period=4", folder, eval_strategy="no")
    trainer.train()
    first = watch.losses[-1]
    trainer.train()
    return [first, watch.losses[-1], len(watch.losses), trainer.replica is None]


class Uneven(DureTrainer):
    """Rank 1 has a loader with four batches less."""

    def get_train_dataloader(self):
        return DataLoader(Words(64 - 16 * RANK), batch_size=4, collate_fn=self.data_collator)


def case_uneven(folder):
    """Logs in each step, or at times. A schedule would end at another step of each rank."""
    how = {"eval_strategy": "no", "max_steps": -1, "num_train_epochs": 1, "average_tokens_across_devices": False}
    how["lr_scheduler_type"] = "constant"
    found = {}
    for way, interval in (("bsp", 1), ("averaging:period=5", 5)):
        found[way] = train(way, folder, kind=Uneven, logging_steps=interval, **how)
    return found


class Overflowing:
    """The Trainer's accelerator has a scaler on GPUs only. At the third step rank 1 overflows."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * float("inf") if (self.state.global_step, RANK) == (2, 1) else loss


class PlainOverflowing(Overflowing, Trainer):
    pass


class DureOverflowing(Overflowing, DureTrainer):
    pass


class Rates(TrainerCallback):
    """Rates after each step."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, **about):
        self.found.append(about["lr_scheduler"].get_last_lr())


def case_overflow(folder):
    """With the Trainer's fused optimizer, whose schedule goes on, and with a plain one."""
    found = {}
    for way in ("ddp", "bsp", "averaging:period=3"):
        kind = PlainOverflowing if way == "ddp" else DureOverflowing
        how = {"eval_strategy": "no", "max_grad_norm": 0, "logging_strategy": "no", "max_steps": 6}
        for optim in ("adamw_torch_fused", "adamw_torch"):
            trainer, _ = made(way, folder, kind=kind, callbacks=[rates := Rates()], optim=optim, **how)
            trainer.train()
            found[f"{way} {optim}"] = [rates.found, trainer.accelerator.scaler.get_scale(), flat(trainer.model)]
    return found


class Falls(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if RANK == 1 and state.global_step == 3:
            raise RuntimeError("the disk is full")


def case_error_at_one_rank(folder):
    try:
        train("averaging:period=8", folder, callbacks=[Falls()], eval_strategy="no", logging_strategy="no")
    except (DureError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def case_refusals(folder):
    def asking(**how):
        trainer, _ = made("bsp", folder, **how)
        trainer.train()

    return error_of(lambda: asking(enable_jit_checkpoint=True))


def main(folder):
    torch.set_num_threads(1)
    cases = {name[5:]: function for name, function in globals().items() if name.startswith("case_")}
    found = {}
    for name in sys.argv[2:] or list(cases):
        found[name] = cases[name](folder)
        print(f"rank {RANK} {name}", file=sys.stderr, flush=True)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
