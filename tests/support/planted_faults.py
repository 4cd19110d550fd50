"""Plant faults and see whether the tests find them: `planted_faults.py draw|try`.

`draw` prints as many faults as asked, drawn by a seed from all packages in proportion to their lines: a comparison, an
operator or a condition turned round, a number raised by one, a call left out. Faults that change nothing that a user
could see were taken out by hand, and the next ones drawn. `planted_faults.toml` keeps those of seed 40.

`try` copies the tree, plants one fault, and runs the tests until one fails: those of the fault's package first, then
all others. Without `--all` these are the tests of `make test`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".toml")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "/", ast.Mod: "//", ast.And: "or", ast.Or: "and",
}  # fmt: skip
SUITE = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-W", "ignore"]


@dataclass(frozen=True)
class Fault:
    """A line of a function, and what stands there instead."""

    file: str
    function: str
    before: str
    after: str

    def plant(self, root: Path) -> None:
        """Change the file below `root`. Raises `ValueError` unless the line stands there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        first, last = _lines(ast.parse(text), self.function)
        lines = text.splitlines(keepends=True)
        found = [number for number in range(first, last) if lines[number].strip() == self.before]
        if len(found) != 1:
            raise ValueError(f"{self.file}: {self.function} has {len(found)} lines {self.before!r}; a fault needs one.")
        line = lines[found[0]]
        lines[found[0]] = line.replace(self.before, self.after)
        path.write_text("".join(lines), encoding="utf-8")


def _named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
            yield from _named(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _named(node, f"{prefix}{node.name}.")


def _lines(tree: ast.Module, function: str) -> tuple[int, int]:
    """The first line of a function, from 0, and the one behind its last. Raises `ValueError` if there is none."""
    for name, node in _named(tree):
        if name == function:
            return node.lineno - 1, node.end_lineno or node.lineno
    raise ValueError(f"no function is called {function}.")


def _changes(text: str, function: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, line as it is and line with a fault, for each fault of a function."""
    lines = text.splitlines()
    skipped: set[ast.AST] = set()
    for node in ast.walk(function):
        if node is not function and isinstance(node, (*FUNCTIONS, ast.Raise, ast.JoinedStr, ast.ClassDef, ast.Assert)):
            skipped |= set(ast.walk(node))
    for node in ast.walk(function):
        if node in skipped or not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        for begin, end, new in _replacements(line, node):
            yield node.lineno, line.strip(), (line[:begin] + new + line[end:]).strip()


def _replacements(line: str, node: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Where a node's text changes, and to what."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in TURNED:
            yield from _between(line, left, right, TURNED[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in TURNED:
            yield from _between(line, left, right, TURNED[type(op)])
        case ast.BoolOp(op=op, values=[left, right]):
            yield from _between(line, left, right, TURNED[type(op)])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.col_offset, operand.col_offset, ""
        case ast.If(test=test) if test.lineno == test.end_lineno:
            yield test.col_offset, test.end_col_offset, f"not ({line[test.col_offset : test.end_col_offset]})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield node.col_offset, node.end_col_offset, str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node.col_offset, node.end_col_offset, "pass"


def _between(line: str, left: ast.expr, right: ast.expr, operator: str) -> Iterator[tuple[int, int, str]]:
    """The place of an operator, unless a parenthesis stands beside it, which belongs to an operand."""
    begin, end = left.end_col_offset or 0, right.col_offset
    if not set("()") & set(line[begin:end]):
        yield begin, end, f" {operator} "


def candidates(package: Path) -> list[Fault]:
    """Every fault of a package whose line stands once in its function."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name, node in _named(ast.parse(text)):
            own = [line.strip() for line in text.splitlines()[node.lineno - 1 : node.end_lineno]]
            for _, before, after in _changes(text, node):
                if own.count(before) == 1 and before != after:
                    found.append(Fault(str(path.relative_to(ROOT)), name, before, after))
    return found


def draw(count: int, seed: int, without: Sequence[str]) -> list[Fault]:
    """Faults from all packages of the library, more from those with more places for one; none in files `without`."""
    packages = sorted(
        path for path in (ROOT / "src" / "dure").iterdir() if path.is_dir() and path.name != "__pycache__"
    )
    found = {
        package: [fault for fault in candidates(package) if not fault.file.startswith(tuple(without))]
        for package in packages
    }
    rng = random.Random(seed)
    drawn = [rng.choice(faults) for faults in found.values() if faults]
    rest = [fault for faults in found.values() for fault in faults]
    while len(drawn) < count:
        fault = rng.choice(rest)
        if fault not in drawn:
            drawn.append(fault)
    return drawn[:count]


def kept() -> list[Fault]:
    """The faults of the table."""
    return [Fault(**each) for each in tomllib.loads(TABLE.read_text(encoding="utf-8"))["faults"]]


def _toml(fault: Fault) -> str:
    fields = "".join(f"{name} = {_quoted(value)}\n" for name, value in vars(fault).items())
    return f"[[faults]]\n{fields}"


def _quoted(value: str) -> str:
    return f"'{value}'" if "'" not in value else f"'''{value}'''"


def _copy(place: Path) -> Path:
    """A copy of what the tests need, which uses this checkout's environment."""
    tree = place / "tree"
    left_out = shutil.ignore_patterns(
        ".venv", ".git", "runs", "*.egg-info", ".mypy_cache", ".ruff_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def _stages(tree: Path, fault: Fault) -> Iterator[list[str]]:
    """Tests in the order in which they are tried: of the module, of the package, all."""
    inside = Path(fault.file).parts[2:]
    named = sorted((tree / "tests").rglob(f"test_{Path(fault.file).stem}*.py"))
    if named:
        yield [str(path.relative_to(tree)) for path in named]
    if (tree / "tests" / inside[0]).is_dir():
        yield [f"tests/{inside[0]}"]
    yield []


def found_by(fault: Fault, *, every: bool, processes: int) -> str:
    """The test that fails with the fault, or nothing."""
    excluded = "not soak" if every else "not soak and not long"
    with tempfile.TemporaryDirectory() as place:
        tree = _copy(Path(place))
        fault.plant(tree)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "src")}
        for stage in _stages(tree, fault):
            spread = ["-n", str(processes), "--dist", "loadgroup"] if processes and not stage else []
            done = subprocess.run(
                [ROOT / ".venv/bin/python", "-m", "pytest", *SUITE, "-m", excluded, *spread, *stage],
                cwd=tree, env=environment, capture_output=True, text=True, start_new_session=True,
            )  # fmt: skip
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if done.returncode not in (0, 5):
                return failed[0] if failed else f"status {done.returncode}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=40)
    drawing.add_argument("--seed", type=int, default=40)
    drawing.add_argument("--without", nargs="*", default=[], help="beginnings of paths in which nothing is drawn")
    trying = commands.add_parser("try")
    trying.add_argument("numbers", type=int, nargs="*", help="lines of the table from 1; all if none is given")
    trying.add_argument("--all", action="store_true", help="the tests of `make all`")
    trying.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.command == "draw":
        print("\n".join(map(_toml, draw(given.count, given.seed, given.without))))
        return 0
    faults = kept()
    missed = 0
    for number in given.numbers or range(1, len(faults) + 1):
        fault, began = faults[number - 1], time.monotonic()
        found = found_by(fault, every=given.all, processes=given.processes)
        missed += not found
        print(
            f"{number:2} {fault.file} {fault.function}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    print(f"{missed} not found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
