"""Overlap of communication and backward: each slice of the flat gradient is sent as soon as backward completes it.

Backward completes parameters roughly from the last to the first. The flat gradient is cut into fixed slices at
borders of parameters. A slice is launched once all its parameters are complete *and* all slices behind it have
been launched, so that every rank launches in the same order. Slices never change: a codec keeps state for each slice.

On a device, backward writes a gradient on the stream of the forward operation, and parts of a model may have streams of
their own. The stream that launches a slice waits for all streams that have written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dure.job.replica import Replica

LEAST_NBYTES, MOST_NBYTES = 3 << 19, 4 << 20
"""Limits of a slice's size: it ends at the first border of a parameter after an eighth of the gradient."""

Launch = Callable[["torch.Tensor"], Any]
Index = Callable[[int], None]


def cut(replica: Replica, nbytes: int | None = None, without: Collection[int] = ()) -> list[tuple[int, int]]:
    """Cut the flat gradient into ranges [start, stop), from the last parameter to the first.

    Each range has at least `nbytes` except the last. Parameters numbered `without` are in no range, and no range
    crosses them.

    `nbytes` is an eighth of the gradient by default: a dense layer at the end is sent while the slow convolutions
    before it are still computed. A slice smaller than LEAST_NBYTES costs more in wake-ups than it hides (two cores:
    1.03x of DDP in one slice of 0.4 MB, 0.96x in two; a small GPT of 3.1 MB under `attach`: 1.007x with slices of at
    least 1.5 MB, 0.986x with 1 MB, 200 pairs each beside other programs).
    """
    if nbytes is None:
        nbytes = min(max(replica.params.nbytes // 8, LEAST_NBYTES), MOST_NBYTES)
    ranges = []
    stop = replica.numel
    for index in reversed(range(len(replica.layers))):
        layer = replica.layers[index]
        if index in without:
            if stop > layer.stop:
                ranges.append((layer.stop, stop))
            stop = layer.start
        elif (stop - layer.start) * replica.params.element_size() >= nbytes or layer.start == 0:
            ranges.append((layer.start, stop))
            stop = layer.start
    return ranges


class Overlap:
    """Hooks on a replica's parameters that launch slices of `replica.grads` during backward, while armed.

    Parameters numbered `without` get no hook and are in no slice. A replica that does not keep its gradients has no
    `grads`: a slice is then memory of its own, which is freed once what `launch` has begun has ended.
    """

    def __init__(self, replica: Replica, nbytes: int | None = None, *, without: Collection[int] = ()) -> None:
        self.replica = replica
        self.slices = cut(replica, nbytes, without)
        # A parameter without elements may lie behind all slices.
        own = [index for index, layer in enumerate(replica.layers) if layer.numel and index not in without]
        self._slice_of = {index: self._find(replica.layers[index].start) for index in own}
        self._members = [[i for i in own if self._slice_of[i] == number] for number in range(len(self.slices))]
        self._launch: Launch | None = None
        self._begin: Index | None = None
        self._again: Index | None = None
        self._missing: list[set[int]] = []
        self._writers: list[list[torch.Stream]] = []
        self._next = 0
        self._works: list[Any] = []
        self._hooks = [
            replica.parameters[index].register_post_accumulate_grad_hook(lambda _, i=index: self._completed(i))  # type: ignore[no-untyped-call]
            for index in own
        ]

    def arm(self, launch: Launch, begin: Index | None = None, again: Index | None = None) -> None:
        """Pass each slice that the next backward completes to `launch`.

        Before the first, `begin` is called with the index of the parameter that is complete. `again` is called for a
        parameter that is complete a second time, as in a backward after one that has failed. Both may arm anew.
        """
        self._launch = launch
        self._begin = begin
        self._again = again
        self._missing = [set() for _ in self.slices]
        for index, number in self._slice_of.items():
            self._missing[number].add(index)
        self._writers = [[] for _ in self.slices]
        self._next = 0
        self._works = []

    def finish(self) -> list[Any]:
        """Launch the slices that backward did not reach (their gradient is zero), and disarm.

        Returns the results of `launch`, in order.
        """
        for missing in self._missing:
            for index in missing:
                self.replica.bring_home(index)
            missing.clear()
        self._send_complete()
        self._launch = None
        return self._works

    def disarm(self) -> None:
        """Stop launching: the hooks do nothing until the next `arm`."""
        self._launch = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self.disarm()
        self._works = []
        for hook in self._hooks:
            hook.remove()

    @property
    def armed(self) -> bool:
        return self._launch is not None

    @property
    def has_launched(self) -> bool:
        """Whether a slice of the gradient has left since `arm`."""
        return self._next > 0

    def _find(self, position: int) -> int:
        return next(n for n, (start, stop) in enumerate(self.slices) if start <= position < stop or start == position)

    def _completed(self, index: int) -> None:
        if self._launch is None:
            return
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin(index)
        number = self._slice_of[index]
        if self._again is not None and index not in self._missing[number]:
            self._again(index)
        self.replica.bring_home(index)
        if self.replica.device.type != "cpu":
            self._note_writer(number)
        self._missing[number].discard(index)
        self._send_complete()

    def _send_complete(self) -> None:
        assert self._launch is not None
        while self._next < len(self.slices) and not self._missing[self._next]:
            self._wait_for_writers(self._next)
            self._works.append(self._launch(self._complete(self._next)))
            self._next += 1

    def _complete(self, number: int) -> torch.Tensor:
        """The gradient of a slice of which all parameters are complete."""
        if not self.replica.keeps_gradients:
            return self.replica.take_gradients(self._members[number])
        start, stop = self.slices[number]
        return self.replica.grads[start:stop]

    def _note_writer(self, number: int) -> None:
        """Note that the current stream has written to slice `number`."""
        here = torch.accelerator.current_stream(self.replica.device)
        if here not in self._writers[number]:
            self._writers[number].append(here)

    def _wait_for_writers(self, number: int) -> None:
        """Let the current stream wait for the others that have written to slice `number`."""
        if self._writers[number]:
            here = torch.accelerator.current_stream(self.replica.device)
            for stream in self._writers[number]:
                if stream != here:
                    here.wait_stream(stream)
