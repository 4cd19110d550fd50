import pytest
from accelerator import target


@pytest.fixture(scope="session")
def device():
    """The type of the device under test; without one, tests that ask for it are skipped."""
    if reason := target.absent():
        pytest.skip(reason)
    return target.device_type()
