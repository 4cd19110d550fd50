"""The search for doctests imports every module. Those of a framework that is not installed are left out."""

from importlib.util import find_spec

FRAMEWORKS = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "ray_train": "ray"}

collect_ignore = [
    f"src/dure/integrations/{module}.py" for module, package in FRAMEWORKS.items() if find_spec(package) is None
]
