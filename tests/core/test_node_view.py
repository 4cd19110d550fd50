"""The nodes of one stage among themselves: names, and what a service is told."""

from __future__ import annotations

from dure.core.node import Call, Reply
from dure.core.node_view import Names, ServiceView

NAMES = Names({"worker": [1, 3], "server": [2, 3]})


class Book:
    """Notes who has called and who is lost."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def expects(self, method):
        return ()

    def handle(self, call):
        self.noted.append(call.caller)
        return Reply()

    def lost(self, name):
        self.noted.append(f"lost {name}")


def test_each_node_has_one_name_inside_and_no_other_node_has_it():
    inside = [NAMES.inside(f"worker {rank}") for rank in range(6)]
    assert [inside[1], inside[3]] == ["worker 0", "worker 1"]
    assert len(set(inside)) == 6
    assert [NAMES.outside(NAMES.inside(name)) for name in ("server 3", "driver")] == ["server 3", "driver"]


def test_a_service_is_told_of_the_callers_and_the_losses_of_its_own_set():
    book = Book()
    view = ServiceView(book, NAMES)
    for caller in ("worker 3", "server 2", "driver"):
        view.handle(Call(caller, "ask", {}, ()))
    for name in ("worker 0", "server 0", "worker 1"):
        view.lost(name)  # worker 0 of the run is not worker 0 of the set
    assert book.noted == ["worker 1", "server 0", "driver", "lost worker 0"]
