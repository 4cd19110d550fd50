"""The stub `src/dure/__init__.pyi`: the public names of dure, for type checkers and editors.

At run time `dure.__getattr__` finds a name by the catalogues, which type checkers cannot read. `train`, `compare` and
`plan` take the options of a configuration by name: the stub writes each with its type, so that a checker refuses a
wrong one. `make format` runs this file, which writes the stub anew; a test compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import dure
from dure.planner.options import PlanOptions
from dure.run.config import CompareConfig, TrainConfig, WorkerRange
from dure.run.strategy import AXES

STUB = Path(__file__).parents[2] / "src" / "dure" / "__init__.pyi"

JOB = "job: str | Job"
PLACE = "str | Path | Cluster"
WITH_OPTIONS = {
    "compare": (CompareConfig, [JOB, "*strategies: str"], {"on": f"{PLACE} | Sequence[str | Path]"}, "Comparison"),
    "plan": (PlanOptions, [JOB, "*"], {"on": PLACE}, "Ranking"),
    "train": (
        TrainConfig,
        [JOB, "*"],
        {"on": PLACE, "within": "float"} | dict.fromkeys(AXES, "Any"),
        "Run",
    ),
}
"""The functions with options: their configuration, first parameters, types that differ from it, and result."""

RESULTS = {"Run": "dure.report.run", "Comparison": "dure.run.compare"}
"""The homes of results that are no public names."""


def written(kind: Any) -> set[str]:
    """The types of values that an option of the type `kind` accepts, as they are written."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return written(parts[0])
    if origin in (Union, UnionType):
        return {text for part in parts for text in written(part)}
    if origin is tuple:
        element = " | ".join(sorted(written(parts[0])))
        return {f"Sequence[{element}]"}
    if origin is Literal:
        return {"Literal[" + ", ".join(f'"{value}"' for value in parts) + "]"}
    return {Path: {"str", "Path"}, NoneType: {"None"}, WorkerRange: {"str"}}.get(kind) or {kind.__name__}


def signature(name: str) -> list[str]:
    """The lines that declare a function with its options."""
    config, first, others, result = WITH_OPTIONS[name]
    kinds: Mapping[str, str] = {
        option: " | ".join(sorted(written(kind), key=lambda text: (text == "None", text)))
        for option, kind in config.types().items()
        if option not in ("job", "strategies")  # which the first parameters are
    }
    options = [f"{option}: {kind} = ...," for option, kind in {**kinds, **others}.items()]
    about = inspect.getdoc(getattr(dure, name)).replace("\n", "\n    ").replace("\n    \n", "\n\n")
    lines = [f"def {name}(", *(f"    {each}," for each in first), *(f"    {each}" for each in options)]
    return [*lines, f") -> {result}:", f'    """{about}', '    """', ""]


def stub() -> str:
    """The text of the stub."""
    homes = {name: module for name, module in dure._HOMES.items() if name not in WITH_OPTIONS} | RESULTS
    places = sorted((module, name) for name, module in homes.items())
    return "\n".join(
        [
            "# Written by `make format` from the catalogues and the options: do not edit.",
            "from collections.abc import Sequence",
            "from pathlib import Path",
            "from typing import Any, Literal",
            "",
            "from dure import codec as codec",
            "from dure import partition as partition",
            "from dure import sync as sync",
            "from dure import topology as topology",
            *(f"from {module} import {name}" + f" as {name}" * (name in dure._HOMES) for module, name in places),
            "",
            "__version__: str",
            "",
            *(line for name in WITH_OPTIONS for line in signature(name)),
        ]
    )


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
