import pytest
from accelerator import target

# The search for doctests would import them, and the import registers the stand-in.
collect_ignore_glob = ["*_programs.py", "*_jobs.py"]


@pytest.fixture(scope="session")
def device():
    """The type of the device under test; without one, tests that ask for it are skipped."""
    if reason := target.absent():
        pytest.skip(reason)
    return target.device_type()


def pytest_collection_modifyitems(items):
    """The stand-in is a product of its own, and takes a minute to build."""
    for item in items:
        if "/tests/accelerator/" in item.path.as_posix():
            item.add_marker(pytest.mark.long)
