"""The thread on which a hook works, and its side streams.

    DDP's thread        gradients of a bucket ... event | future                               wait for the future
    side stream                                    wait for the event, encode, send, decode, event |

On a device, an event orders each two: the side stream reads a bucket after the stream that computed it, which the user
may have chosen, and DDP reads the result after the side stream. The host waits for neither.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class BucketThread:
    """Does a hook's work on buckets, one after another, while the next gradients are computed.

    What it does on a device is on a side stream, one for each device.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dure hook")
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, work: Callable[[torch.Tensor], object], values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start `work`, which changes `values`, after the operations that the current stream has so far.

        The future gives `values`. A stream that waits for it waits for the work.
        """
        stream = self._stream(values.device)
        if stream is not None:
            ready = torch.accelerator.current_stream(values.device).record_event()
            values.record_stream(stream)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[values.device] if stream else None)

        def run() -> None:
            with stream or contextlib.nullcontext():
                if stream is not None:
                    stream.wait_event(ready)
                work(values)

        def complete(_: object) -> None:
            with stream or contextlib.nullcontext():
                future.set_result(values)  # records an event of the current stream, for a tensor on a device

        def result(_: object) -> torch.Tensor:
            done.result()  # an error that is raised here reaches DDP as it is
            return values

        done = self._thread.submit(run)
        done.add_done_callback(complete)
        return future.then(result)

    def call(self, work: Callable[[], T], device: torch.device) -> T:
        """Do `work` on `device` after all that was started, and wait for its result on the host."""
        stream = self._stream(device)

        def run() -> T:
            with stream or contextlib.nullcontext():
                return work()

        return self._thread.submit(run).result()

    def _stream(self, device: torch.device) -> torch.Stream | None:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
