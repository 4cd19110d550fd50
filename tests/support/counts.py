"""Count what a reader of the package meets: `counts.py [CHECKOUT] [--json]`.

Lines, modules, modules with one importer, comments and functions come from the source. The paths come from two runs
under a profiler: one push and pull of SSP at a worker that is a process, and the option `--lr` from the command line
to the first step in virtual time. A path counts calls of the package's own functions, resumed coroutines included and
imports left out. Its modules and its depth include the functions that are running where it begins.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "dure"
LONG = 40
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_name(path: Path, root: Path) -> str:
    """`dure.core.node` of the file src/dure/core/node.py."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of the package that a module names in imports, at any depth, those for type checkers included."""
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            named |= inner or {node.module}
    return named & modules


def lines_of(text: str, tree: ast.Module) -> Counter[str]:
    """Lines of a module by kind: code, docstrings, comments alone on their line or behind code, blank."""
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in node.body:
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and isinstance(part.value.value, str)
                ):
                    docs |= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    ignored = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in ignored:
            code |= set(range(token.start[0], token.end[0] + 1))
    total = len(text.splitlines())
    code -= docs
    return Counter(lines=total, code=len(code), docstrings=len(docs), comments=len(comments))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    described = ast.get_docstring(function) is not None
    return (function.end_lineno or 0) - function.lineno + 1 - described * ((first.end_lineno or 0) - first.lineno + 1)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from own_nodes(node)


def complexity(function: ast.AST) -> int:
    """McCabe's number: one more than the branches of a function."""
    own = list(own_nodes(function))
    operands = sum(len(node.values) - 1 for node in own if isinstance(node, ast.BoolOp))
    return 1 + operands + sum(isinstance(node, BRANCHES) for node in own)


def source_counts(root: Path) -> dict[str, float]:
    """Figures of all modules below `root`/dure."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    texts = {module_name(path, root): path.read_text(encoding="utf-8") for path in paths}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    kinds = sum((lines_of(texts[name], tree) for name, tree in trees.items()), Counter[str]())
    importers = Counter(each for name, tree in trees.items() for each in imported(tree, set(texts)) - {name})
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    lengths = [code_lines(node) for node in functions]
    return {
        **kinds,
        "modules": len(paths),
        "median_module_lines": statistics.median(len(text.splitlines()) for text in texts.values()),
        "modules_with_one_importer": sum(importers[name] == 1 for name in texts),
        "comments_per_100_code_lines": round(100 * kinds["comments"] / kinds["code"], 2),
        "functions": len(functions),
        f"functions_over_{LONG}_lines": sum(length > LONG for length in lengths),
        "mean_complexity": round(statistics.fmean(map(complexity, functions)), 2),
    }


PROFILE = '''
import json, sys
from pathlib import Path
import dure

PACKAGE = str(Path(dure.__file__).parent)


class Trace:
    """Counts calls into the package from `start` to `stop`, or to the call of a function named `until`."""

    def __init__(self, out, until=None):
        self.out, self.until = out, until
        self.calls, self.hops, self.deepest, self.imports, self.done = 0, 0, 0, 0, False
        self.modules, self.functions, self.stack = set(), set(), []

    def start(self):
        frame = sys._getframe(1)
        while frame:
            if self.counts(frame.f_code):
                self.enter(frame.f_code)
            frame = frame.f_back
        self.calls = self.hops = 0
        sys.setprofile(self.see)

    def counts(self, code):
        return code.co_filename.startswith(PACKAGE)

    def enter(self, code):
        self.calls += 1
        self.hops += bool(self.stack) and self.stack[-1] != code.co_filename
        self.modules.add(code.co_filename)
        self.functions.add((code.co_filename, code.co_qualname))
        self.stack.append(code.co_filename)
        self.deepest = max(self.deepest, len(self.stack))

    def see(self, frame, event, argument):
        code = frame.f_code
        if not self.counts(code):
            return
        if code.co_name == "<module>":
            self.imports += (event == "call") - (event == "return")
        elif self.imports:
            return
        elif event == "call":
            if self.until and code.co_qualname == self.until:
                return self.stop()
            self.enter(code)
        elif event == "return" and self.stack:
            self.stack.pop()

    def stop(self):
        sys.setprofile(None)
        if not self.done:
            self.done = True
            figures = {"calls": self.calls, "modules": len(self.modules), "functions": len(self.functions),
                       "hops": self.hops, "depth": self.deepest}
            Path(self.out).write_text(json.dumps(figures))
'''

PUSH = (
    PROFILE
    + '''
from dataclasses import dataclass
from dure.sync.ssp import SSP

STEP = 4


@dataclass(frozen=True, slots=True)
class Profiled(SSP):
    """SSP whose push and pull of one step are profiled at the worker of rank 0."""

    async def work(self, worker):
        await worker.server.next_version(lend=True)
        while True:
            gradient = await worker.gradient()
            seen = Trace(OUT) if worker.rank == 0 and worker.clock == STEP else None
            if seen:
                seen.start()
            await worker.server.push_pull(gradient)
            if seen:
                seen.stop()
'''
)

TRAIN_PUSH = """
import dure, sys
if __name__ == "__main__":
    dure.train("digits-mlp", sync=sys.argv[1] + ":Profiled", topology="ps", on="local", workers=2, steps=8)
"""

OPTION = (
    PROFILE
    + """
from dure.cli.main import main

seen = Trace(OUT, until="Worker.step")
seen.start()
sys.argv = ["dure", "train", "digits-mlp", "--on", "virtual", "--workers", "2", "--steps", "2", "--lr", "0.1", "--json"]
try:
    main()
except SystemExit:
    pass
finally:
    seen.stop()
"""
)


def path_of(checkout: Path, program: str, method: str = "") -> dict[str, int]:
    """Figures of a path: `program` runs on `checkout` in a process of its own and writes them to a file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        named = f"OUT = {str(folder / 'out.json')!r}\n"
        (folder / "method.py").write_text(method and named + method, encoding="utf-8")
        (folder / "program.py").write_text(named + program, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, folder / "program.py", folder / "method.py"],
            env=environment,
            capture_output=True,
            text=True,
        )
        if not (folder / "out.json").exists():
            sys.exit(f"the profiled run ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        return dict(json.loads((folder / "out.json").read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    counts = {
        "source": source_counts(checkout / "src"),
        "push": path_of(checkout, TRAIN_PUSH, PUSH),
        "option": path_of(checkout, OPTION),
    }
    if given.json:
        print(json.dumps(counts))
        return
    for part, figures in counts.items():
        print(part)
        for name, value in figures.items():
            print(f"  {name:<30}{value:>12,}")


if __name__ == "__main__":
    main()
