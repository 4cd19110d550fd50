"""Jobs that no command can use."""

import sys

import torch

from dure import Data, Job

INPUTS, TARGETS = torch.ones(8, 3), torch.ones(8, 1)


def made(**changes):
    given = {
        "model": lambda: torch.nn.Linear(3, 1),
        "loss": lambda outputs, targets: (outputs - targets).square().mean(),
        "train": Data(INPUTS, TARGETS),
    }
    return Job(**given | changes)


def raises():
    raise ValueError("wrong")


def exits():
    sys.exit(0)


def mute():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("mute")

    raise Mute


def wordy():
    raise ValueError("\x1b[31m" + "x" * 3_000_000)


def nothing():
    return None


def module():
    return torch.nn.Linear(3, 1)


def needs(value):
    return made()


def rows(count: int = 8):
    return made(train=Data(torch.ones(count, 3), torch.ones(count, 1)))


def columns(count: int = 1):
    return made(model=lambda: torch.nn.Linear(3, count))


def no_parameters():
    return made(model=torch.nn.ReLU)


def frozen():
    return made(model=lambda: torch.nn.Linear(3, 1).requires_grad_(False))


def model_raises():
    return made(model=lambda: [][0])


def model_exits():
    return made(model=lambda: sys.exit(0))


def no_model():
    return made(model=lambda: None)


def other_width():
    return made(model=lambda: torch.nn.Linear(5, 1))


def empty():
    return made(train=Data(INPUTS[:0], TARGETS[:0]))


def other_length():
    return made(train=Data(INPUTS, TARGETS[:5]))


def no_batch():
    return made(batch_size=0)


def vector_loss():
    return made(loss=lambda outputs, targets: outputs - targets)


def no_loss():
    return made(loss=lambda outputs, targets: None)


def loss_raises():
    return made(loss=lambda outputs, targets: [][0])


def without_gradient():
    return made(loss=lambda outputs, targets: outputs.detach().mean())


def accuracy_raises():
    return made(accuracy=lambda outputs, targets: [][0])


def wrong_accuracy():
    return made(accuracy=lambda outputs, targets: 7.0)


def data_raises():
    class Gone:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise OSError("the disk is gone")

    return made(train=Gone())


def later():
    calls = iter(range(6))

    def loss(outputs, targets):
        if next(calls, None) is None:
            raise ValueError("x" * 3_000_000)
        return (outputs - targets).square().mean()

    return made(loss=loss)
