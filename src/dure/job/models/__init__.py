"""The built-in jobs: small models, with settings that measurements have shown to learn.

    | file         | contents                                                                       |
    |--------------|--------------------------------------------------------------------------------|
    | mlp.py       | `mlp`, `mlp_maker`, `deep_mlp_maker`: dense layers with ReLU; `top1`: share of right labels |
    | digits.py    | `digits_mlp`: the job `digits-mlp`                                             |
    | local.py     | `LocallyConnected2d`; `digits_local`: the job `digits-local`                   |
    | mnist.py     | `mnist_mlp`, `mnist_cnn`: the jobs `mnist-mlp`, `mnist-cnn`                    |
    | cifar10.py   | `cifar10_cnn`: the job `cifar10-cnn`, which has buffers (batch norm)           |
    | text.py      | `embedding_text`: the job `embedding-text`, which has sparse gradients         |
    | char_gpt.py  | `char_gpt`: the job `char-gpt`, a decoder on any text file                     |
    | vgg16.py     | `vgg16`: the job `vgg16`; `vgg16_shapes`: the same without values              |
    | he_values.py | `with_he_values`: initial values of deep networks with ReLU                    |
    | quadratic.py | `quadratic`: the job `quadratic`, whose optimum is known exactly               |
    | softmax.py   | `softmax_regression`: the job `softmax-regression`, convex with a finite optimum |

A job function's parameters are settings of the job (`load_job("mnist-mlp", hidden=64)`).
"""

from dure.job.models.char_gpt import char_gpt
from dure.job.models.cifar10 import cifar10_cnn
from dure.job.models.digits import digits_mlp
from dure.job.models.local import LocallyConnected2d, digits_local
from dure.job.models.mlp import deep_mlp_maker, mlp, mlp_maker, top1
from dure.job.models.mnist import mnist_cnn, mnist_mlp
from dure.job.models.quadratic import quadratic
from dure.job.models.softmax import softmax_regression
from dure.job.models.text import embedding_text
from dure.job.models.vgg16 import vgg16

__all__ = [
    "LocallyConnected2d",
    "char_gpt",
    "cifar10_cnn",
    "deep_mlp_maker",
    "digits_local",
    "digits_mlp",
    "embedding_text",
    "mlp",
    "mlp_maker",
    "mnist_cnn",
    "mnist_mlp",
    "quadratic",
    "softmax_regression",
    "top1",
    "vgg16",
]
