"""A strategy as text and as objects: what is read, what is written, and what is refused in which words."""

import math
from dataclasses import Field, dataclass, field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, get_origin

import numpy as np
import pytest
from support.wording import raising

import dure
from dure.codec.feedback import Momentum
from dure.codec.floats import Float16
from dure.core.catalogue import combines, load
from dure.core.spec_text import MemberSpec, check_values, parameters, parse_members, parse_value, value_text
from dure.errors import StrategyError, UsageError
from dure.run.strategy import (
    AXES,
    REMEDY,
    WRAPPER,
    Strategy,
    by_axis,
    catalogue,
    check_codec_name,
    check_named,
    make,
    member_text,
)
from dure.sync.averaging import Averaging
from dure.sync.bsp import BSP
from dure.sync.downpour import Downpour
from dure.sync.hogwild import HogBatch
from dure.sync.ssp import SSP
from dure.topology.base import topology_of
from dure.topology.collective.choice import Collective
from dure.topology.offers import offers_of
from dure.topology.parameter_server.choice import ParameterServer


@pytest.mark.parametrize(
    ("text", "sync", "topology"),
    [
        ("bsp", BSP(), Collective()),
        ("ssp", SSP(), ParameterServer()),
        ("ssp:bound=inf", SSP(bound=math.inf), ParameterServer()),
        ("ps:shards=4,split=layer ssp:bound=5 fp32", SSP(bound=5), ParameterServer(shards=4, split="layer")),
        ("averaging:period=8 ps:colocated=true", Averaging(period=8), ParameterServer(colocated=True)),
        ("ps", BSP(), ParameterServer()),
    ],
)
def test_text_becomes_objects_and_comes_back(text, sync, topology):
    strategy = Strategy.parse(text)
    assert (strategy.sync, strategy.topology) == (sync, topology)
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy.of(**strategy.text()) == strategy


def test_order_of_members_does_not_matter():
    assert Strategy.parse("none ps:shards=2 fp32 downpour") == Strategy.parse("downpour fp32 none ps:shards=2")


def test_objects_and_text_may_be_mixed():
    assert Strategy.of(SSP(bound=1), "ps:shards=2") == Strategy.parse("ssp:bound=1 ps:shards=2")


@pytest.mark.parametrize(
    ("member", "refusal"),
    [
        (
            lambda: Downpour(server="momentum"),
            "Downpour: server must be job or sgd or adagrad or adam, got 'momentum'.",
        ),
        (lambda: SSP(form="copy"), "SSP: form must be snapshot or rmw, got 'copy'."),
        (lambda: Downpour(n_push=1.5), "Downpour: n_push must be an integer, got 1.5."),
        (lambda: Downpour(overlap="no"), "Downpour: overlap must be true or false, got 'no'."),
    ],
)
def test_values_of_an_object_are_checked_as_those_of_its_text(member, refusal):
    with pytest.raises(StrategyError) as refused:
        Strategy.of(member())
    assert str(refused.value) == refusal


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


Mean: Any = Enum("Mean", {"MEAN": "mean"}, type=str)


def own(kind: Any, default: Any = None, **values: Any) -> Any:
    """An object of a method with one parameter `x` of the type `kind`."""
    place = default if isinstance(default, Field) else field(default=default)
    traits = {"traits": dure.Traits(needs=("group",))}
    return make_dataclass("Own", [("x", kind, place)], namespace=traits, frozen=True)(**values)


@pytest.mark.parametrize(
    "member",
    [
        lambda: own(int, x=np.int64(3)),
        lambda: own(float, x=np.float32(0.5)),
        lambda: own(float, x=3),
        lambda: own(bool, x=np.bool_(True)),
        lambda: own(int, None),
        lambda: own(tuple[int, ...], ()),
        lambda: own(tuple[int, ...], x=()),
        lambda: own(tuple[int, str], x=(1, "a")),
        lambda: own(list[int], field(default_factory=lambda: [3])),
        lambda: own(np.ndarray, x=np.ones(3)),
        lambda: own(Mode, x=Mode.SLOW),
        lambda: own(Path, x=Path("a b")),
        lambda: own(Any, x=object()),
        lambda: HogBatch(scale=Mean.MEAN),
        lambda: SSP(bound=np.float64(math.inf)),
    ],
)
def test_an_object_whose_values_have_their_types_is_taken(member):
    assert str(Strategy.of(member()))


@pytest.mark.parametrize(
    ("member", "refusal"),
    [
        (lambda: own(int, x="3"), "x must be an integer, got '3'."),
        (lambda: own(int, x=3.0), "x must be an integer, got 3.0."),
        (lambda: own(int, x=True), "x must be an integer, got True."),
        (lambda: own(int, x=10**5000), "an integer of at most 63 bits, got a whole number of more than 4,300 digits."),
        (lambda: own(float, x=10**400), "x must be a number (inf is one), got 1000"),
        (lambda: own(float, x="0.5"), "x must be a number (inf is one), got '0.5'."),
        (lambda: own(str, x=3), "x must be a text, got 3."),
        (lambda: own(Mode, x="slow"), "x must be fast or slow, got 'slow'."),
        (lambda: own(int | None, x="none"), "x must be an integer, got 'none'."),
        (lambda: own(tuple[int, ...], x=[1]), "x must be a tuple, got [1]."),
        (lambda: own(tuple[str, ...], x=("a", 1)), "x must be a tuple of which each is a text, got ('a', 1)."),
        (lambda: Downpour(overlap="true"), "overlap must be true or false, got 'true'."),
        (lambda: Downpour(server="x" * 100_000), "characters left out"),
    ],
)
def test_an_object_whose_values_have_other_types_is_refused_in_a_short_sentence(member, refusal):
    with pytest.raises(StrategyError) as refused:
        Strategy.of(member())
    assert refusal in str(refused.value)
    assert len(str(refused.value)) < 400


def test_objects_that_join_are_checked_where_they_are_made():
    for wrong in (
        lambda: dure.Mesh("gpipe", "tensor"),
        lambda: dure.Mesh(dure.GPipe(), None),
        lambda: dure.ErrorFeedback("1bit"),
        lambda: Momentum(Float16),
    ):
        with pytest.raises(ValueError, match="object"):
            wrong()


def test_a_strategy_is_made_of_objects_that_are_checked():
    with raising(StrategyError, "sync='bsp'"):
        Strategy("bsp", "ps")
    with raising(StrategyError, "foo"):
        Strategy(Downpour(server="foo"), ParameterServer())


def test_each_choice_of_each_member_is_checked():
    checked_choices = 0
    for axis in (*AXES, REMEDY, WRAPPER):
        for place in catalogue(axis).values():
            for parameter in parameters(load(place)):
                if get_origin(parameter.annotation) is Literal:
                    member = object.__new__(load(place))
                    for each in parameters(load(place)):
                        object.__setattr__(member, each.field, each.default)
                    object.__setattr__(member, parameter.field, "nothing")
                    with pytest.raises(StrategyError, match=f"{parameter.name} must be .* or .*, got 'nothing'"):
                        check_values(axis, member)
                    checked_choices += 1
    assert checked_choices > 20


def test_text_shows_the_first_parameter_and_what_differs():
    assert Strategy.parse("ssp ps:split=layer").text() == {
        "sync": "ssp:bound=3",
        "topology": "ps:shards=1,split=layer",
        "codec": "fp32",
        "partition": "none",
    }


def test_parameters_have_the_types_of_their_fields():
    assert make("ssp:bound=3") == SSP(bound=3.0)
    assert isinstance(make("ssp:bound=3").bound, float)
    assert make("ps:colocated=false,shards=2") == ParameterServer(shards=2, colocated=False)


def test_wrappers_are_parsed_in_order_and_exponents_are_no_wrappers():
    assert parse_members("downpour:local_lr=1e+5,n_push=2+dc-asgd:lambda=0.04+x") == (
        MemberSpec("downpour", {"local_lr": "1e+5", "n_push": "2"}),
        MemberSpec("dc-asgd", {"lambda": "0.04"}),
        MemberSpec("x", {}),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sspp", ["sspp", "bsp, one-shot, averaging", 'Did you mean "ssp"?']),
        ("ssp:bnd=3", ['no parameter "bnd"', "bound=3", 'Did you mean "bound"?']),
        ("bsp:bound=3", ["bsp", "it has none"]),
        ("ssp:bound=-1", ["bound counts clocks", "-1", "Use 0"]),
        ("ssp:bound=nan", [">= 0", "nan"]),
        ("ssp:bound=x", ["bound must be a number", '"x"']),
        ("averaging:period=2.5", ["period must be an integer", '"2.5"']),
        ("ps:split=mem", ["memory or layer or keys or hybrid", '"mem"']),
        ("ps:colocated=maybe", ["true or false", '"maybe"']),
        ("ps:shards=0", ["shards", "0"]),
        ("ps:bound=5000", ["split is memory", "Use split=hybrid"]),
        ("ps:split=hybrid,bound=0", ["bound counts elements", "0", "Use 1"]),
        ("ssp:bound", ['"bound"', "KEY=VALUE"]),
        ("ssp:", ["KEY=VALUE"]),
        (":bound=3", ["no name"]),
        ("ssp:bound=1,bound=2", ["bound twice"]),
        ("ssp bsp", ["sync twice", '"ssp"', '"bsp"']),
        ("ps+dc-asgd:lambda=1", ["dc-asgd", 'write "ps" alone']),
        ("bsp+dc-asgd", ["dc-asgd", "bsp has none", "no gradient that is older", '"downpour+dc-asgd"']),
        ("downpour+dc-asgd+dc-asgd", ["dc-asgd is joined twice to downpour"]),
        ("downpour+dc-asgd:lambda=0.1+dc-asgd:lambda=0.2", ["dc-asgd is joined twice to downpour"]),
        ("downpour+ssp", ['"ssp" is a sync, not a remedy', "momentum-compensation, dc-asgd, staleness-lr"]),
        ("dc-asgd ps", ['"dc-asgd" is a remedy', 'as in "downpour+dc-asgd"']),
        ("downpour+dc-asgd:lambda=-1", ["dc-asgd: lambda must be a number >= 0", "-1"]),
        ("downpour sign+momentum", ["sign+momentum is for votes, and downpour"]),
        ("averaging ternary+momentum", ["ternary+momentum is for votes, which say", "as averaging needs it"]),
        ("easgd ps sign:scaled=true+ef", ["sign+ef encodes gradients"]),
        ("downpour+dc-asgd:lambda_=1", ['no parameter "lambda_"', "lambda=0.04"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text, words):
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "sync", [name for name, place in catalogue("sync").items() if "collective" not in combines(load(place))]
)
def test_a_combination_that_makes_no_sense_names_one_that_works(sync):
    with pytest.raises(
        StrategyError, match=f"{sync} does not run over collective: .+ The nearest that works"
    ) as caught:
        Strategy.of(sync, "collective")
    nearest = str(caught.value).rsplit('"', 2)[1]
    assert Strategy.parse(nearest).sync == Strategy.of(sync).sync


@pytest.mark.parametrize(
    "refused",
    [
        *(f"{sync} {topology}" for sync in catalogue("sync") for topology in catalogue("topology")),
        "averaging:pace=time,weights=uniform collective",
        "averaging:pace=time,state=average ps",
        "averaging:weights=fisher ps",
        "bmuf:overlap=1 ps",
        "ssp ps sign",
        "bsp int8+momentum",
        "bsp fp32+ef",
        "averaging it-sign",
    ],
)
def test_what_is_said_to_work_instead_works(refused):
    try:
        Strategy.parse(refused)
    except StrategyError as error:
        nearest = str(error).split('The nearest that works is "')[1].split('"')[0]
        assert nearest != refused
        Strategy.parse(nearest)


def test_reasons_of_collectives_are_given_for_collectives():
    for topology, said in (("collective", True), ("gossip", False)):
        with raising(StrategyError, "different") as caught:
            Strategy.parse(f"ssp {topology}")
        assert ("a collective needs" in str(caught.value)) is said


PARAMETERS = {"strom": "strom:threshold=0.1", "sign+ef": "sign:scaled=true+ef"}
"""Of codecs that need some."""


def is_made(text: str, axis: str) -> bool:
    try:
        made = make(text, axis)
    except StrategyError:
        return False
    return made is not None


@pytest.mark.parametrize("wrapper", catalogue(WRAPPER))
@pytest.mark.parametrize("codec", catalogue("codec"))
def test_a_codec_and_what_joins_it_are_made_if_the_catalogue_says_so(codec, wrapper):
    """By whatever way a codec is given: a strategy, a hook, a probe, a cluster file."""
    listed = codec in combines(load(catalogue(WRAPPER)[wrapper]))
    text = PARAMETERS.get(f"{codec}+{wrapper}", f"{PARAMETERS.get(codec, codec)}+{wrapper}")
    assert is_made(text, "codec") == listed
    if listed:
        assert Strategy.parse(f"bsp {text}").codec == make(text)
        check_codec_name(f"{codec}+{wrapper}")
    else:
        for refused in (lambda: Strategy.parse(f"bsp {text}"), lambda: check_codec_name(f"{codec}+{wrapper}")):
            with pytest.raises(StrategyError):
                refused()
    for again in catalogue(WRAPPER):
        assert not is_made(f"{text}+{again}", "codec"), "codecs remember one thing"


def test_a_hook_takes_no_object_that_the_catalogue_has_not():
    with raising(StrategyError, "momentum"):
        dure.hook(Momentum(Float16()))


@pytest.mark.parametrize("remedy", catalogue(REMEDY))
@pytest.mark.parametrize("sync", catalogue("sync"))
def test_a_method_and_a_remedy_are_made_if_the_catalogue_says_so(sync, remedy):
    listed = sync in combines(load(catalogue(REMEDY)[remedy]))
    assert is_made(f"{sync}+{remedy}", "sync") == listed
    for other in catalogue(REMEDY):
        both = is_made(f"{sync}+{remedy}+{other}", "sync")
        assert both == (other != remedy and listed)


@pytest.mark.sampled(23)
@pytest.mark.parametrize("joined", [*catalogue(WRAPPER), *catalogue(REMEDY), *catalogue("codec"), *catalogue("sync")])
def test_nothing_else_is_joined(joined):
    """Wrappers join no method, remedies no codec, and nothing joins a topology, a partition or what is no wrapper."""
    wrapper, remedy = joined in catalogue(WRAPPER), joined in catalogue(REMEDY)
    axes = ("topology", "partition", *(() if remedy else ("sync",)), *(() if wrapper else ("codec",)))
    for axis in axes:
        for member in catalogue(axis):
            assert not is_made(f"{PARAMETERS.get(member, member)}+{joined}", axis)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("bsp int8+momentum", "momentum"),
        ("bsp fp32+ef", "ef"),
        ("ssp:form=rmw+dc-asgd", "parameters"),
    ],
)
def test_what_joins_is_what_the_catalogue_says(text, because):
    with raising(StrategyError, because):
        Strategy.parse(text)


def test_a_name_of_another_axis_is_pointed_out():
    with raising(StrategyError, "ps"):
        Strategy.of(sync="ps")


def test_a_method_from_elsewhere_goes_by_its_class():
    @dataclass(frozen=True)
    class Mine:
        rate: float = 2.0
        traits: ClassVar[dure.Traits] = dure.Traits(needs=("servers",))

    assert Strategy.of(Mine()).text()["sync"] == "Mine:rate=2"
    with raising(StrategyError, "collective"):
        Strategy.of(Mine(), "collective")


@dataclass(frozen=True)
class Alike:
    """A topology that no catalogue has."""

    offers: frozenset[str] = frozenset()
    deployed_as: type[dure.Topology] = dure.Topology


class Connecting(dure.Topology):
    """Connects workers in a way of its own."""

    def connect(self, worker, group): ...


@pytest.mark.parametrize("name", catalogue("topology"))
@pytest.mark.parametrize("sync", catalogue("sync"))
def test_a_new_topology_runs_with_the_methods_whose_needs_it_offers(sync, name):
    found = load(catalogue("topology")[name])
    topology = Alike(offers_of(found), topology_of(found))
    if name in combines(load(catalogue("sync")[sync])):
        assert Strategy.of(sync, topology).topology is topology
    else:
        with pytest.raises(StrategyError, match=f"{sync} does not run over Alike: "):
            Strategy.of(sync, topology)


def test_a_topology_that_offers_too_little_is_refused_with_what_it_offers():
    with pytest.raises(StrategyError) as caught:
        Strategy.of("bsp", Alike(frozenset({"tokens", "peers"}), Connecting))
    assert "bsp does not run over Alike: it needs mean gradient or servers, and that offers peers, tokens." in str(
        caught.value
    )


def test_a_method_whose_needs_no_topology_of_the_catalogue_offers_asks_for_one():
    @dataclass(frozen=True)
    class Passes:
        traits: ClassVar[dure.Traits] = dure.Traits(needs=("server",))

    for topology, words in (
        (None, "needs server, which no topology of dure offers. Name a topology of your own that offers it"),
        ("ps", "does not run over ps: it needs server, and that offers codec, coordinator, servers, stages. Name a "),
    ):
        with pytest.raises(StrategyError) as caught:
            Strategy.of(Passes(), topology)
        assert words in str(caught.value)
    assert str(Strategy.of(Passes(), Alike(frozenset({"server"}), Connecting))).startswith("Passes Alike")


def test_a_method_says_its_properties_in_sixteen_fields():
    assert len(fields(dure.Traits)) <= 16


@pytest.mark.parametrize("axis", AXES)
def test_every_member_loads_and_round_trips(axis):
    for name, place in catalogue(axis).items():
        made = load(place)()
        text = member_text(axis, made)
        assert text.partition(":")[0] == name
        assert by_axis(text) == {axis: text}
        assert make(text, axis) == made
        methods = catalogue("sync").items() if axis == "topology" else ()
        over = [sync for sync, place in methods if name in combines(load(place))]
        assert Strategy.of(**{"sync": (over or ["bsp"])[0], axis: text}).text()[axis] == text


def test_names_are_unique_across_the_axes():
    names = [name for axis in (*AXES, REMEDY) for name in catalogue(axis)]
    assert len(names) == len(set(names))


def test_methods_run_over_topologies_of_the_catalogue():
    for place in catalogue("sync").values():
        assert combines(load(place))
        assert set(combines(load(place))) <= set(catalogue("topology"))


OWN = """
from dataclasses import dataclass

from dure import Codec, Traits

@dataclass(frozen=True)
class Mine:
    period: int = 8
    traits = Traits(needs=("group",), lockstep=True, delivers="mean")

    async def work(self, worker): ...

@dataclass(frozen=True)
class Half:
    period: int = 8

@dataclass(frozen=True)
class Rounded(Codec):
    digits: int = 3

    def coder(self, layout, seed=0): ...

class Bare(Rounded): ...
"""


def test_a_method_of_a_file_goes_by_its_file_and_class(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    strategy = Strategy.parse(f"{file}:Mine:period=3")
    assert strategy.sync.period == 3
    assert strategy.text()["sync"] == f"{file}:Mine:period=3"
    assert Strategy.parse(str(strategy)) == strategy
    for text, words in (
        (f"{file}:Mine:perod=3", 'no parameter "perod"; its parameters are period=8. Did you mean "period"'),
        (f"{file}:Theirs", "has no class 'Theirs'"),
        (f"{file}:Half", "This lacks traits, work"),
        (f"{tmp_path}/none.py:Mine", "there is no file"),
        (f"{file}:Mine ps", "Mine does not run over ps: it runs over collective"),
        (f"{file}:Mine {file}:Mine", "chooses sync twice"),
    ):
        with pytest.raises(StrategyError) as caught:
            Strategy.parse(text)
        assert words in str(caught.value)


def test_a_codec_of_a_file_goes_by_its_file_and_class(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    strategy = Strategy.parse(f"bsp {file}:Rounded:digits=2+ef")
    assert strategy.codec.codec.digits == 2
    assert strategy.text()["codec"] == f"{file}:Rounded:digits=2+ef"
    assert Strategy.of(**strategy.text()) == strategy
    wrong = (("codec", "Mine", "sync"), ("sync", "Rounded", "codec"), ("topology", "Rounded", "codec"))
    for axis, name, right in wrong:
        with pytest.raises(StrategyError) as caught:
            Strategy.of(**{axis: f"{file}:{name}"})
        assert f'is a {right}, not a {axis}: write {right}="{file}:{name}"' in str(caught.value)


@dataclass(frozen=True)
class Local(Float16):
    """A codec that no file names."""


def test_an_object_that_processes_cannot_make_is_refused_before_any_starts():
    for axis, choice in (("codec", Local()), ("codec", Momentum(Local()))):
        with pytest.raises(UsageError, match=rf'{axis}=Local\(.*FILE\.py:Local.*on="virtual"'):
            dure.train("digits-mlp", sync="averaging", **{axis: choice}, workers=2, steps=2, on="local")


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3, int),
        (0.1, float),
        (1e-30, float),
        (1e300, float),
        (math.inf, float),
        (True, bool),
        (None, int | None),
        (4, int | None),
        ((0.9, 0.999), tuple[float, float]),
    ],
)
def test_values_come_back_from_their_text(value, annotation):
    back = parse_value(value_text(value), annotation)
    assert back == value
    assert type(back) is type(value)


TYPED = """
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import dure

if TYPE_CHECKING:
    from dure import Worker
    from fractions import Fraction

class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"

class Method:
    seen: Worker
    traits = dure.Traits(needs=("group",), lockstep=True, delivers="mean")

    async def work(self, worker: Worker) -> None:
        while True:
            worker.step(await worker.mean_gradient())

@dataclass(frozen=True)
class Typed(Method):
    mode: Mode = Mode.FAST
    file: Path = Path("x")
    pair: tuple[int, str] = (1, "a")
    sizes: tuple[int, ...] = field(default_factory=tuple)
    more: list[int] = field(default_factory=list)

@dataclass(frozen=True)
class Unknown(Method):
    share: Fraction = 1

@dataclass(frozen=True)
class Raising(Method):
    period: int = 1

    def __post_init__(self):
        if self.period > 1:
            raise KeyError("period")

def made():
    @dataclass(frozen=True)
    class Inner(Method):
        period: int = 1

    return Inner

Alias = made()
"""


def test_the_text_of_a_member_makes_values_of_its_types(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    text = f"{file}:Typed:mode=slow,file=/a,pair=2/b,sizes=3/4"
    made_ = make(text, "sync")
    assert (made_.mode.name, made_.file, made_.pair, made_.sizes) == ("SLOW", Path("/a"), (2, "b"), (3, 4))
    assert make(member_text("sync", made_), "sync") == made_
    assert make(f"{file}:Typed", "sync").sizes == ()
    for wrong, word in (
        (f"{file}:Typed:more=1/2", "more"),
        (f"{file}:Typed:mode=medium", "medium"),
        (f"{file}:Unknown", "Fraction"),
        (f"{file}:Raising:period=2", "KeyError"),
    ):
        with raising(StrategyError, word):
            make(wrong, "sync")


def test_a_class_under_another_name_goes_by_the_name_that_loads_it(tmp_path):
    file = tmp_path / "named.py"
    file.write_text(TYPED)
    strategy = Strategy.of(f"{file}:Alias:period=3")
    assert strategy.text()["sync"] == f"{file}:Alias:period=3"
    assert Strategy.parse(str(strategy)) == strategy


def test_an_object_that_its_text_does_not_make_again_is_not_handed_to_processes():
    for name, member in (("graph", dure.Gossip(graph="ring,degree=3")), ("servers", dure.Hybrid(servers=("a/b",)))):
        with raising(UsageError, name):
            check_named({"topology": member})
    check_named({"sync": SSP(bound=np.float32(0.1)), "topology": dure.Hybrid(servers=("a", "b"))})
