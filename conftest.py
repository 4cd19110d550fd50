"""The search for doctests imports every module. Those of a framework that is not installed are left out."""

from importlib.util import find_spec

NEEDED = {
    "lightning": ("lightning",),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "ray_train": ("ray", "pandas"),
}

collect_ignore = [
    f"src/dure/integrations/{module}.py" for module, packages in NEEDED.items() if None in map(find_spec, packages)
]
