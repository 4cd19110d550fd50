"""Commands that run a strategy of a plan for real, and the script of plain data parallelism."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dure.job.optimizer import TORCH_FORMS, OptimizerSpec
from dure.planner.candidates import placed
from dure.planner.timing import config_of
from dure.run.config import TrainConfig
from dure.run.emit import Launch, arguments_of, ranks_of
from dure.run.emit_targets import line, start_words

if TYPE_CHECKING:
    from pathlib import Path

    from dure.job.job import Job
    from dure.planner.candidates import Scene
    from dure.planner.options import PlanOptions
    from dure.planner.ranking import Ranked


@dataclass(frozen=True, slots=True)
class Command:
    """The options of a real run, and the `ranks` on each of its machines."""

    config: TrainConfig
    ranks: Sequence[int]

    @property
    def line(self) -> str:
        """The line for a shell: on one machine for this machine, on several for each of them.

        NODE stands for a machine's number, HOST for machine 0, RANKS for the workers of a machine, where they differ.
        """
        if len(self.ranks) == 1:
            return shlex.join(["dure", *arguments_of(replace(self.config, workers=self.ranks[0], on="local"))])
        each = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "RANKS"
        return line(Launch(self.config, len(self.ranks), self.ranks[0]), each)


def command_of(scene: Scene, config: PlanOptions, row: Ranked, *, scaled: bool = False) -> Command:
    """The command that runs `row` on the machines of `scene`; `scaled`: with the rate times the workers."""
    where, strategy = placed(scene, row.strategy)
    size = config_of(where, strategy).batch_size or 1
    job = config.job or scene.job.name
    device = "cuda" if where.cluster.accelerated else None
    options = TrainConfig(job=job, strategy=strategy, batch_size=size, data=config.data, on="torchrun", device=device)
    return Command(replace(options, scale_lr=scaled), ranks_of(where.cluster))


def script_of(command: Command, job: Job, *, named: bool) -> str | None:
    """The script of PyTorch that does what `command` does for plain data parallelism, if one can be written.

    `named` says whether the job has a text by which it can be loaded.
    """
    config, text = command.config, command.config.job if named else None
    each = str(command.ranks[0]) if len(set(command.ranks)) == 1 else "RANKS"
    start = start_words(len(command.ranks), each)
    return ddp_script(
        job.adjusted(optimizer=config.optimizer_over(job.optimizer, sum(command.ranks))),
        text,
        config.data,
        workers=sum(command.ranks),
        batch=config.batch_size or job.batch_size,
        line=shlex.join([*start, "ddp.py"]),
        device=config.device,
    )


DEVICE = """\
device = torch.device("{kind}", int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
"""
"""Lines of a script whose ranks each have an accelerator."""

PLACEHOLDERS = {
    "NODE": "NODE is the number of a machine, from 0 on",
    "HOST": "HOST is the address of machine 0",
    "RANKS": "RANKS is the number of workers of a machine",
}
"""Words in the line of a run on several machines, and what they stand for."""

SCRIPT = """\
# ddp.py: plain data parallelism in PyTorch. {workers} workers with {batch} samples each. Start it by
# {line}
{blanks}{imports}import torch
from torch.nn.parallel import DistributedDataParallel
{load}
{device}torch.distributed.init_process_group()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
job = {job}
model = DistributedDataParallel(job.build(seed=0){to_device}, gradient_as_bucket_view=True)
optimizer = {optimizer}
{schedule}batches = job.samplers([{batch}] * world_size, seed=0)[rank]
for step in range(job.steps):
    inputs, targets = job.train.batch(batches.next(), (0, 1 + rank, step))
    loss = job.loss(model({inputs}), {targets})
    optimizer.zero_grad()
    loss.backward()
{clip}    optimizer.step()
{scheduler_step}    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {{step + 1}}: loss {{loss.item():.4f}}", flush=True)
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
del model  # it holds the group, whose threads must end before the interpreter
torch.distributed.destroy_process_group()
"""


def ddp_script(
    job: Job, text: str | None, data: Path | None, *, workers: int, batch: int, line: str, device: str | None = None
) -> str | None:
    """The script that trains `job`, started by `line`; None if no optimizer of PyTorch equals the job's.

    `device` is the kind of accelerators, of which each rank has one; None for ranks on CPUs.

    `text` names the job as `load_job` takes it, and `data` the folder of its data sets. A job without a text is an
    object of the caller's: the script then names `make_job`, a function of theirs. Its first lines name what the
    user has to fill in.
    """
    optimizer = _optimizer(job)
    if optimizer is None:
        return None
    inputs, targets = job.train.batch(torch.arange(1))
    root = "" if data is None else f", {str(data)!r}"
    scheduled = job.schedule is not None
    blanks = [meaning for word, meaning in PLACEHOLDERS.items() if word in line.split()]
    if text is None:
        blanks.append("This is a template: make_job is a function of yours, which returns the dure.Job of this plan")
    return SCRIPT.format(
        workers=workers,
        batch=batch,
        line=line,
        blanks="".join(f"# {each}.\n" for each in blanks),
        load="" if text is None else "\nfrom dure.job.job import load_job\n",
        job="make_job()" if text is None else f"load_job({text!r}{root})",
        optimizer=optimizer,
        schedule="scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)\n" if scheduled else "",
        scheduler_step="    scheduler.step()\n" if scheduled else "",
        imports="" if device is None else "import os\n\n",
        device="" if device is None else DEVICE.format(kind=device),
        to_device="" if device is None else ".to(device)",
        inputs=_stars(inputs) + _moved("inputs", inputs, device),
        targets=_moved("targets", targets, device),
        clip=_clip(job.optimizer),
    )


def _optimizer(job: Job) -> str | None:
    spec = job.optimizer
    form = TORCH_FORMS.get(spec.name)
    if form is None:
        return None
    given = [f"lr={spec.lr}", *(f"{key}={getattr(spec, key)}" for key in form.shared if _differs(spec, key))]
    parameters = "model.parameters()"
    if job.groups is not None:
        named = "model.module.named_parameters()"
        parameters = f"[{{'params': [each], **(job.groups(name, each) or {{}})}} for name, each in {named}]"
    return f"torch.optim.{form.kind.__name__}({parameters}, {', '.join(given)})"


def _differs(spec: OptimizerSpec, key: str) -> bool:
    """Whether a setting must be written: the defaults of PyTorch's AdamW and Adagrad are not those of dure."""
    plain = OptimizerSpec()
    unlike = (spec.name == "adamw" and key == "weight_decay") or (spec.name == "adagrad" and key == "eps")
    return unlike or getattr(spec, key) != getattr(plain, key)


def _stars(inputs: object) -> str:
    return "**" if isinstance(inputs, Mapping) else "*" if isinstance(inputs, tuple) else ""


def _moved(name: str, values: object, device: str | None) -> str:
    """The expression of a batch's `values`, on the device if there is one."""
    if device is None:
        return name
    if isinstance(values, Mapping):
        return f"{{key: each.to(device) for key, each in {name}.items()}}"
    return f"[each.to(device) for each in {name}]" if isinstance(values, tuple) else f"{name}.to(device)"


def _clip(spec: OptimizerSpec) -> str:
    return "" if spec.clip is None else f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {spec.clip})\n"
