"""A strategy: one choice on each of four axes, as objects and as text.

    ssp:bound=3 ps:shards=4,split=memory fp32 none
    ─┬─ ───┬───
    name   parameters: the fields of the member's dataclass

    strategy  = member { " " member }           any order: names are unique across the axes
    member    = call { "+" call }               the method, then its wrappers
    call      = name [ ":" key "=" value { "," key "=" value } ]

Wrappers are remedies for stale gradients (`sync.corrected`), as in `downpour+dc-asgd:lambda=0.04`.

Defaults: BSP; the topology that the method prefers; single precision; no partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Any

from dure.codec.base import Codec
from dure.codec.fp32 import Float32
from dure.core import user_code
from dure.core.catalogue import Catalogue, combines, load, place_of
from dure.core.catalogue import name_of as name_in_catalogue
from dure.core.cost import CodecCost
from dure.core.spec_text import (
    REQUIRED,
    MemberSpec,
    check_values,
    differs,
    names,
    nearest,
    parameters,
    parse_members,
    typed,
    value_text,
)
from dure.core.text import LONGEST_VALUE, quoted, shortened
from dure.errors import StrategyError, UsageError
from dure.partition.mesh import ONE_STAGE, Mesh, pipeline_of, shared_of, zero_of
from dure.partition.methods.zero import Zero
from dure.partition.pipeline import Pipeline
from dure.partition.programmed import Programmed
from dure.partition.shared_layers import SharedLayers
from dure.partition.whole import Whole
from dure.sync.base import server_rule_of, traits_of
from dure.sync.corrected import parts
from dure.topology.offers import OFFERS, offering, offers_of

if TYPE_CHECKING:
    from dure.sync.base import Sync
    from dure.topology.base import Choice

Partition = Whole | Pipeline | SharedLayers | Zero | Mesh

AXES: Mapping[str, str] = {
    "sync": "when do replicas agree?",
    "topology": "which nodes communicate?",
    "codec": "what goes on the wire?",
    "partition": "how is the model split?",
}
REMEDY = "remedy"
"""The name of remedies, which join a method by `+`, in `catalogue` and `find`; it is no axis."""
WRAPPER = "codec wrapper"
"""The name of wrappers, which join a codec by `+`."""

JOINS: Mapping[str, str] = {REMEDY: "sync method", WRAPPER: "codec"}
"""The kind of member that each joins."""

UNSTAGED = "it decides on each gradient, or uses more than the next one, and a stage has only its part of a gradient"
"""The reason why a method without `Traits.staged` does not run over the stages of a pipeline."""

OWN_TOPOLOGY = 'Name a topology of your own that offers it: topology="FILE.py:CLASS".'

BASES: Mapping[str, type | UnionType] = {
    "partition": Pipeline | SharedLayers | Zero | Mesh | Whole,
    "codec": Codec,
}
"""The base classes of members of an axis; methods and topologies have none."""

MARKS: Mapping[str, tuple[str, ...]] = {"sync": ("traits", "work"), "topology": ("offers", "deployed_as")}
"""The attributes of members without a base class."""

OVERRIDDEN: Sequence[tuple[type, str, str]] = (
    (Codec, "coder", "add-codec"),
    (Pipeline, "order", "add-pipeline"),
    (SharedLayers, "plan", "add-pipeline"),
)
"""The functions that a member must define, with the pages that explain them."""

MEMBERS: Mapping[str, str] = {
    "sync": "A method is a dataclass with `traits` (dure.Traits) and `work`.",
    "topology": "A topology is a dataclass with `offers` and `deployed_as` (a subclass of dure.Topology).",
    "codec": "A codec is a dataclass, a subclass of dure.Codec.",
    "partition": (
        "A pipeline is a dataclass, a subclass of dure.MicroBatched, a split of layers a subclass of dure.SharedLayers."
    ),
}

DEFAULTS: Mapping[str, str] = {"sync": "bsp", "codec": "fp32", "partition": "none"}


@dataclass(frozen=True, slots=True)
class Strategy:
    """One choice on each axis. A combination that cannot work raises `StrategyError`.

    >>> strategy = Strategy.parse("ps:shards=4 ssp:bound=5")
    >>> strategy.topology.shards, str(strategy)
    (4, 'ssp:bound=5 ps:shards=4 fp32 none')
    """

    sync: Sync
    topology: Choice
    codec: Codec = field(default_factory=Float32)
    partition: Partition = field(default_factory=Whole)

    def __post_init__(self) -> None:
        for axis in AXES:
            choice = getattr(self, axis)
            if choice is None or isinstance(choice, str):
                raise StrategyError(
                    f"{axis}={choice!r} is no object, and Strategy(...) takes objects. For texts write "
                    f"Strategy.of({axis}=...), or Strategy.parse(...) for a whole strategy."
                )
            checked(axis, choice)
        if name_of("topology", self.topology) not in catalogue("topology"):
            from dure.topology.base import check_own  # imports torch, which members of the catalogue do not need here

            check_own(self.topology, name_of("topology", self.topology))
        traits, offers = traits_of(self.sync), offers_of(self.topology)
        if offers.isdisjoint(traits.needs):
            because = traits.reasons.topology or self._lack(offers)
            clash = traits.reasons.collective
            if clash and "group" in offers:
                because += f", and {clash}"
        else:
            because = traits.objection(offers)
        if because:
            raise StrategyError(self._refusal(because))
        if not isinstance(self.codec, Float32):
            self._check_codec(offers)
        pipeline = pipeline_of(self.partition)
        if pipeline is not None:
            self._check_partition(offers, pipeline)
        zero = zero_of(self.partition)
        if zero is not None:
            self._check_zero(zero, pipeline)

    def _check_partition(self, offers: frozenset[str], pipeline: Pipeline) -> None:
        """Raise `StrategyError` if the method or the topology does not run over the parts of a model."""
        sync, traits, topology = name_of("sync", self.sync), traits_of(self.sync), name_of("topology", self.topology)
        by_means = {"mean gradient"} <= {*traits.needs} & offers and "stages" in offers
        servers_step = "servers" in offers and bool(traits.messages.over) and not traits.messages.changes
        partition = member_text("partition", self.partition)
        over_ways = traits.coordinated and isinstance(self.partition, SharedLayers)
        if not over_ways and (not traits.staged or traits.reasons.stages):
            because = traits.reasons.stages or UNSTAGED
            works = f"{sync} {topology}" if traits.staged else "bsp collective"
            raise StrategyError(
                f"{member_text('sync', self.sync)} does not run over {partition}: {because}. The nearest that works is "
                f'"{works} {partition}", or {sync} without a partition.'
            )
        if isinstance(self.partition, Mesh) and self.partition.shared is not None:
            self._check_mesh(self.partition.pipeline, self.partition.shared)
        if pipeline.versions > 1 and not by_means:
            raise StrategyError(
                f"{sync} over {topology} does not run over {partition}: it reads and writes the one model of a worker, "
                f'and that has {pipeline.versions}. The nearest that works is "bsp collective {partition}".'
            )
        if pipeline.reads_velocity and servers_step:
            raise StrategyError(
                f"{sync} over {topology} does not run over {partition}: it predicts by the velocity of a worker's "
                "optimizer, and the servers have the optimizer. The nearest that works is "
                f'"bsp collective {partition}".'
            )
        if "stages" not in offers:
            others = offering(("stages",))
            raise StrategyError(
                f"{topology} does not connect the replicas of {partition}: there are {names(others)}. "
                f'The nearest that works is "{sync} {others[0]} {partition}".'
            )

    def _check_mesh(self, whole: Pipeline | None, layers: SharedLayers) -> None:
        """Raise `StrategyError` if the layers of a pipeline's stages cannot be shared."""
        if whole is None:
            return
        pipeline, shared = name_of("partition", whole), name_of("partition", layers)
        if not layers.in_pipelines:
            raise StrategyError(
                f"{shared} does not join {pipeline}: it computes parts of a model in an order of its own. The nearest "
                f'that works is "{member_text("partition", layers)}" alone.'
            )
        if isinstance(whole, Programmed):
            raise StrategyError(
                f"nothing joins {pipeline}, which is no order of forwards and backwards. The nearest that works is "
                f'"gpipe:stages={whole.stages}+{member_text("partition", layers)}".'
            )

    def _check_zero(self, zero: Zero, pipeline: Pipeline | None) -> None:
        """Raise `StrategyError` where workers of the same part of a model cannot shard it."""
        sync, topology, text = self.text()["sync"], self.text()["topology"], member_text("partition", zero)
        whole = member_text("partition", self.partition)
        if "mean gradient" not in traits_of(self.sync).needs:
            raise StrategyError(
                f"{sync} does not run over {whole}: its replicas differ between two averages, and shards are parts of "
                f'one model. The nearest that works is "bsp collective {whole}", or {sync} without {text}.'
            )
        if name_of("topology", self.topology) != "collective" or topology != "collective":
            raise StrategyError(
                f"{topology} does not run over {whole}: shards are scattered and gathered by the engine's collectives. "
                f'The nearest that works is "bsp collective {whole}".'
            )
        if not isinstance(self.codec, Float32):
            raise StrategyError(
                f"{codec_name(self.codec)} does not encode what {text} scatters: a rank has a part of each gradient, "
                f'and no place for the errors of the others. The nearest that works is "bsp collective {whole}" with '
                f"fp32, or {codec_name(self.codec)} without {text}."
            )
        if pipeline is not None and (not pipeline.flushes or isinstance(pipeline, Programmed)):
            name = name_of("partition", pipeline)
            raise StrategyError(
                f"{text} does not join {name}, whose updates are no steps of one optimizer on one version of the "
                f'model. The nearest that works is "1f1b:stages={pipeline.stages}+zero:stage=1".'
            )
        if (pipeline is not None and zero.stage == 2) or (pipeline not in (None, ONE_STAGE) and zero.stage == 3):
            raise StrategyError(
                f"{text} does not join {member_text('partition', self.partition).rpartition('+')[0]}: the gradients of "
                "its micro-batches are summed before they are scattered, and each of them reads the parameters. The "
                f'nearest that works is "{whole.rpartition("+")[0]}+zero:stage=1".'
            )

    def _check_codec(self, offers: frozenset[str]) -> None:
        """Raise `StrategyError` if the codec does not fit what the method sends."""
        codec, sync, topology = codec_name(self.codec), name_of("sync", self.sync), name_of("topology", self.topology)
        check_joins(self.codec)
        traits = traits_of(self.sync)
        messages = traits.messages
        if "codec" not in offers or offers.isdisjoint(messages.over):
            because = traits.reasons.codec or f"{sync} over {topology} sends none"
            raise StrategyError(
                f"{codec} encodes gradients, or changes of models, on their way to be averaged: {because}. The nearest "
                f'that works is "bsp collective {member_text("codec", self.codec)}", or {sync} with fp32.'
            )
        if messages.changes and self.codec.vote() is not None:
            raise StrategyError(
                f"{codec} is for votes, which say which way each parameter goes and not how far, as {sync} needs it. "
                f'The nearest that works is "bsp collective {member_text("codec", self.codec)}", or {sync} with 1bit.'
            )
        if self.codec.vote() is not None and not messages.votes:
            raise StrategyError(
                f"{codec} is for votes, and {sync} has servers add gradients up: a sum of signs is no sign of the sum. "
                f'The nearest that works is "bsp {topology} {member_text("codec", self.codec)}", or {sync} with 1bit.'
            )

    def _lack(self, offers: frozenset[str]) -> str:
        """The reason why the method does not run over a topology with these `offers`."""
        traits = traits_of(self.sync)
        if traits.topologies and name_of("topology", self.topology) in catalogue("topology"):
            return f"it runs over {names(traits.topologies)}"
        return f"it needs {' or '.join(traits.needs)}, and that offers {names(sorted(offers)) or 'nothing'}"

    def _refusal(self, because: str) -> str:
        sync, traits, topology = name_of("sync", self.sync), traits_of(self.sync), name_of("topology", self.topology)
        if not traits.topologies:
            return f"{sync} does not run over {topology}: {because}. {OWN_TOPOLOGY}"
        fits = next((each for each in traits.topologies if not traits.objection(_offers(each))), None)
        works = f"{sync} {traits.topologies[0]}" if fits is None else f"{member_text('sync', self.sync)} {fits}"
        return f'{sync} does not run over {topology}: {because}. The nearest that works is "{works}".'

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """A whole strategy in one text, its members in any order. Raises `StrategyError`."""
        return cls.of(**by_axis(text))

    @classmethod
    def of(
        cls,
        sync: Sync | str | None = None,
        topology: Choice | str | None = None,
        codec: Codec | str | None = None,
        partition: Partition | str | None = None,
    ) -> Strategy:
        """From one choice per axis, each an object, its text, or None for the default. Raises `StrategyError`."""
        method = resolved("sync", sync)
        return cls(
            sync=method,
            topology=resolved("topology", topology if topology is not None else _default_topology(method)),
            codec=resolved("codec", codec),
            partition=resolved("partition", partition),
        )

    @property
    def pushes_together(self) -> bool:
        """Whether all workers take part in each push to servers, and in each pull."""
        traits = traits_of(self.sync)
        served = "servers" in offers_of(self.topology) and isinstance(self.partition, Whole)
        return served and traits.lockstep and not traits.coordinated and server_rule_of(self.sync).quorum is None

    def text(self) -> dict[str, str]:
        """Each axis as text."""
        return {axis: member_text(axis, getattr(self, axis)) for axis in AXES}

    def __str__(self) -> str:
        return " ".join(self.text().values())


def _default_topology(method: Sync) -> str:
    """The name of the topology that a method prefers. Raises `StrategyError` if none of the catalogue suits it."""
    needs, found = traits_of(method).needs, traits_of(method).topologies
    if not found:
        sync, near = name_of("sync", method), nearest(needs[0], OFFERS)
        raise StrategyError(
            f"{sync} needs {' or '.join(needs)}, which no topology of dure offers. {OWN_TOPOLOGY}{near}"
        )
    return found[0]


def _offers(topology: str) -> frozenset[str]:
    """The offers of a topology of the catalogue."""
    return offers_of(load(catalogue("topology")[topology]))


def catalogue(axis: str) -> Catalogue:
    """The catalogue of an axis, or of remedies or wrappers: places of classes by name."""
    if axis == REMEDY:
        members: Catalogue = import_module("dure.sync").REMEDIES
    elif axis == WRAPPER:
        members = import_module("dure.codec").WRAPPERS
    else:
        members = import_module(f"dure.{axis}").CATALOGUE
    return members


def find(name: str, axis: str | None = None) -> tuple[str, str]:
    """Find the axis (or `REMEDY`) of `name` and the place of its class, on `axis` if given. Raises `StrategyError`.

    A member in a user's own file is `FILE.py:CLASS`.
    """
    own = user_code.split(name)
    if own is not None:
        found, place = _own_member(name, *own)
        if axis not in (None, found):
            raise StrategyError(f'"{name}" is a {found}, not a {axis}: write {found}="{name}".')
        return found, place
    for candidate in (*AXES, *JOINS):
        if name in catalogue(candidate):
            if axis not in (None, candidate):
                raise StrategyError(_elsewhere(name, candidate, axis))
            return candidate, catalogue(candidate)[name]
    axes = (*AXES, *JOINS) if axis is None else (axis,)
    known = "; ".join(f"{a} has {names(catalogue(a))}" for a in axes)
    near = nearest(name, [member for a in axes for member in catalogue(a)])
    raise StrategyError(f'nothing is called "{name}": {known}.{near}')


def axis_of(kind: type) -> str | None:
    """The axis of a member's class, by its base class or its attributes; None if it is no member."""
    by_base = next((axis for axis, base in BASES.items() if issubclass(kind, base)), None)
    return by_base or next((axis for axis, own in MARKS.items() if any(hasattr(kind, mark) for mark in own)), None)


def checked(axis: str, choice: Any) -> Any:
    """An object of an axis. Raises `StrategyError` for a class, an object of another axis, and what is no member."""
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, type) and axis_of(choice) == axis:
        raise StrategyError(f"{axis}={choice.__name__} is a class: write {axis}={choice.__name__}(...), an object.")
    kind = type(parts(choice)[0])
    found, name = axis_of(kind), kind.__name__
    if found is None or not is_dataclass(kind):
        raise StrategyError(f"{axis}={quoted(choice)} is no {axis}. {MEMBERS[axis]}")
    if found != axis:
        raise StrategyError(f"{axis}={name}(...) is a {found}, not a {axis}: write {found}={name}(...).")
    for member in _members(choice):
        check_values(type(member).__name__, member)
    return choice


def _own_member(name: str, file: str, member: str) -> tuple[str, str]:
    try:
        kind = user_code.kind(file, member)
    except UsageError as error:
        raise StrategyError(f"{name}: {error}") from error
    axis = axis_of(kind) or "sync"
    lacks = [part for part in MARKS.get(axis, ()) if not hasattr(kind, part)]
    if lacks:
        raise StrategyError(
            f"{name} is no member of a strategy. {' '.join(MEMBERS.values())} This lacks {names(lacks)}."
        )
    for base, part, page in OVERRIDDEN:
        lacks_it = issubclass(kind, base) and getattr(kind, part) is getattr(base, part)
        if lacks_it and not issubclass(kind, Programmed):
            raise StrategyError(f"{name} has no `{part}`: define it, as in docs/how-to/{page}.md.")
    if not is_dataclass(kind):
        raise StrategyError(f"{name} is no dataclass: write @dataclass(frozen=True) above the class.")
    return axis, f"{user_code.module_of(file)}:{member}"


def _elsewhere(name: str, axis: str, wanted: str) -> str:
    if axis in JOINS:
        works = f"{combines(load(catalogue(axis)[name]))[0]}+{name}"
        return f'"{name}" is a {axis}: join it to a {JOINS[axis]}, as in "{works}".'
    return f'"{name}" is a {axis}, not a {wanted}; {wanted} has {names(catalogue(wanted))}.'


def by_axis(text: str) -> dict[str, str]:
    """The members named in `text`, each under its axis. Raises `StrategyError`.

    >>> by_axis("ps:shards=2 bsp")
    {'topology': 'ps:shards=2', 'sync': 'bsp'}
    """
    chosen: dict[str, str] = {}
    for member in text.split():
        first = parse_members(member)[0].name
        axis, _ = find(first)
        if axis in JOINS:
            raise StrategyError(_elsewhere(first, axis, JOINS[axis]))
        if axis in chosen:
            raise StrategyError(f'"{text}" chooses {axis} twice, "{chosen[axis]}" and "{member}": leave one out.')
        chosen[axis] = member
    return chosen


def make(text: str, axis: str | None = None) -> Any:
    """The object that `text` names, with what is joined to it. Raises `StrategyError`.

    >>> make("downpour+staleness-lr").remedies
    (StalenessLR(),)
    """
    call, *wrappers = parse_members(text)
    made = _make(call, axis)
    for wrapper in wrappers:
        if isinstance(made, Codec):
            made = _make(wrapper, WRAPPER, codec=made)
        elif find(call.name)[0] == "sync":
            made = made + _make(wrapper, REMEDY)
        else:
            made = _joined(made, call, wrapper)
    if isinstance(made, Codec):
        check_joins(made)
    return made


def _joined(made: Any, call: MemberSpec, wrapper: MemberSpec) -> Mesh:
    """The partition `made`, which begins with `call`, joined by `wrapper`. Raises `StrategyError`."""
    pipeline = made.pipeline if isinstance(made, Mesh) else made if isinstance(made, Pipeline) else None
    shared, zero = shared_of(made), zero_of(made)
    if zero is None and (pipeline is not None or shared is not None):
        other = _make(wrapper, "partition")
        if isinstance(other, Zero):
            return Mesh(pipeline, shared, other)
        if shared is None:
            return Mesh(pipeline, _shared(wrapper, call.name))
    raise StrategyError(_unjoined(made, call, wrapper))


def _unjoined(made: Any, call: MemberSpec, wrapper: MemberSpec) -> str:
    """The refusal of `wrapper` behind `call`, which made an object that nothing joins."""
    kind = load(find(wrapper.name)[1])
    if isinstance(made, SharedLayers) and made.in_pipelines and issubclass(kind, Pipeline):
        pipeline = member_text("partition", _make(wrapper, "partition"))
        return f'"{wrapper.name}" comes first: write "{pipeline}+{member_text("partition", made)}".'
    zero = zero_of(made)
    if zero is not None and issubclass(kind, Pipeline | SharedLayers):
        return f'zero comes last: write "{wrapper.name}+{member_text("partition", zero)}".'
    return f'nothing joins {call.name}, so not "{wrapper.name}": write "{call.name}" alone.'


def _shared(call: MemberSpec, pipeline: str) -> SharedLayers:
    """The sharing of layers that joins a pipeline. Raises `StrategyError` for any other member."""
    made = _make(call, "partition")
    if not isinstance(made, SharedLayers):
        raise StrategyError(
            f'"{call.name}" does not join {pipeline}: layers that are shared do, as in "{pipeline}+tensor:ways=2", and '
            f'sharded data parallelism, as in "{pipeline}+zero:stage=1".'
        )
    return made


def _make(call: MemberSpec, axis: str | None, **joined: Any) -> Any:
    name = call.name
    kind = load(find(name, axis)[1])
    given = typed(call, kind)
    missing = [p.name for p in parameters(kind) if p.default is REQUIRED and p.field not in given]
    if missing:
        raise StrategyError(f"{name} needs {names(missing)}: write {name}:{missing[0]}=VALUE.")
    with user_code.explain_user_errors(f"{name} raised", StrategyError, only=True):
        try:
            return kind(**given, **joined)
        except ValueError as error:
            raise StrategyError(f"{name}: {error}") from error


def name_of(axis: str, member: Any) -> str:
    """The name of an object in the catalogue of `axis`, or its file and class; any other goes by its class alone."""
    return name_in_catalogue(type(parts(member)[0]), catalogue(axis))


def member_text(axis: str, member: Any) -> str:
    """An object as text: its first parameter (always, as a rule), the others where they differ from their defaults.

    >>> member_text("topology", make("ps")), member_text("topology", make("ps:shards=2,split=layer"))
    ('ps:shards=1', 'ps:shards=2,split=layer')
    """
    if isinstance(member, Codec):
        return "+".join(_call_text(WRAPPER if i else "codec", each) for i, each in enumerate(_layers(member)))
    if isinstance(member, Mesh):
        return "+".join(_call_text(axis, each) for each in member.members)
    inner, remedies = parts(member)
    return "+".join([_call_text(axis, inner), *(_call_text(REMEDY, remedy) for remedy in remedies)])


def check_named(objects: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an object whose class no catalogue and no file has: a process makes it from its text."""
    known = {place for axis in (*AXES, *JOINS) for place in catalogue(axis).values()}
    for axis, choice in objects.items():
        for kind in map(type, _members(choice)):
            if place_of(kind) not in known and user_code.text_of(kind) is None:
                name = kind.__qualname__
                raise UsageError(
                    f"{axis}={name}(...) is an object of your own, which cannot be handed to other processes. Put its "
                    f'class into a file and name it ({axis}="FILE.py:{name}"), or run in virtual time (on="virtual").'
                )
        text = member_text(axis, choice)
        if not _is_made_by(text, axis, choice):
            raise UsageError(
                f"{axis}={quoted(choice)} cannot be handed to other processes: they make it from its text, "
                f'"{shortened(text, LONGEST_VALUE)}", which gives another object. Give values that a text has, or run '
                'in virtual time (on="virtual").'
            )


def _is_made_by(text: str, axis: str, choice: Any) -> bool:
    """Whether `text` makes an object with the parameters of `choice`."""
    try:
        again = make(text, axis) if len(text.split()) == 1 else None
    except StrategyError:
        return False
    both = [[_values(each) for each in _members(member)] for member in (choice, again)] if again else [True, False]
    return not differs(*both)


def _values(member: Any) -> list[Any]:
    return [getattr(member, parameter.field) for parameter in parameters(type(member))]


def _members(choice: Any) -> list[Any]:
    """An object of an axis, and what is joined to it."""
    if isinstance(choice, Codec):
        return _layers(choice)
    if isinstance(choice, Mesh):
        return choice.members
    inner, remedies = parts(choice)
    return [inner, *remedies]


def codec_name(codec: Codec) -> str:
    """The names of a codec and of what joins it, without parameters.

    >>> codec_name(make("sign:zeros=random+momentum:beta=0.5"))
    'sign+momentum'
    """
    return "+".join(name_of(WRAPPER if i else "codec", each) for i, each in enumerate(_layers(codec)))


def own_cost(codec: Codec) -> CodecCost:
    """The cost that a codec's class states, without wrappers."""
    return _layers(codec)[0].cost


def check_codec_name(name: str) -> None:
    """Raise `StrategyError` if `name` is not the `codec_name` of any codec, in the catalogue or in a file."""
    for position, part in enumerate(name.split("+")):
        if position or user_code.split(part) is None:
            find(part, WRAPPER if position else "codec")
    _check_joined(*name.split("+"))


def check_joins(codec: Codec) -> None:
    """Raise `StrategyError` if a wrapper joins a codec that it does not fit. A user's own codec fits every wrapper."""
    _check_joined(*(name_of(WRAPPER if i else "codec", each) for i, each in enumerate(_layers(codec))))


def _check_joined(inner: str, *wrappers: str) -> None:
    for wrapper in wrappers:
        joins = combines(load(catalogue(WRAPPER)[wrapper])) if wrapper in catalogue(WRAPPER) else ()
        if joins and inner in catalogue("codec") and inner not in joins:
            raise StrategyError(
                f'"{wrapper}" joins {names(joins)}, not {inner}. The nearest that works is "{joins[0]}+{wrapper}", or '
                f"{inner} alone."
            )


def _layers(codec: Codec) -> list[Codec]:
    """A codec and what wraps it, from the inside."""
    return [*_layers(codec.codec), codec] if hasattr(codec, "codec") else [codec]


def _call_text(axis: str, member: Any) -> str:
    shown = []
    for position, parameter in enumerate(parameters(type(member))):
        value = getattr(member, parameter.field)
        if (position == 0 and parameter.shown) or differs(value, parameter.default):
            shown.append(f"{parameter.name}={value_text(value)}")
    name = name_of(axis, member)
    return f"{name}:{','.join(shown)}" if shown else name


def resolved(axis: str, choice: Any) -> Any:
    """The member of an axis: an object as it is, one made from its text, or the default. Raises `StrategyError`."""
    if choice is None:
        choice = DEFAULTS[axis]
    if isinstance(choice, str) and len(choice.split()) > 1:
        each = ", ".join(f'{one}="{member}"' for one, member in by_axis(choice).items())
        raise StrategyError(f'{axis}="{choice}" is more than a {axis}: write {each}.')
    return make(choice, axis) if isinstance(choice, str) else checked(axis, choice)
