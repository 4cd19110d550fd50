# Written by `make format` from the catalogues and the options: do not edit.
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dure import codec as codec
from dure import partition as partition
from dure import sync as sync
from dure import topology as topology
from dure.codec.base import Codec as Codec
from dure.codec.coder import Coder as Coder
from dure.codec.feedback import ErrorFeedback as ErrorFeedback
from dure.codec.feedback import Momentum as Momentum
from dure.codec.floats import BFloat16 as BFloat16
from dure.codec.floats import Float16 as Float16
from dure.codec.floats import Int8 as Int8
from dure.codec.fp32 import Float32 as Float32
from dure.codec.one_bit import OneBit as OneBit
from dure.codec.sign import ITSign as ITSign
from dure.codec.sign import Sign as Sign
from dure.codec.strom import Strom as Strom
from dure.codec.ternary import Ternary as Ternary
from dure.codec.top_k import TopK as TopK
from dure.core.node import EndOfWork as EndOfWork
from dure.errors import DureError as DureError
from dure.job.data.dataset import Data as Data
from dure.job.data.dataset import Samples as Samples
from dure.job.data.stream import Stream as Stream
from dure.job.job import Job as Job
from dure.job.optimizer import OptimizerSpec as OptimizerSpec
from dure.partition.mesh import Mesh as Mesh
from dure.partition.methods.chen import Chen as Chen
from dure.partition.methods.ddg import DDG as DDG
from dure.partition.methods.dni import DNI as DNI
from dure.partition.methods.features_replay import FeaturesReplay as FeaturesReplay
from dure.partition.methods.gpipe import GPipe as GPipe
from dure.partition.methods.interleaved import Interleaved as Interleaved
from dure.partition.methods.multi_version import MultiVersion as MultiVersion
from dure.partition.methods.neurons import Neurons as Neurons
from dure.partition.methods.one_f_one_b import OneFOneB as OneFOneB
from dure.partition.methods.one_weird_trick import OneWeirdTrick as OneWeirdTrick
from dure.partition.methods.petrowski import Petrowski as Petrowski
from dure.partition.methods.pipedream import PipeDream as PipeDream
from dure.partition.methods.pipedream_2bw import PipeDream2BW as PipeDream2BW
from dure.partition.methods.spectrain import SpecTrain as SpecTrain
from dure.partition.methods.tensor import TensorParallel as TensorParallel
from dure.partition.methods.zero import Zero as Zero
from dure.partition.methods.zero_bubble import ZeroBubble as ZeroBubble
from dure.partition.orders import Action as Action
from dure.partition.pipeline import MicroBatched as MicroBatched
from dure.partition.shared_layers import SharedLayers as SharedLayers
from dure.partition.whole import Whole as Whole
from dure.planner.answer import Ranking as Ranking
from dure.report.run import Run
from dure.run.compare import Comparison
from dure.run.strategy import Strategy as Strategy
from dure.runtime.virtual.cluster import Cluster as Cluster
from dure.sync.ad_psgd import ADPSGD as ADPSGD
from dure.sync.asysvrg import AsySVRG as AsySVRG
from dure.sync.averaging import Averaging as Averaging
from dure.sync.averaging import OneShot as OneShot
from dure.sync.base import Messages as Messages
from dure.sync.base import Reasons as Reasons
from dure.sync.base import ServerRule as ServerRule
from dure.sync.base import Traits as Traits
from dure.sync.bmuf import BMUF as BMUF
from dure.sync.bmuf import DiLoCo as DiLoCo
from dure.sync.bsp import BSP as BSP
from dure.sync.downpour import Downpour as Downpour
from dure.sync.easgd import EAMSGD as EAMSGD
from dure.sync.easgd import EASGD as EASGD
from dure.sync.hogwild import HogBatch as HogBatch
from dure.sync.hogwild import Hogwild as Hogwild
from dure.sync.lbfgs import LBFGS as LBFGS
from dure.sync.quorum import Backup as Backup
from dure.sync.quorum import KAsync as KAsync
from dure.sync.quorum import KBatchAsync as KBatchAsync
from dure.sync.quorum import KBatchSync as KBatchSync
from dure.sync.quorum import KSync as KSync
from dure.sync.remedies import DCASGD as DCASGD
from dure.sync.remedies import MomentumCompensation as MomentumCompensation
from dure.sync.remedies import StalenessLR as StalenessLR
from dure.sync.ssp import SSP as SSP
from dure.sync.worker import Worker as Worker
from dure.topology.base import RunPlan as RunPlan
from dure.topology.base import Session as Session
from dure.topology.base import Topology as Topology
from dure.topology.collective.choice import Collective as Collective
from dure.topology.collective.message_group import SentGroup as SentGroup
from dure.topology.gossip.choice import Gossip as Gossip
from dure.topology.hybrid.choice import Hybrid as Hybrid
from dure.topology.parameter_server.choice import ParameterServer as ParameterServer
from dure.topology.shared_memory.choice import SharedMemory as SharedMemory
from dure.user_loop.attach import attach as attach
from dure.user_loop.ddp_hook import hook as hook

__version__: str

def compare(
    job: str | Job,
    *strategies: str,
    workers: int | str | None = ...,
    batch_size: int | None = ...,
    batch_sizes: Sequence[int] = ...,
    lr: float | None = ...,
    scale_lr: bool = ...,
    optimizer: str | None = ...,
    steps: int | None = ...,
    epochs: float | None = ...,
    seconds: float | None = ...,
    seed: int | None = ...,
    data: Path | str | None = ...,
    split: str | None = ...,
    dtype: Literal["float32", "float64"] | None = ...,
    eval_every: int | None = ...,
    eval_samples: int | None = ...,
    checkpoint_every: int | None = ...,
    trace: bool = ...,
    tensorboard: bool = ...,
    sinks: Sequence[str] = ...,
    device: str | None = ...,
    warn_after: float | None = ...,
    frozen_after: float = ...,
    replace: bool = ...,
    reserve: str | None = ...,
    insecure: bool = ...,
    preemption_notice: str | None = ...,
    grace: float = ...,
    out: Path | str | None = ...,
    exact: bool = ...,
    timing_only: bool = ...,
    target: float | None = ...,
    target_loss: float | None = ...,
    on: str | Path | Cluster | Sequence[str | Path] = ...,
    report: Path | str | None = ...,
) -> Comparison:
    """Train `job` under each of `strategies` in each place of `on`, and write a report.

    If no strategy is given, here or as the option of that name, `bsp`, `averaging:period=8`, `ssp:bound=3` and
    `downpour` are compared. `options` are those of the command `dure compare`, by name. Raises the errors of `train`,
    apart from `DivergedError`: the report says which run diverged.
    """

def plan(
    job: str | Job,
    *,
    workers: int | None = ...,
    on: str | Path | Cluster = ...,
    batch_size: int | None = ...,
    data: Path | str | None = ...,
    target: float | None = ...,
    target_loss: float | None = ...,
    learn: int = ...,
    steps: int | None = ...,
    vary: int = ...,
    within: float = ...,
    report: Path | str | None = ...,
) -> Ranking:
    """Rank the strategies for `job` on a cluster. Seconds are predicted, in virtual time.

    `job` is a built-in name, `"FILE.py:FUNCTION"`, or a `Job`. `on` is a cluster file, a `Cluster`, or "virtual" (a
    uniform cluster); if it is left out, this machine is measured. `options` are those of
    the command `dure plan`, by name.

    Raises:
        UsageError: an option is wrong, or no strategy fits; the message has the smallest change with which one fits.
    """

def train(
    job: str | Job,
    *,
    workers: int | str | None = ...,
    batch_size: int | None = ...,
    batch_sizes: Sequence[int] = ...,
    lr: float | None = ...,
    scale_lr: bool = ...,
    optimizer: str | None = ...,
    steps: int | None = ...,
    epochs: float | None = ...,
    seconds: float | None = ...,
    seed: int | None = ...,
    data: Path | str | None = ...,
    split: str | None = ...,
    dtype: Literal["float32", "float64"] | None = ...,
    eval_every: int | None = ...,
    eval_samples: int | None = ...,
    checkpoint_every: int | None = ...,
    trace: bool = ...,
    tensorboard: bool = ...,
    sinks: Sequence[str] = ...,
    device: str | None = ...,
    warn_after: float | None = ...,
    frozen_after: float = ...,
    replace: bool = ...,
    reserve: str | None = ...,
    insecure: bool = ...,
    preemption_notice: str | None = ...,
    grace: float = ...,
    out: Path | str | None = ...,
    exact: bool = ...,
    timing_only: bool = ...,
    strategy: str = ...,
    sync: Any = ...,
    topology: Any = ...,
    codec: Any = ...,
    partition: Any = ...,
    on: str | Path | Cluster = ...,
    key_file: Path | str | None = ...,
    integrity: Literal["mac", "checksum"] = ...,
    resume: Path | str | None = ...,
    trust: bool = ...,
    within: float = ...,
) -> Run:
    """Train `job` with several workers, for real or in virtual time; return its record.

    `job` is a name, as `"mnist-mlp"`, `"mnist-mlp:depth=7"` or `"FILE.py:FUNCTION"`, or a `Job`. A `Job` runs in
    virtual time only, because each process of a real run has to make the job by its name. `sync` is a method as text
    (`"ssp:bound=3"`) or as an object (`SSP(bound=3)`); with "auto" a plan of `within` seconds chooses the whole
    strategy. `on` is "local" (the default), "torchrun", "ray", "virtual", a cluster file, or a `Cluster`. `options` are
    the options of the command `dure train`, by name.

    Raises:
        UsageError: the options contradict each other; the message names the nearest that work.
        DivergedError: the loss is no longer a number.
        DeadlockError: every worker waits, and none can continue.
        DureError: no update was applied, or another reason that the message names.
    """
