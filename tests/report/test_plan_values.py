import math

import pytest

from dure.report import plan_values as values
from dure.report.comparison import NOTHING


def row(strategy, rank, **given):
    return {"strategy": strategy, "rank": rank, "samples_per_second": 100.0 / rank, "seconds_per_step": 0.1, **given}


def test_rows_are_in_the_order_of_their_ranks_with_a_meter_of_the_most():
    found = values.rows({"rows": [row("b", 2), row("a", 1)]})
    assert [(each.strategy, each.meter) for each in found] == [("a", 100), ("b", 50)]


def test_a_row_shows_a_dash_for_what_it_does_not_know():
    (found,) = values.rows({"rows": [{"rank": 1, "strategy": "a", "samples_per_second": math.nan}]})
    assert {found.speed, found.step, found.target, found.memory, found.share, found.cost, found.sent} == {NOTHING}
    assert found.fits


def test_memory_above_the_limit_does_not_fit():
    (found,) = values.rows({"rows": [row("a", 1, memory={"weights": 60, "gradient": 60}, memory_limit=100)]})
    assert (found.memory, found.share, found.fits) == ("120 B", "120 %", False)


def test_the_best_row_is_that_of_the_answer():
    rows = values.rows({"rows": [row("a", 1, command="x"), row("b", 2, command="y"), row("b", 3, command="z")]})
    assert values.best({}, rows) is rows[0]
    assert values.best({"answer": {"strategy": "b"}}, rows) is rows[1]
    assert values.best({"answer": {"strategy": "b", "command": "z"}}, rows) is rows[2]
    assert values.best({}, []) is None


def test_machines_of_servers_are_named():
    found = values.rows({"rows": [row("a", 1, servers=2), row("b", 2, servers=1), row("c", 3, servers=0)]})
    assert [each.servers for each in found] == ["+2 machines", "+1 machine", ""]


@pytest.mark.parametrize(
    ("value", "text"), [(None, NOTHING), (0.01234, "0.0123"), (1, "1.00"), (99.96, "100"), (12345.6, "12,346")]
)
def test_digits(value, text):
    assert values.digits(value) == text
