"""Your own training loop in the workers of Ray Train: dure uses the process group that Ray has made.

pip install 'dure[ray]' 'ray[train]'
python examples/ray_train.py
"""

import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train() -> dict[str, str]:
    """The training of each worker, which Ray sends to it. Returns what was learned under each method."""
    import dure
    from dure.job.data import load_digits

    found = {}
    digits = load_digits()
    data = TensorDataset(digits.train.inputs, digits.train.targets)
    for sync in ("bsp", "ssp:bound=3"):
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dure.attach(model, optimizer, sync=sync) as replica:
            loader = DataLoader(data, batch_size=32, sampler=replica.sampler(data))
            for _ in range(6):
                for inputs, targets in loader:
                    cross_entropy(model(inputs), targets).backward()
                    replica.step()  # in place of optimizer.step() and zero_grad()
        right = (model(digits.test.inputs).argmax(dim=1) == digits.test.targets).double().mean()
        found[sync] = f"{replica.world_size} workers {'learned' if right > 0.9 else f'only {right:.0%} right'}"
    return found


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
        result = TorchTrainer(train, scaling_config=scaling, run_config=run).fit()
    for sync, learned in result.return_value.items():
        print(f"{sync:20}{learned}")
