"""The jobs of this package: small models that need no download, with settings that measurements have shown to learn.

    | file         | contents                                                                       |
    |--------------|--------------------------------------------------------------------------------|
    | mlp.py       | `mlp`, `mlp_maker`, `deep_mlp_maker`: dense layers with ReLU; `top1`: share of right labels; |
    |              | `digits_mlp`: the job `digits-mlp`; `digits_job`: a job of another model on the digits |
    | char_gpt.py  | `char_gpt`: the job `char-gpt`, a decoder on any text file                     |
    | local.py     | `LocallyConnected2d`: a layer whose units a partition can assign               |
    | quadratic.py | `quadratic`: the job `quadratic`, whose optimum is known exactly               |

A job function's parameters are settings of the job (`load_job("digits-mlp", hidden=64)`). The distribution `dure-jobs`
has more jobs.
"""

from dure.job.models.char_gpt import char_gpt
from dure.job.models.local import LocallyConnected2d
from dure.job.models.mlp import deep_mlp_maker, digits_mlp, mlp, mlp_maker, top1
from dure.job.models.quadratic import quadratic

__all__ = [
    "LocallyConnected2d",
    "char_gpt",
    "deep_mlp_maker",
    "digits_mlp",
    "mlp",
    "mlp_maker",
    "quadratic",
    "top1",
]
