"""What the engine says of a lost rank, in our words. What it does is tried by everything over collectives."""

import pytest
import torch
from support.raw_caller import CREDENTIALS
from support.wording import raising

from dure.runtime.process.group import EngineOperation, lost_rank
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity

WHERE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
CLOSED = "Connection closed by peer [127.0.0.1]:55954"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"{WHERE}{CLOSED}. This is often caused by a peer that has failed.", CLOSED),
        (f"{WHERE}{CLOSED}.\nException raised from here:\nframe #0", CLOSED),
        (
            f"{WHERE}Read error [127.0.0.1]:1: Connection reset by peer",
            "Read error [127.0.0.1]:1: Connection reset by peer",
        ),
        (f"{'a' * 200} is where this was. Look there.", f"{'a' * 200} is where this was"),
        ("[127.0.0.1]:55954 timed out.", "[127.0.0.1]:55954 timed out"),
    ],
)
def test_of_what_the_engine_says_the_first_sentence_is_told(said, told):
    message = str(lost_rank("worker 1", "the others' all_reduce", RuntimeError(said)))
    assert message == (
        f"worker 1 waited for the others' all_reduce, and a rank is gone ({told}). A collective needs every rank. Use "
        "a method over a parameter server (ps), or resume from the last checkpoint."
    )


class FailingWork:
    """An operation on a device that has failed before."""

    def is_completed(self):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_an_error_of_the_device_is_not_taken_for_a_lost_rank():
    node = ProcessNode(Identity("job", "worker 0", 0), CREDENTIALS)
    operation = EngineOperation(node, "the others' all_reduce", [FailingWork()], lambda: None, in_loop=True)

    async def wait():
        await operation

    with raising(torch.AcceleratorError, "device-side"):
        node.loop.run_until(node.spawn(wait()))
    node.wire.close()
