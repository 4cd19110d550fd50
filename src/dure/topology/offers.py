"""Offers of topologies and needs of methods, in the same words, so that neither names the other.

A method runs over a topology that offers one of its needs. A topology of a user's own may offer more, in words of its
own, for methods that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from dure.core.catalogue import load
from dure.topology import CATALOGUE

OFFERS: Mapping[str, str] = {
    "group": "`worker.group`: means of vectors over all workers, which are at the same step",
    "mean gradient": "`worker.mean_gradient()` and `worker.step()`, for a method that uses its model in no other way",
    "servers": "`worker.server`: servers hold the model, and a clock admits workers",
    "coordinator": "server 0 runs the method's `coordinate`, and workers evaluate its portions",
    "memory": "`worker.memory`: one model in the memory of one machine, and a clock",
    "peers": "`worker.peer`: averages of models with neighbors",
    "codec": "a codec may encode messages",
    "stages": "the same stage of several pipelines may be connected",
}
"""The words of dure, with their meanings. The first six may be needs."""


def offers_of(choice: Any) -> frozenset[str]:
    """The offers of a topology, as an object or a class. One that offers a group offers mean gradients too."""
    found = frozenset(choice.offers)
    return found | {"mean gradient"} if "group" in found else found


@cache
def offering(needs: tuple[str, ...]) -> tuple[str, ...]:
    """The topologies of the catalogue that offer one of `needs`. The first one that offers the first need leads.

    >>> offering(("servers", "group"))
    ('ps', 'collective')
    """
    offers = {name: offers_of(load(place)) for name, place in CATALOGUE.items()}
    fit = [name for name in offers if not offers[name].isdisjoint(needs)]
    best = [name for name in fit if needs[0] in offers[name]][:1]
    return (*best, *(name for name in fit if name not in best))
