"""`dure.hook` on the device under test: small trainings with DistributedDataParallel on two ranks.

    python -m accelerator.hook_programs NAME ...        one line of JSON per name: name, outcome

A program trains on the device and on the CPU. Its outcome is `right` where all parameters and the bytes sent are equal.
A name is that of a program, or "PROGRAM with FAULT", where a fault leaves out a part of the hook's synchronization.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerator import target
from accelerator.programs import on_two_ranks, outcome
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.codec.base import Codec
from dure.codec.coder import Coder, SliceLayout
from dure.user_loop import ddp_hook
from dure.user_loop.ddp_hook import Hook, _own_groups, _to_each

Result = tuple[Tensor, Tensor]
PROGRAMS: dict[str, Callable[..., Result]] = {}
FAULTS: dict[str, Callable[[], object]] = {}
STEPS = 5

CODECS = (
    "fp32", "fp16", "int8", "1bit", "sign", "ternary", "it-sign:start=2", "strom:threshold=0.02", "top-k:share=0.1",
)  # fmt: skip
"""One of each kind: an average or a vote, with and without a residual, of a fixed length or not."""

MORE_CODECS = (
    "bf16", "fp16+ef", "bf16+ef", "int8+ef", "sign:scaled=true", "sign:scaled=true+ef", "sign+momentum",
    "ternary:coding=planes", "ternary+momentum", "it-sign:start=2,granularity=coordinate", "it-sign:start=2+momentum",
    "1bit:feedback=false", "strom:threshold=0.02,coding=rice", "top-k:share=0.1,feedback=false",
)  # fmt: skip


def program(function: Callable[..., Result]) -> Callable[..., Result]:
    PROGRAMS[function.__name__] = function
    return function


def fault(function: Callable[[], object]) -> Callable[[], object]:
    FAULTS[function.__name__] = function
    return function


# --- training ---


def model(device: str, codec: str | Codec, dtype: torch.dtype = torch.float32) -> tuple[DistributedDataParallel, Hook]:
    """Two buckets after the first step, with a layer each."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3)).to(device, dtype)
    parallel, hook = DistributedDataParallel(net, bucket_cap_mb=0.0004), dure.hook(codec)
    parallel.register_comm_hook(None, hook)
    return parallel, hook


def train(parallel: DistributedDataParallel, rank: int, steps: range = range(STEPS)) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    parameter = next(parallel.parameters())
    for step in steps:
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, 20).to(parameter)
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()


class Bytes(Codec):
    """Sends the bytes of the values unchecked."""

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return BytesCoder(layout.numel)


class BytesCoder(Coder):
    looks = True
    most_bytes = 0

    def encode_finite(self, values: Tensor) -> Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(message.view(out.dtype))


def synchronizations() -> int:
    """How often the host has waited for the device, where it counts that."""
    return torch.standin.synchronizations() if target.device_type() == "standin" else 0


def result(parallel: DistributedDataParallel, hook: Hook, *more: Tensor) -> Tensor:
    """The parameters, what the hook has sent and `more` in one vector."""
    flat = [parameter.detach().cpu().double().flatten() for parameter in parallel.parameters()]
    return torch.cat([*flat, torch.tensor([float(hook.bytes_sent)]), *more])


def on_both(work: Callable[[int, str], Tensor], backend: str = "") -> Result:
    """The results of `work(rank, device)` on the device and on the CPU."""
    there = on_two_ranks(lambda rank: work(rank, target.of_rank(rank)), backend or target.backend())
    return there, on_two_ranks(lambda rank: work(rank, "cpu"), "gloo")


def trained(codec: str, dtype: torch.dtype, rank: int, device: str) -> Tensor:
    parallel, hook = model(device, codec, dtype)
    train(parallel, rank)
    return result(parallel, hook)


# --- programs ---

for each in (*CODECS, *MORE_CODECS):
    PROGRAMS[each] = partial(on_both, partial(trained, each, torch.float32))


@program
def each_kind_of_codec() -> Result:
    return on_both(lambda *where: torch.cat([trained(codec, torch.float32, *where) for codec in CODECS]))


@program
def narrow_buckets() -> Result:
    def work(*where: Any) -> Tensor:
        return torch.cat([trained("1bit", torch.bfloat16, *where), trained("top-k:share=0.1", torch.float16, *where)])

    return on_both(work)


@program
def the_host_waits_for_the_codec_alone() -> Result:
    """With a codec that never waits for the device, a backward does not either."""

    def work(rank: int) -> Tensor:
        parallel, _ = model(target.of_rank(rank), Bytes())
        train(parallel, rank, range(2))
        loss = parallel(torch.ones(8, 20, device=target.of_rank(rank))).sum()
        before = synchronizations()
        loss.backward()
        return torch.tensor([synchronizations() - before])

    return on_two_ranks(work, target.backend()), torch.zeros(2, 1, dtype=torch.int64)


@program
def a_group_for_the_device_alone() -> Result:
    """The sizes of messages need a group for the CPU, which the user has not."""
    backend = target.backend().removeprefix("cpu:gloo,")
    return on_both(partial(trained, "strom:threshold=0.02", torch.float32), backend)


@program
def messages_of_ranks_that_share_a_device() -> Result:
    """They travel by Gloo, which sends memory of the host."""

    def work(rank: int, device: str) -> Tensor:
        groups = _own_groups(None)
        sent = [torch.arange(5, dtype=torch.uint8, device=device) + 10 * rank + other for other in range(2)]
        received = _to_each(sent, groups)
        assert received is not None
        assert {each.device.type for each in received} == {torch.device(device).type}
        return torch.cat(received).cpu()

    return on_both(work, f"cpu:gloo,{target.device_type()}:gloo")


@program
def a_stream_of_the_users_own(fault: str = "") -> Result:
    def work(rank: int, device: str) -> Tensor:
        if device == "cpu":
            return trained("1bit", torch.float32, rank, device)
        if fault:
            FAULTS[fault]()
        main, side = torch.accelerator.current_stream(), torch.Stream(device)
        parallel, hook = model(device, "1bit")
        side.wait_stream(main)
        with side:
            train(parallel, rank)
        main.wait_stream(side)
        return result(parallel, hook)

    return on_both(work)


@program
def a_model_dropped_after_a_failed_backward(fault: str = "") -> Result:
    """DDP does not wait for the bucket that was started, and gives its memory back."""

    def fail(_: Tensor) -> None:
        raise ValueError

    def work(rank: int, device: str) -> Tensor:
        if fault:
            FAULTS[fault]()
        parallel, hook = model(device, "1bit")
        train(parallel, rank, range(2))
        next(parallel.parameters()).register_hook(fail)
        with contextlib.suppress(ValueError):
            parallel(torch.ones(8, 20, device=device)).sum().backward()
        hook._thread.call(lambda: None, torch.device(device))
        del parallel
        gc.collect()
        return torch.ones(8, device=device)

    return on_both(work)


@program
def autocast_and_a_scaler() -> Result:
    """The loss of rank 1 overflows in two steps: both ranks skip them, and no residual holds infinity or NaN."""

    def work(rank: int, device: str) -> Tensor:
        parallel, hook = model(device, "1bit")
        kind, seen = torch.device(device).type, []
        optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.05), torch.amp.GradScaler(kind, init_scale=256)
        for step in range(8):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            with torch.autocast(kind, torch.float16):
                loss = parallel(torch.randn(8, 20).to(device)).float().square().mean()
            scaler.scale(loss * (float("inf") if rank == 1 and step in (3, 5) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            kept = [tensor for bucket in hook.state_dict()["buckets"].values() for tensor in bucket["tensors"].values()]
            seen += [scaler.get_scale(), float(sum(tensor.double().sum() for tensor in kept))]
        assert scaler.get_scale() == 64
        assert torch.tensor(seen).isfinite().all()
        return result(parallel, hook, torch.tensor(seen))

    return on_both(work)


@program
def states_between_the_cpu_and_the_device() -> Result:
    """Two steps on one, two on the other, two on the first; a group for both."""

    def work(rank: int, device: str) -> Tensor:
        results, places = [], ("cpu", device, "cpu")
        for codec in ("1bit", "it-sign:start=1", "it-sign:start=1,granularity=coordinate+momentum"):
            state, weights = None, None
            for part, place in enumerate(places):
                parallel, hook = model(place, codec)
                if state is not None:
                    parallel.module.load_state_dict(weights)
                    hook.load_state_dict(state)
                train(parallel, rank, range(3 * part, 3 * part + 3))
                weights = {name: tensor.cpu() for name, tensor in parallel.module.state_dict().items()}
                state = hook.state_dict()
            assert all(t.device.type == "cpu" for each in state["buckets"].values() for t in each["tensors"].values())
            results.append(result(parallel, hook))
        return torch.cat(results)

    return on_both(work)


# --- faults ---


class _Deaf(torch.Stream):
    def wait_event(self, event: object) -> None:
        pass


@fault
def no_event_before_the_bucket_is_read() -> None:
    ddp_hook.torch.Stream = _Deaf


@fault
def the_thread_keeps_its_default_stream() -> None:
    ddp_hook.BucketThread._stream = lambda self, device: None


@fault
def ddp_waits_for_no_event() -> None:
    torch.futures.Future.__init__ = lambda self, devices=None: torch._C.Future.__init__(self, [])


@fault
def ddp_waits_for_another_stream() -> None:
    def set_result(self: torch.futures.Future, value: object) -> None:
        with torch.Stream(target.device_type()):
            torch._C.Future.set_result(self, value)

    torch.futures.Future.set_result = set_result


@fault
def buckets_are_not_recorded() -> None:
    Tensor.record_stream = lambda self, stream: None


def main(names: list[str]) -> None:
    import torch._dynamo  # noqa: F401  (DDP imports it: here once for all forks)

    target.prepare()
    for name in names:
        program, _, planted = name.partition(" with ")
        print(json.dumps([name, outcome(PROGRAMS[program], *([planted] if planted else []))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
