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
