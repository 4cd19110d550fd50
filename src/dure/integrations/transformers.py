"""The Trainer of transformers, training by a method of dure: `DureTrainer(..., sync="averaging:period=8")`.

The Trainer's loop stays. These of its methods are extended; all but `evaluate`, `predict` and `save_model` are private
and change with versions:

| method                              | addition                                                                     |
|-------------------------------------|------------------------------------------------------------------------------|
| `_prepare_for_training`             | attaches the model without a wrapper, and loads the state of this rank       |
| `_inner_training_loop`              | reports an error to the other ranks                                          |
| `_maybe_log_save_evaluate`          | one delivery for an evaluation and a save; the end after a rank without data |
| `evaluate`, `predict`, `save_model` | the model that the method would deliver                                      |
| `_save_rng_state`                   | writes the state of this rank: all ranks call it, before `trainer_state.json` |
| `_finalize_training`                | closes the replica first, since the best model is loaded after that          |
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

import dure
from dure.errors import UsageError
from dure.integrations.accelerate import check_kind, check_version, hold_back, load_rank_if_any, route
from dure.integrations.rank_files import save_rank

if TYPE_CHECKING:
    from dure.user_loop.attached import Attached

TESTED = "5.23.0"
"""The version of transformers whose methods the tests have seen."""

METHODS = (
    "_prepare_for_training",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_save_rng_state",
    "_finalize_training",
)


class DureTrainerMixin:
    """A method of dure in a subclass of the Trainer: `class Mine(DureTrainerMixin, Seq2SeqTrainer)`.

    Beside the Trainer's arguments, its constructor takes `sync`, `topology`, `codec`, `frozen_after` (seconds) and
    `key_file` of `dure.attach`. `replica` is the attached model while `train` runs, and None elsewhere.

    Raises:
        UsageError: arguments by which ranks would save at different steps, a model that the Trainer shards, or a
            version of transformers that lacks a method. At `train`: what `dure.attach` raises.
    """

    accelerator: Any
    control: Any
    current_flos: float
    model: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        sync: Any = None,
        topology: Any = None,
        codec: Any = None,
        frozen_after: float = 30.0,
        key_file: str | Path | None = None,
        **options: Any,
    ) -> None:
        check_version("transformers", TESTED, Trainer, METHODS)
        self.replica: Attached | None = None
        self._how = {"sync": sync, "topology": topology, "codec": codec}
        self._limits: dict[str, Any] = {"frozen_after": frozen_after, "key_file": key_file}
        super().__init__(*args, **options)
        _check_arguments(self)

    # ---- the model and its optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepare: Any = super()._prepare_for_training  # type: ignore[misc]
        accelerator = self.accelerator
        plain = accelerator.prepare_model
        accelerator.prepare_model = partial(plain, evaluation_mode=True)  # keeps precision, makes no wrapper
        try:
            found = prepare(max_steps, train_dataloader, resume_from_checkpoint)
        finally:
            del accelerator.prepare_model
        self.replica = replica = dure.attach(self.model, self.optimizer, buffers="rank0", **self._how, **self._limits)
        route(self.optimizer, replica)
        hold_back(accelerator, self.model, replica)
        if resume_from_checkpoint is not None:
            load_rank_if_any(resume_from_checkpoint, replica)
        return found

    # ---- the loop

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        try:
            return super()._inner_training_loop(  # type: ignore[misc]
                batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
            )
        except BaseException as error:
            told = error if self.replica is None else self.replica.failed(error)
            if told is error:
                raise
            raise told from error
        finally:
            self._detach()

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        if self.replica is not None and self.replica.ended:
            # The other ranks are at the end of their loops. A collective of this one would meet another of theirs,
            # by which Gloo aborts the process.
            self.control.should_training_stop = True
            return
        due = self.control.should_evaluate or self.control.should_save
        with self._delivered() if due else nullcontext():
            super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        if self.replica is not None:
            self.replica.close()
        # An int 0 after a log, else a float: ranks with different numbers of batches would gather different types.
        self.current_flos = float(self.current_flos)
        return super()._finalize_training(*args, **options)  # type: ignore[misc]

    # ---- evaluation and checkpoints

    def evaluate(self, *args: Any, **options: Any) -> Any:
        with self._delivered():
            return super().evaluate(*args, **options)  # type: ignore[misc]

    def predict(self, *args: Any, **options: Any) -> Any:
        with self._delivered():
            return super().predict(*args, **options)  # type: ignore[misc]

    def save_model(self, *args: Any, **options: Any) -> None:
        with self._delivered():
            super().save_model(*args, **options)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.replica is not None and self.replica.keeps_state:
            save_rank(output_dir, self.replica)

    def _delivered(self) -> AbstractContextManager[None]:
        """Inside, the model has the values that the method would deliver now."""
        replica = self.replica
        return nullcontext() if replica is None or replica.closed else replica.evaluation()

    def _detach(self) -> None:
        """Give the Trainer its optimizer and accelerator back, for another `train`."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self.optimizer.optimizer = replica.optimizer
            del self.accelerator.no_sync


class DureTrainer(DureTrainerMixin, Trainer):
    """The Trainer of transformers, training by a method of dure; its arguments are those of `DureTrainerMixin`."""


def _check_arguments(trainer: Any) -> None:
    """Raises `UsageError` for training arguments that no replica can follow."""
    check_kind(trainer.accelerator)
    if trainer.args.n_gpu > 1:
        raise UsageError(
            f"one process has {trainer.args.n_gpu} GPUs, which the Trainer uses by DataParallel. Start a process for "
            "each: torchrun --nproc-per-node 2 script.py."
        )
    if trainer.args.enable_jit_checkpoint and trainer.args.world_size > 1:
        raise UsageError(
            "enable_jit_checkpoint=True lets each rank save after a timer of its own, so ranks may save at different "
            'steps and wait for each other for ever. Leave it out, and save by save_strategy="steps".'
        )
