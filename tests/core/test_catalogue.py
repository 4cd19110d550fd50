"""What the class of every member says of it, and that it is true."""

import math
import re
from typing import get_args

import pytest
from support.wording import raising

from dure.codec.sign import Sign
from dure.core.catalogue import combines, load, name_of, paper, parameter, summary
from dure.core.spec_text import parameters
from dure.run.strategy import AXES, JOINS, catalogue

MEMBERS = {name: load(place) for axis in (*AXES, *JOINS) for name, place in catalogue(axis).items()}

PARAMETERS = [(name, each) for name, kind in MEMBERS.items() for each in parameters(kind)]

UNITS = {
    *("steps", "clocks", "rounds", "passes", "iterations"),
    *("workers", "servers", "samples", "mini-batches", "portions", "pairs", "elements", "parts", "ranges"),
    *("fraction", "loss", "as encoded"),
}
"""One word for each unit; a parameter without one is a pure number, or no number."""

BESIDE = {
    ("collective", "per_host"): {"algorithm": "hierarchical"},
    ("ps", "bound"): {"split": "hybrid"},
    ("momentum", "beta"): {"codec": Sign()},
}
"""Other parameters that one needs."""

HOLDS = {
    ">": lambda value, bound: value > bound,
    ">=": lambda value, bound: value >= bound,
    "<": lambda value, bound: value < bound,
    "<=": lambda value, bound: value <= bound,
}


def is_number(found):
    return bool({int, float} & {found.annotation, *get_args(found.annotation)})


def is_whole(found):
    return int in (found.annotation, *get_args(found.annotation))


def made(name, found, value):
    return MEMBERS[name](**{**BESIDE.get((name, found.field), {}), found.field: value})


def comparisons(name, found):
    """The comparisons of a range: operators and numbers, where another parameter stands for its default."""
    others = {other.name: other.default for other in parameters(MEMBERS[name])}
    for each in found.range.split(", "):
        operator, _, bound = each.partition(" ")
        yield operator, float(others.get(bound, bound))


def ids(value):
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_has_a_summary_and_a_paper(name):
    first = MEMBERS[name].__doc__.splitlines()[0]
    assert first.endswith(".")
    assert summary(MEMBERS[name]) == first[:-1]
    assert re.search(r"\b(19|20)\d\d\b", paper(MEMBERS[name]))


@pytest.mark.parametrize(("name", "found"), PARAMETERS, ids=ids)
def test_every_parameter_has_a_meaning_and_every_number_a_range(name, found):
    assert found.meaning
    assert not found.meaning.endswith(".")
    assert bool(found.range) == is_number(found)
    assert found.unit == "" or (found.unit in UNITS and is_number(found))


@pytest.mark.parametrize(("name", "found"), [each for each in PARAMETERS if each[1].range], ids=ids)
def test_a_class_takes_what_is_in_the_range_and_refuses_the_rest(name, found):
    ranges = list(comparisons(name, found))
    for _, bound in ranges:
        step = 1 if is_whole(found) else 1e-9
        for value in (bound - step, bound, bound + step):
            if is_whole(found) and math.isinf(value):
                continue
            value = int(value) if is_whole(found) else value
            if all(HOLDS[operator](value, limit) for operator, limit in ranges):
                assert getattr(made(name, found, value), found.field) == value
            else:
                with pytest.raises(ValueError, match=found.name):
                    made(name, found, value)
    if not is_whole(found):
        with pytest.raises(ValueError, match=found.name):
            made(name, found, math.nan)


def test_a_member_of_nobody_s_catalogue_needs_no_description():
    class Own:
        """Mine.

        At length.
        """

        period = 3

    assert (summary(Own), paper(Own), combines(Own)) == ("Mine", "", ())
    assert name_of(Own, catalogue("sync")) == "Own"


def test_a_parameter_needs_a_meaning():
    with raising(TypeError, "meaning"):
        parameter(1)
