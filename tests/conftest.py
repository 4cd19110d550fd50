"""A full run says how much it ran, and fails if that is less than it ought to be: a check must prove that it ran."""

import hashlib
from collections import defaultdict

import pytest
from support import wording

from dure.runtime.launch.fork_server import ForkServer

FLOORS = {"tests": 1500, "doctests": 20, "documents": 20}
RAN = dict.fromkeys(FLOORS, 0)


def pytest_addoption(parser):
    parser.addoption("--write-wording", action="store_true", help="write the texts of errors to tests/wording.json")


def pytest_configure(config):
    wording.writes = config.option.write_wording
    if wording.writes and hasattr(config, "workerinput"):
        raise pytest.UsageError("--write-wording needs one process: leave -n out.")


def kind(item):
    if isinstance(item, pytest.DoctestItem):
        return "doctests"
    return "documents" if item.path.name == "test_docs.py" else "tests"


LONGEST_NAME = 200
"""Most characters or bytes of a parameter that are part of a test's name."""


def pytest_make_parametrize_id(val):
    if isinstance(val, str | bytes) and len(val) > LONGEST_NAME:
        content = val if isinstance(val, bytes) else val.encode(errors="surrogatepass")
        return f"{len(val)} of {hashlib.sha256(content).hexdigest()[:8]}"
    return None


SHARED = ("ranks", "raised_by", "pair", "three", "raced")
"""Fixtures that take many seconds: the tests that use one of them run in one process."""


@pytest.fixture(scope="session")
def fork_server():
    """One for all real runs of a test process that ask for it: its start, which imports torch, takes seconds."""
    with ForkServer() as one:
        yield one


def sample(items):
    """Leave the cases of a test that is marked `sampled(count)` to `make all`, but for `count`, spread evenly."""
    cases = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not (item.get_closest_marker("soak") or item.get_closest_marker("long")):
            cases[item.path, item.originalname, mark.args[0]].append(item)
    for (_, _, count), of_test in cases.items():
        kept = {round(number * (len(of_test) - 1) / max(count - 1, 1)) for number in range(count)}
        for number, item in enumerate(of_test):
            if number not in kept:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist writes the groups into the names of tests
def pytest_collection_modifyitems(items):
    sample(items)
    for item in items:
        for name in SHARED:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_finish(session):
    for item in session.items:
        RAN[kind(item)] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """One of several test processes has ended; each has collected everything, whoever ran it."""
    RAN.update(getattr(node, "workeroutput", {}).get("ran", {}))


def whole(config):
    """Whether everything was asked for, as `make test` does, those apart that run alone."""
    parts = set(config.option.markexpr.split(" and ")) - {""}
    every = parts <= {"not alone", "not soak", "not long"} and not config.option.keyword
    return every and config.args == config.getini("testpaths")


def pytest_sessionfinish(session, exitstatus):
    if wording.writes:
        wording.save()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ran"] = RAN
    elif whole(session.config) and exitstatus == 0 and any(RAN[name] < floor for name, floor in FLOORS.items()):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    ran = ", ".join(f"{count} {name}" for name, count in RAN.items())
    terminalreporter.write_line(f"collected {ran}")
    if whole(config):
        for name, floor in FLOORS.items():
            if RAN[name] < floor:
                terminalreporter.write_line(f"only {RAN[name]} {name}; there ought to be {floor} or more", red=True)
