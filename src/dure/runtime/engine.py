"""PyTorch's process group of all ranks, for as long as a loop is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dure.runtime.alone import AloneGroup
from dure.runtime.process_group import TIMEOUT, ProcessGroup

if TYPE_CHECKING:
    from dure.runtime.launch.torchrun import Meeting
    from dure.runtime.process import ProcessNode


class Engine:
    """The group of all ranks in `meeting`; apart from the user's own process group where there is one.

    `group` is what methods use; `alone` says that there is nobody else.
    """

    def __init__(self, node: ProcessNode, meeting: Meeting) -> None:
        self.alone = meeting.place.world_size == 1
        self.group: ProcessGroup | AloneGroup = AloneGroup(node)
        self._engine: dist.ProcessGroup | None = None
        self._is_mine = False
        if self.alone:
            return
        world = range(meeting.place.world_size)
        if dist.is_initialized():
            self._engine = dist.new_group(timeout=TIMEOUT)
        else:
            store = dist.PrefixStore("engine", meeting.store)  # type: ignore[attr-defined]
            dist.init_process_group(store=store, rank=node.rank, world_size=len(world), timeout=TIMEOUT)
            self._is_mine = True
        self.group = ProcessGroup(node, world, self._engine)

    def close(self) -> None:
        """Leave; who waits for this rank hears that it is gone."""
        if self._is_mine:
            dist.destroy_process_group()
        elif self._engine is not None:
            dist.destroy_process_group(self._engine)
        self._is_mine, self._engine = False, None
