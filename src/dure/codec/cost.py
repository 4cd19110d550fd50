"""Cost of a codec in virtual time: by a cluster file, or as the class of the codec states it.

    encode     start + value * values of the slice
    decode     start + value * values of the slice
    combine    start + value * values of the slice, for each message that is added to a mean; for a vote,
               start + value * values of all messages, once

A codec states its cost as `Codec.cost`, a wrapper as `costs`, by the name of the codec that it joins. These costs were
measured by `python bench/codecs.py --costs`, on a machine of two cores, with one thread. `dure probe` measures the
costs of another machine for the key `codecs` of its cluster file.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.codec import CATALOGUE, WRAPPERS
from dure.core.catalogue import load
from dure.core.cost import CodecCost


def cost_of(name: str, given: Mapping[str, CodecCost]) -> CodecCost:
    """The cost of a codec with its wrappers, such as "sign+momentum".

    The order of precedence: `given` for the whole name, the statement of the wrapper, `given` for the codec alone, the
    statement of the codec. A codec outside of the catalogue costs nothing unless `given` names it.
    """
    codec, _, wrapper = name.partition("+")
    joined = load(WRAPPERS[wrapper]).costs if wrapper in WRAPPERS else {}  # type: ignore[attr-defined]
    if name in given or codec not in joined:
        return given.get(name) or given.get(codec) or stated(codec)
    cost: CodecCost = joined[codec]
    return cost


def stated(codec: str) -> CodecCost:
    """The cost that a codec's class states, without wrappers."""
    return load(CATALOGUE[codec]).cost if codec in CATALOGUE else CodecCost()  # type: ignore[attr-defined]
