"""The stub `src/dure/__init__.pyi`: the public names of dure, for type checkers and editors.

At run time `dure.__getattr__` finds a name by the catalogues, which type checkers cannot read. `make format` runs this
file, which writes the stub anew; a test compares.
"""

from __future__ import annotations

from pathlib import Path

import dure

STUB = Path(__file__).parents[2] / "src" / "dure" / "__init__.pyi"


def stub() -> str:
    """The text of the stub."""
    places = sorted((module, name) for name, module in dure._HOMES.items())
    return "\n".join(
        [
            "# Written by `make format` from the catalogues: do not edit.",
            "from dure import codec as codec",
            "from dure import partition as partition",
            "from dure import sync as sync",
            "from dure import topology as topology",
            *(f"from {module} import {name} as {name}" for module, name in places),
            "",
            "__version__: str",
            "",
        ]
    )


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
