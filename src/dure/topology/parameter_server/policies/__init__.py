"""Policies of admission: which worker may start, which updates count, and when a version is complete.

A policy is a state machine. It is told events and returns verdicts; it has no input or output, no time and no
randomness, so that tests can try all orders of events.

    event                      meaning                                       verdicts it may lead to
    join(worker)               a newcomer; it enters at the slowest clock    Start
    finish(worker)             it has done its work                          Close, Start, Accept, Refuse, End
    leave(worker)              it has failed, or was evicted                 Close, Start, Accept, Refuse
    ask(worker)                it is at a step boundary                      Start, at once or later, or End
    offer(worker, base)        it has an update, computed on version `base`  Accept or Refuse, for it
    staged(worker, group, seq) every shard has staged its update             Close, Start, Abort

A *version* counts closed groups, and a *group* is the set of updates that one version applies: `Close` number v
(the first is 0) makes version v + 1. The shards apply groups in the order in which they were closed, whatever the
order in which the updates came.

| policy     | a group is                       | a worker may start when                     | methods          |
|------------|----------------------------------|---------------------------------------------|------------------|
| `Barrier`  | one update of every live worker  | the group of its last update has closed     | BSP              |
| `Bounded`  | one update, in order of arrival  | no live worker is over `lead` clocks behind | SSP              |
| `FirstOf`  | the newest version's first K     | the open group has a place for it           | K-sync, backup   |
| `AnyOf`    | K updates of any version         | the open group has a (or another) place     | K-async          |
| `OneFirst` | (no order)                       | one worker has been ahead alone             | Downpour         |

`FirstOf` stops a worker that still computes on a version that is over (`Abort`), and refuses an update that finds no
place before a byte of it is sent. If failures leave too few workers for K, the group closes short: it is complete as
soon as all live workers have given what they may. If too few are left because others have finished, the work of the
rest is over as well, and the open group is dropped: an update of few members, at a rate for many, would spoil the model
at the very end.
"""

from dure.topology.parameter_server.policies.any_of import AnyOf
from dure.topology.parameter_server.policies.barrier import Barrier
from dure.topology.parameter_server.policies.base import (
    Abort,
    Accept,
    Close,
    End,
    Policy,
    Refuse,
    Start,
    Verdict,
)
from dure.topology.parameter_server.policies.bounded import Bounded
from dure.topology.parameter_server.policies.first_of import FirstOf
from dure.topology.parameter_server.policies.one_first import OneFirst
from dure.topology.parameter_server.policies.open_group import most

__all__ = [
    "Abort",
    "Accept",
    "AnyOf",
    "Barrier",
    "Bounded",
    "Close",
    "End",
    "FirstOf",
    "OneFirst",
    "Policy",
    "Refuse",
    "Start",
    "Verdict",
    "most",
]
