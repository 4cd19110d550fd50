"""A strategy of Lightning that trains by a method of dure: `Trainer(strategy=DureStrategy(sync="averaging:period=8"))`.

It is Lightning's `DDPStrategy` without DistributedDataParallel: processes, samplers and metrics are Lightning's, and
`dure.attach` synchronizes the module. Lightning's loop calls the routed optimizer, whose step is the method's.

| file of a checkpoint    | holds                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `X.ckpt`                | what Lightning writes; the model that the method would deliver then         |
| `X.ckpt.dure/rank0.pt`  | the state of a rank (`rank_files`), until Lightning removes `X.ckpt`         |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

import dure
from dure.core.text import log
from dure.errors import UsageError
from dure.integrations.rank_files import load_rank, remove_rank, save_rank
from dure.runtime.launch.rendezvous import RankEnvironment, announced

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.amp import GradScaler

    from dure.user_loop.attached import Attached

_OF_DDP = {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"}
"""Options of DistributedDataParallel beside those that Lightning's strategy passes on to it."""

NOTE = "dure"
"""The key in a checkpoint of Lightning that says that states of ranks belong to it."""


class DureStrategy(DDPStrategy):
    """Lightning's processes and a method of dure, under automatic optimization of one optimizer.

    `sync`, `topology`, `codec`, `frozen_after` (seconds) and `key_file` are those of `dure.attach`. `options` are those
    of Lightning's `DDPStrategy`, such as `timeout`, without those of DistributedDataParallel. `replica` is the attached
    model while `fit` runs, and else None.

    Raises:
        UsageError: an option of DistributedDataParallel is given. At `fit`: what `dure.attach` raises, or manual
            optimization.
    """

    optimizers: list[Any]

    def __init__(
        self,
        sync: Any = None,
        topology: Any = None,
        codec: Any = None,
        *,
        frozen_after: float = 30.0,
        key_file: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name in [*options.keys() & _OF_DDP, *self._ddp_kwargs]:
            raise UsageError(
                f"{name}={options[name]!r} is an option of DistributedDataParallel, which DureStrategy does not make. "
                'Leave it out. DureStrategy(codec="int8") encodes gradients, and parameters may be unused.'
            )
        self.replica: Attached | None = None
        self._how = {"sync": sync, "topology": topology, "codec": codec}
        self._how |= {"frozen_after": frozen_after, "key_file": key_file}
        self._evaluation = ExitStack()
        self._restored_from: str | Path = ""

    # ---- the module and its optimizer

    def configure_ddp(self) -> None:
        """Leave the module without a wrapper."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        _check_loop(self.lightning_module)
        environment = self.cluster_environment
        numbers = {"local_size": self.num_processes, "local_rank": self.local_rank}
        place = RankEnvironment(self.global_rank, self.world_size, environment.main_address, **numbers)
        with announced(place, environment.main_port):
            self.replica = dure.attach(self.lightning_module, self.optimizers[0], buffers="rank0", **self._how)
        routed = self.replica.routed_optimizer
        routed._step_supports_amp_scaling = False  # with it Lightning refuses to clip gradients
        self.optimizers = [routed]

    # ---- steps

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of the batches inside add up without an exchange."""
        with super().block_backward_sync() if self.replica is None else self.replica.accumulate():
            yield

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: LightningModule | None = None, **kwargs: Any
    ) -> Any:
        """The step of Lightning; if losses are scaled, all ranks skip the same steps."""
        scaler: GradScaler | None = getattr(self.precision_plugin, "scaler", None)
        if self.replica is None or scaler is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = closure()
        scaler.unscale_(optimizer)
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step(grad_scaler=scaler)
        scaler.update()
        return loss

    # ---- evaluation

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.replica is not None:
            with torch.inference_mode(False):  # tensors that the method keeps are written to afterwards
                self._evaluation.enter_context(self.replica.evaluation())

    def on_validation_end(self) -> None:
        super().on_validation_end()
        with torch.inference_mode(False):
            self._evaluation.close()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """A copy of the model that the method would deliver now; all ranks call this."""
        if self.replica is None or self.replica.closed:
            found: dict[str, Any] = super().lightning_module_state_dict()
            return found
        with self.replica.evaluation():
            found = super().lightning_module_state_dict()
            return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in found.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the states of all ranks, then Lightning's file."""
        replica = self.replica
        if replica is not None and replica.keeps_state and "optimizer_states" in checkpoint:
            save_rank(_local(filepath), replica, beside=True)
            self.barrier("states of all ranks")
            checkpoint = checkpoint | {NOTE: {"clock": replica.clock}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        remove_rank(filepath, self.global_rank)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._restored_from = checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer, then the state of this rank.

        Raises `UsageError` where the states are missing, are of another number of ranks, or of another step.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self.replica is None:
            return
        if NOTE not in checkpoint:
            log.info("%s has no states of ranks: all ranks start from its model and optimizer.", self._restored_from)
            return
        path = os.path.realpath(_local(self._restored_from))  # save_last="link" makes links
        load_rank(path, self.replica, beside=True)
        clock = checkpoint[NOTE]["clock"]
        if self.replica.clock != clock:
            raise UsageError(
                f"{path} was saved at step {clock}, and the states in {path}.dure at step {self.replica.clock}: a save "
                "was interrupted. Resume from another checkpoint."
            )

    # ---- the end

    def on_exception(self, exception: BaseException) -> None:
        """End the training of all ranks."""
        super().on_exception(exception)
        if self.replica is not None:
            self.replica.failed(exception)

    def teardown(self) -> None:
        """Load what the method delivers into the module, after the hooks of the end of training."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self.optimizers = [replica.optimizer]
            if not replica.closed:
                replica.close()
        super().teardown()


def _check_loop(module: LightningModule) -> None:
    """Raises `UsageError` for a module that steps by itself."""
    if not module.automatic_optimization:
        raise UsageError(
            f"DureStrategy needs automatic optimization, and {type(module).__name__} has automatic_optimization=False. "
            "Call dure.attach in a loop of your own, or leave out automatic_optimization = False."
        )


def _local(path: Any) -> str:
    """The path of a checkpoint. Raises `UsageError` for one of a remote store."""
    if "://" in str(path):
        raise UsageError(
            f"the states of ranks are files beside a checkpoint, and {path} is in a remote store. Give ModelCheckpoint "
            "a folder of a file system that all ranks see, and copy it from there."
        )
    return str(path)
