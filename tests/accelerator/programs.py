"""Small programs for the device under test, each correct or with one planted fault, and what becomes of them.

    python -m accelerator.programs        one line of JSON per program: name, fault, outcome

A program returns what it computed and what it should have; it is judged `right`, `wrong: ...`, `raised: ...` or
`killed by signal N: ...`. Every program runs in a fork of this process, which has loaded the device and not used it. On
another device than the stand-in only the correct programs run, and those that read the counters of the stand-in do not.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from accelerator import target as tested
from torch import Tensor, nn

DEVICE = tested.device_type()
COUNTING = (
    "synchronizations_are_counted", "pinned_memory_is_counted", "averages_and_waits", "freed_memory_is_returned",
)  # fmt: skip
"""Programs that read the counters of the stand-in, or its memory in the process."""

ATOL = 1e-2
"""How far the results of a GPU may be from the CPU's, whose sums have another order: half precision included."""

PROGRAMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}


def program(function):
    """Lists a program. One without the argument `fault` has no faulty form."""
    PROGRAMS[function.__name__] = function
    return function


def values(count: int = 8) -> Tensor:
    return torch.arange(1.0, count + 1)


def pinned(count: int = 8) -> Tensor:
    return torch.empty(count, pin_memory=True)


def stream() -> torch.Stream:
    return torch.Stream(DEVICE)


def main_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


# --- memory ---


@program
def host_reads_device_memory(fault):
    x = values().to(DEVICE)
    if fault:
        ctypes.string_at(x.data_ptr(), 4)
    return x.cpu(), values()


@program
def fresh_memory(fault):
    total = torch.empty(8, device=DEVICE) if fault else torch.zeros(8, device=DEVICE)
    total += values().to(DEVICE)
    return total.cpu(), values()


@program
def memory_after_a_free(fault):
    x = values().to(DEVICE)
    del x
    x = torch.empty(8, device=DEVICE)
    if not fault:
        x.copy_(values())
    return x.cpu(), values()


@program
def tensors_of_two_devices(fault):
    x = values().to(DEVICE)
    return (x + (values() if fault else x)).cpu(), 2 * values()


# --- copies that happen late ---


@program
def copy_out(fault):
    target = pinned()
    target.copy_(values().to(DEVICE), non_blocking=True)
    if not fault:
        main_stream().synchronize()
    return target.clone(), values()


@program
def copy_out_by_to(fault):
    target = values().to(DEVICE).to("cpu", non_blocking=True)
    if not fault:
        torch.accelerator.synchronize()
    return target.clone(), values()


@program
def copy_out_with_an_event(fault):
    """The fault: the event is recorded before the copy."""
    x, target, event = values().to(DEVICE), pinned(), torch.Event(DEVICE)
    if fault:
        event.record()
    target.copy_(x, non_blocking=True)
    if not fault:
        event.record()
    event.synchronize()
    return target.clone(), values()


@program
def copy_out_and_a_polled_event(fault):
    """The fault: the event is asked once and the answer not used."""
    x, target, event = values().to(DEVICE), pinned(), torch.Event(DEVICE)
    target.copy_(x, non_blocking=True)
    event.record()
    while not event.query() and not fault:
        pass
    return target.clone(), values()


@program
def copy_out_on_a_side_stream(fault):
    """The fault: the host waits for the wrong stream."""
    x, target, side = values().to(DEVICE), pinned(), stream()
    side.wait_stream(main_stream())
    with side:
        target.copy_(x, non_blocking=True)
    (main_stream() if fault else side).synchronize()
    return target.clone(), values()


@program
def copy_out_into_a_slot_in_use(fault):
    slot = pinned()
    slot.copy_(values().to(DEVICE), non_blocking=True)
    if not fault:
        main_stream().synchronize()
    first = slot.clone() if not fault else slot
    slot.copy_(-values().to(DEVICE), non_blocking=True)
    main_stream().synchronize()
    return first, values()


@program
def copy_in(fault):
    """The fault: the source changes before the copy's end."""
    source, x = pinned().copy_(values()), torch.empty(8, device=DEVICE)
    x.copy_(source, non_blocking=True)
    if not fault:
        main_stream().synchronize()
    source.zero_()
    return x.cpu(), values()


@program
def copy_in_that_the_device_needed(fault):
    """As before, but an operation on the device has brought the copy forward."""
    source, x = pinned().copy_(values()), torch.empty(8, device=DEVICE)
    x.copy_(source, non_blocking=True)
    y = x * 2
    if not fault:
        main_stream().synchronize()
    source.zero_()
    return y.cpu(), 2 * values()


@program
def copy_in_from_pageable_memory():
    """A pageable source may change at once."""
    source = values()
    x = source.to(DEVICE, non_blocking=True)
    source.zero_()
    return x.cpu(), values()


# --- streams, events, record_stream ---


@program
def side_stream_reads(fault):
    x, side = values().to(DEVICE) + 1, stream()
    if not fault:
        side.wait_stream(main_stream())
    with side:
        y = x * 2
    side.synchronize()
    return y.cpu(), 2 * values() + 2


@program
def side_stream_reads_a_blocking_copy():
    """The host has waited for the copy, so that every stream may read it."""
    x, side = values().to(DEVICE), stream()
    with side:
        y = x * 2
    side.synchronize()
    return y.cpu(), 2 * values()


@program
def main_stream_reads_back(fault):
    x, side = values().to(DEVICE), stream()
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if not fault:
        main_stream().wait_stream(side)
    return (y + 1).cpu(), 2 * values() + 1


@program
def main_stream_overwrites_what_the_side_reads(fault):
    x, side = values().to(DEVICE), stream()
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if not fault:
        main_stream().wait_stream(side)
    x.zero_()
    main_stream().wait_stream(side)
    return y.cpu(), 2 * values()


@program
def event_of_the_right_moment(fault):
    """The fault: the event is recorded before the operation that makes the values."""
    x, side, event = torch.zeros(8, device=DEVICE), stream(), torch.Event(DEVICE)
    if fault:
        event.record()
    x += values().to(DEVICE)
    if not fault:
        event.record()
    side.wait_event(event)
    with side:
        y = x * 2
    side.synchronize()
    return y.cpu(), 2 * values()


@program
def slices_on_two_streams(fault):
    """The fault: the slices share one element."""
    x, side = torch.zeros(8, device=DEVICE), stream()
    side.wait_stream(main_stream())
    x[:4] += 1
    with side:
        x[3 if fault else 4 :] += 1
    torch.accelerator.synchronize()
    return x.cpu(), torch.ones(8)


@program
def columns_on_two_streams(fault):
    x, side = torch.zeros(8, 2, device=DEVICE), stream()
    side.wait_stream(main_stream())
    x[:, 0] += 1
    with side:
        x[:, 0 if fault else 1] += 1
    torch.accelerator.synchronize()
    return x.cpu(), torch.ones(8, 2)


@program
def three_streams_in_a_chain(fault):
    """The fault: the last one waits for an event from before the middle one's work."""
    x, middle, last = values().to(DEVICE), stream(), stream()
    middle.wait_stream(main_stream())
    event = middle.record_event()
    with middle:
        x *= 2
    if not fault:
        event = middle.record_event()
    last.wait_event(event)
    with last:
        y = x + 1
    last.synchronize()
    return y.cpu(), 2 * values() + 1


@program
def host_waits_between_two_streams(fault):
    """The fault: it waits for the other one."""
    x, side = values().to(DEVICE), stream()
    (side if fault else main_stream()).synchronize()
    x += 1
    (side if fault else main_stream()).synchronize()
    with side:
        y = x * 2
    side.synchronize()
    return y.cpu(), 2 * (values() + 1)


@program
def copy_in_on_a_side_stream(fault):
    source, side = pinned().copy_(values()), stream()
    with side:
        x = source.to(DEVICE, non_blocking=True)
    if not fault:
        main_stream().wait_stream(side)
    y = (x * 2).cpu()
    x.record_stream(main_stream())
    return y, 2 * values()


@program
def tensor_dropped_while_a_side_stream_reads_it(fault):
    x, side = values().to(DEVICE), stream()
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    if not fault:
        x.record_stream(side)
    del x
    other = torch.zeros(8, device=DEVICE)
    side.synchronize()
    return (y + other).cpu(), 2 * values()


@program
def tensor_dropped_before_its_stream_waits(fault):
    """Without record_stream, the owner's stream has to wait before it allocates again."""
    x, side = values().to(DEVICE), stream()
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    del x
    if not fault:
        main_stream().wait_stream(side)
    other = torch.zeros(8, device=DEVICE)
    main_stream().wait_stream(side)
    return (y + other).cpu(), 2 * values()


@program
def late_copy_into_a_dropped_tensor(fault):
    source, x, side = pinned().copy_(values()), torch.empty(8, device=DEVICE), stream()
    side.wait_stream(main_stream())
    with side:
        x.copy_(source, non_blocking=True)
    if not fault:
        x.record_stream(side)
    del x
    y = torch.ones(8, device=DEVICE)
    side.synchronize()
    return y.cpu(), torch.ones(8)


@program
def backward_on_a_side_stream(fault):
    weight = values().to(DEVICE).requires_grad_()
    side = stream()
    side.wait_stream(main_stream())
    with side:
        (weight * weight).sum().backward()
    if not fault:
        main_stream().wait_stream(side)
    return (weight.grad + 1).cpu(), 2 * values() + 1


@program
def thread_with_a_stream_of_its_own(fault):
    """The current stream belongs to a thread: another thread starts on the default stream."""
    user, event, read = stream(), torch.Event(DEVICE), []
    x = values().to(DEVICE)
    user.wait_stream(main_stream())
    with user:
        x += 1
        event.record()

    def hook():
        if not fault:
            main_stream().wait_event(event)
        try:
            read.append((x * 2).cpu())
        except RuntimeError as error:
            read.append(error)

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    if isinstance(read[0], RuntimeError):
        raise read[0]
    return read[0], 2 * (values() + 1)


# --- operators ---


def trained(device: str, net: nn.Module, features: Tensor) -> list[Tensor]:
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = features.to(device), (torch.arange(len(features)) % 10).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [tensor.cpu() for tensor in net.state_dict().values()]


def same_on_both(make: Callable[[], nn.Module], features: Tensor):
    one, other = ([], [])
    for device, result in (("cpu", one), (DEVICE, other)):
        torch.manual_seed(3)
        result.extend(trained(device, make(), features))
    return torch.cat([t.double().flatten() for t in other]), torch.cat([t.double().flatten() for t in one])


@program
def mlp_trains_as_on_the_cpu():
    return same_on_both(
        lambda: nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 10)), torch.randn(64, 20)
    )


@program
def convolutions_train_as_on_the_cpu():
    return same_on_both(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10)
        ),
        torch.randn(10, 3, 16, 16),
    )


@program
def running_statistics_on_a_side_stream(fault):
    norm, side, features = nn.BatchNorm1d(4).to(DEVICE), stream(), torch.randn(8, 4)
    x, expected = features.to(DEVICE), nn.BatchNorm1d(4)
    expected(features)
    side.wait_stream(main_stream())
    with side, torch.no_grad():
        norm(x)
    if not fault:
        main_stream().wait_stream(side)
    x.record_stream(side)
    mean = (norm.running_mean * 10).cpu()
    side.synchronize()
    return mean, expected.running_mean * 10


def sparse_sums(device: str) -> Tensor:
    """The gradient of a table, whose rows are scaled and added to those of another one."""
    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True).to(device)
    (gradient,) = torch.autograd.grad(table(torch.tensor([4, 1, 4], device=device)).square().sum(), table.weight)
    one = gradient.coalesce()
    total = (one / 2 + gradient.clone()).coalesce()
    one.values().mul_(3)
    whole = torch.zeros(6, 2, device=device).index_add_(0, one.indices()[0], one.values())
    return torch.cat([total.values(), total.to_dense(), whole]).cpu()


@program
def sparse_gradients():
    return sparse_sums(DEVICE), sparse_sums("cpu")


@program
def sparse_values_on_a_side_stream(fault):
    places, side = torch.tensor([[3, 1, 3]], device=DEVICE), stream()
    entries = torch.sparse_coo_tensor(places, values(3).to(DEVICE) + 1, (5,), check_invariants=False)
    if not fault:
        side.wait_stream(main_stream())
    with side:
        y = entries.to_dense()
    side.synchronize()
    return y.cpu(), torch.tensor([0.0, 3.0, 0.0, 6.0, 0.0])


@program
def autocast_and_a_gradient_scaler():
    """The scale starts so high that steps are skipped."""

    def train(device: str) -> Tensor:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 10)).to(device)
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler(device, init_scale=2.0**20)
        x, y = torch.randn(64, 20).to(device), (torch.arange(64) % 10).to(device)
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = nn.functional.cross_entropy(net(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([torch.tensor([scaler.get_scale()]), *(p.detach().cpu().flatten() for p in net.parameters())])

    return train(DEVICE), train("cpu")


@program
def parameters_in_one_flat_buffer(fault):
    """`param.data = view` aliases the buffer; the fault assigns a copy."""
    layer = nn.Linear(4, 2, bias=False).to(DEVICE)
    flat = torch.zeros(8, device=DEVICE)
    layer.weight.data = flat.view(2, 4).clone() if fault else flat.view(2, 4)
    flat += values().to(DEVICE)
    layer.weight.grad = torch.ones(2, 4, device=DEVICE)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    return flat.cpu(), values() - 1


@program
def outputs_given_and_resized():
    x, out = values().to(DEVICE), torch.empty(0, device=DEVICE)
    torch.add(x, 1, out=out)
    out.resize_(12)
    out[8:] = 0
    return out.cpu(), torch.cat([values() + 1, torch.zeros(4)])


# --- generator, fork, synchronizations, pinned memory ---


@program
def random_state_restored(fault):
    """The fault: only the CPU's state is put back."""
    states = torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state()
    first = torch.randn(4, device=DEVICE).cpu()
    torch.set_rng_state(states[0])
    if not fault:
        torch.get_device_module(DEVICE).set_rng_state(states[1])
    return torch.randn(4, device=DEVICE).cpu(), first


@program
def dropout_follows_the_device(fault):
    """The fault: a seed of the CPU's generator alone."""
    torch.manual_seed(5)
    first = nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu()
    (torch.default_generator.manual_seed if fault else torch.manual_seed)(5)
    return nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu(), first


@program
def generator_of_the_device(fault):
    def draw():
        generator = torch.Generator("cpu" if fault else DEVICE).manual_seed(4)
        return torch.rand(4, device=DEVICE, generator=generator).cpu()

    return draw(), draw()


@program
def one_seed_on_two_devices(fault):
    """Code must not count on equal numbers; the fault does."""
    torch.manual_seed(4)
    one, other = torch.rand(4), torch.rand(4, device=DEVICE).cpu()
    equal = torch.tensor(float(torch.equal(one, other)))
    return equal, torch.tensor(float(fault))


@program
def fork_before_the_first_use(fault):
    """The fault: the device is used before the fork."""
    if fault:
        torch.zeros(1, device=DEVICE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(values().to(DEVICE).sum().item())
        except RuntimeError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 10000).decode()
    if not text[0].isdigit():
        raise RuntimeError(text)
    return torch.tensor(float(text)), values().sum()


@program
def step_without_synchronization(fault):
    """The fault: a loss is read on the host."""
    x, target = values().to(DEVICE), pinned()
    event = torch.Event(DEVICE)
    with tested.synchronizations() as found:
        loss = (x * x).sum()
        target.copy_(x / loss, non_blocking=True)
        event.record()
        if fault:
            loss.item()
        while not event.query():
            pass
    return torch.tensor(found.total()), torch.tensor(0)


@program
def synchronizations_are_counted():
    x, source, counts = values().to(DEVICE), pinned().copy_(values()), []
    event = torch.Event(DEVICE)
    event.record()
    actions = (
        lambda: x.sum(), lambda: x.copy_(source, non_blocking=True), lambda: event.query(), lambda: x[:4].clone(),
        lambda: x.sum().item(), lambda: x.cpu(), lambda: x.copy_(source), lambda: x.nonzero(), lambda: x[x > 2],
        lambda: bool((x > 0).all()), lambda: torch.equal(x, x), lambda: event.synchronize(),
        lambda: main_stream().synchronize(), lambda: torch.accelerator.synchronize(),
    )  # fmt: skip
    for action in actions:
        before = torch.standin.synchronizations()
        action()
        counts.append(torch.standin.synchronizations() - before)
    return torch.tensor(counts), torch.tensor([0] * 4 + [1] * 10)


@program
def pinned_memory_is_counted(fault):
    """The fault: a pool that grows."""
    kept, before = [pinned(64)], torch.standin.pinned_bytes()
    for _ in range(10):
        kept.append(pinned(64) if fault else kept[0])
    return torch.tensor(torch.standin.pinned_bytes()), torch.tensor(before)


@program
def freed_memory_is_returned():
    def megabytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssShmem")) // 1024

    before = megabytes()
    x = torch.zeros(32 << 18, device=DEVICE)
    used = megabytes() - before
    del x
    return torch.tensor([used, megabytes() - before]), torch.tensor([32, 0])


# --- a group of two processes ---


def on_two_ranks(work: Callable[[int], Tensor], backend: str = tested.backend()) -> Tensor:
    """The ranks' results, one row a rank. The ranks' errors are raised here as one."""
    if DEVICE != "standin" and (reason := tested.absent(2)):
        raise Skipped(reason)
    with tempfile.TemporaryDirectory() as folder:
        children = [(rank, *_rank(rank, folder, backend, work)) for rank in range(2)]
        rows = []
        for *_, reading in children:
            with os.fdopen(reading) as pipe:
                rows.append(json.loads(pipe.read()))
        for _, child, _ in children:
            os.waitpid(child, 0)
    if errors := [row for row in rows if isinstance(row, str)]:
        raise RuntimeError(" | ".join(errors))
    return torch.tensor(rows)


def _rank(rank: int, folder: str, backend: str, work: Callable[[int], Tensor]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _be_rank(rank, folder, backend, work, writing)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def _be_rank(rank: int, folder: str, backend: str, work: Callable[[int], Tensor], writing: int) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    store.set(f"connected {rank}", "")
    store.wait(["connected 0", "connected 1"])  # a faulty rank that leaves earlier breaks the connection of the other
    result: Any = None
    try:
        result = work(rank).cpu().tolist()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        result = str(error)
    except BaseException:  # noqa: BLE001  (a child of a fork reports it)
        result = traceback.format_exc()
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(result))
    store.set(str(rank), "done")
    if not isinstance(result, str):
        store.wait(["0", "1"])  # a rank that leaves earlier resets the connection of the other, which is then to fail


def sums(count: int = 8) -> Tensor:
    return (2 * values(count)).expand(2, count)


@program
def all_reduce_and_wait(fault):
    def work(rank):
        x = values().to(DEVICE)
        pending = dist.all_reduce(x, async_op=True)
        if not fault:
            pending.wait()
        return x * 1

    return on_two_ranks(work), sums()


@program
def all_reduce_and_wait_on_another_stream(fault):
    """`wait` concerns the current stream; the fault lets a side stream wait and reads on the main one."""

    def work(rank):
        x, side = values().to(DEVICE), stream()
        pending = dist.all_reduce(x, async_op=True)
        with side if fault else main_stream():
            pending.wait()
        return x * 1

    return on_two_ranks(work), sums()


@program
def input_of_a_collective_changed(fault):
    def work(rank):
        x, every = values(4).to(DEVICE), torch.empty(8, device=DEVICE)
        pending = dist.all_gather_single(every, x, async_op=True)
        if not fault:
            pending.wait()
        x.zero_()
        pending.wait()
        return every

    return on_two_ranks(work), torch.cat([values(4), values(4)]).expand(2, 8)


@program
def received_before_the_wait(fault):
    def work(rank):
        x = values().to(DEVICE) if rank == 0 else torch.empty(8, device=DEVICE)
        pending = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        if not fault:
            pending.wait()
        return x * 1 if rank == 1 else values()

    return on_two_ranks(work), values().expand(2, 8)


@program
def group_of_the_device_alone(fault):
    """As with NCCL: a group for the device has nothing for tensors on the CPU."""

    def work(rank):
        x = values() if fault else values().to(DEVICE)
        dist.all_reduce(x)
        return x

    return on_two_ranks(work, tested.backend().removeprefix("cpu:gloo,")), sums()


@program
def collectives_give_what_gloo_gives():
    calls = (
        lambda x, out: dist.all_reduce(x),
        lambda x, out: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        lambda x, out: dist.broadcast(x, 1),
        lambda x, out: dist.all_gather_single(out, x),
        lambda x, out: dist.reduce_scatter_single(out[:2], x),
        lambda x, out: dist.all_to_all_single(out[:4], x),
        lambda x, out: dist.all_gather([out[:4], out[4:]], x),
        lambda x, out: dist.all_reduce_coalesced([x, out]),
    )

    def work(device):
        def collectives(rank):
            torch.manual_seed(rank)
            x, results = torch.randn(4).to(device), []
            for call in calls:
                mine, out = x.clone(), torch.zeros(8, device=device)
                call(mine, out)
                results += [mine, out]
            dist.reduce(x, 0)
            results.append(x if rank == 0 else torch.zeros_like(x))  # only the root's value is defined
            return torch.cat(results)

        return collectives

    return on_two_ranks(work(DEVICE)), on_two_ranks(work("cpu"))


@program
def averages_and_waits():
    """NCCL's average; and how often the host waits: not for a collective, once for a barrier."""

    def work(rank):
        x = (values(4) * (rank + 1)).to(DEVICE)
        before = torch.standin.synchronizations()
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        waits = [torch.standin.synchronizations() - before]
        dist.barrier()
        waits.append(torch.standin.synchronizations() - before)
        return torch.cat([x.cpu(), torch.tensor(waits, dtype=torch.float32)])

    expected = torch.cat([1.5 * values(4), torch.tensor([0.0, 1.0])]).expand(2, 6)
    return on_two_ranks(work, tested.backend().removeprefix("cpu:gloo,")), expected


def ddp(device: str, hook: Callable[..., torch.futures.Future[Tensor]] | None = None) -> Callable[[int], Tensor]:
    def work(rank):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
        parallel = nn.parallel.DistributedDataParallel(net)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        x = torch.randn(2, 4, 6)[rank].to(device)
        for _ in range(4):
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    return work


@program
def ddp_trains_as_over_gloo():
    return on_two_ranks(ddp(DEVICE)), on_two_ranks(ddp("cpu"))


@program
def ddp_hook_on_a_side_stream(fault):
    """A hook that scales the bucket on its own stream."""

    def hook(_, bucket):
        side = stream()
        if not fault:
            side.wait_stream(main_stream())
        buffer = bucket.buffer()
        with side:
            buffer.div_(2)
            pending = dist.all_reduce(buffer, async_op=True)
        return pending.get_future().then(lambda done: done.value()[0])

    return on_two_ranks(ddp(DEVICE, hook)), on_two_ranks(ddp("cpu"))


class Skipped(Exception):
    """A program cannot run here; the text is the reason."""


def judge(program: Callable[..., tuple[Tensor, Tensor]], *fault: bool) -> str:
    try:
        got, expected = program(*fault)
    except RuntimeError as error:
        return f"raised: {error}"
    except Skipped as reason:
        return f"skipped: {reason}"
    exact = DEVICE == "standin" or not got.is_floating_point()
    same = torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=0.0, atol=ATOL)
    return "right" if same else f"wrong: {got.tolist()}, not {expected.tolist()}"


def outcome(program: Callable[..., tuple[Tensor, Tensor]], *fault: bool) -> str:
    """What becomes of the program in a process of its own."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                print(judge(program, *fault), flush=True)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        errors.seek(0)
        if os.WIFSIGNALED(status):
            return f"killed by signal {os.WTERMSIG(status)}: {errors.read().strip()}"
        return said.read().strip() or errors.read().strip()


def main(names: list[str]) -> None:
    tested.prepare()
    known = DEVICE == "standin"
    for name in names or (each for each in PROGRAMS if known or each not in COUNTING):
        faults = [(False,), (True,)][: 1 + known] if signature(PROGRAMS[name]).parameters else [()]
        outcomes = [outcome(PROGRAMS[name], *fault) for fault in faults]
        print(json.dumps([name, *outcomes]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
