"""What holds for the whole source tree: lengths, import arrows, and what may not be written at all."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest
from support import public_names

import dure
from dure.core.catalogue import load
from dure.run.strategy import AXES, REMEDY, WRAPPER
from dure.run.strategy import catalogue as one_catalogue

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dure"
STUDIES = ROOT / "studies" / "src" / "dure_studies"
FILES = sorted([*SOURCE.rglob("*.py"), *STUDIES.rglob("*.py")])
pytestmark = pytest.mark.xdist_group("tree")  # one process parses the files
TIMED = (
    "runtime/",
    "codec/cost.py",
    "core/chance.py",
    "planner/probe/",
    "planner/job_profile.py",
    "dure_studies/every.py",
)
"""Where clocks are read and global generators set: runtimes, measurements, `chance.seeded`."""

SHARED = {
    "sync": {
        "base",
        "corrected",
        "lifecycle",
        "line_search",
        "local_sgd",
        "worker",
        "worker_state",
    },
    "codec": {
        "base",
        "bits",
        "blocks",
        "cast",
        "coder",
        "cost",
        "exchange",
        "gaps",
        "residual",
        "size_only",
        "timing",
        "vote",
    },
}


def catalogue(axis):
    """The members that a folder lists, and what joins them."""
    joins = {"sync": REMEDY, "codec": WRAPPER}
    return {**one_catalogue(axis), **(one_catalogue(joins[axis]) if axis in joins else {})}


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name(path):
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else STUDIES.parent))


def folder(path):
    return path.relative_to(SOURCE).parts[0]


def code_lines(function):
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def imports(path):
    """Modules that a file imports, anywhere in it, as (line, absolute name)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node):
    """`a.b.c` of an attribute chain, else an empty text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def nodes(kind):
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, kind):
                yield path, node


def places(found):
    return [f"{name(path)}:{node.lineno}" for path, node in found]


def test_the_tree_was_seen():
    assert len(FILES) >= 25
    assert sum(1 for _ in nodes(ast.FunctionDef | ast.AsyncFunctionDef)) >= 200


def test_no_function_is_longer_than_40_lines():
    long = [(p, f) for p, f in nodes(ast.FunctionDef | ast.AsyncFunctionDef) if code_lines(f) > 40]
    assert places(long) == []


def test_no_module_but_the_errors_is_at_the_root():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_the_environment_is_read_where_it_may_be():
    allowed = ("cli/main.py", "cli/commands.py", "runtime/launch/", "job/data/")
    found = [(p, n) for p, n in nodes(ast.Attribute) if dotted(n) in ("os.environ", "os.environb", "os.getenv")]
    assert [place for place in places(found) if not place.startswith(allowed)] == []


def caught(handler):
    """Names of what a handler catches; an empty one for a bare `except`."""
    if handler.type is None:
        return {""}
    parts = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {dotted(part) for part in parts}


def passes_on(handler):
    """Whether what was caught is raised again, or handed to somebody by its name."""
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == handler.name) for node in inside
    )


def test_who_catches_everything_is_a_runtime_and_passes_it_on():
    broad = [(p, h) for p, h in nodes(ast.ExceptHandler) if caught(h) & {"", "Exception", "BaseException"}]
    assert places((p, h) for p, h in broad if not passes_on(h)) == []
    raising = [(p, h) for p, h in broad if any(isinstance(node, ast.Raise) for node in ast.walk(h))]
    allowed = (
        "core/node.py",
        "runtime/",
        "run/history.py",
        "planner/probe/measure.py",
        "partition/shared_stage.py",
    )
    assert [place for place in places(x for x in broad if x not in raising) if not place.startswith(allowed)] == []


def test_nothing_unsafe_is_called():
    calls = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "print",
        "torch.load",
        "torch.save",
        "os.system",
        "yaml.load",
        "time.sleep",
    }
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    called = [(p, n) for p, n in nodes(ast.Call) if dotted(n.func) in calls]
    files = "integrations/rank_files.py"  # optimizers have states of any form; `weights_only` unpickles no other code
    allowed = {("cli/main.py", "print"), (files, "torch.load"), (files, "torch.save")}
    assert [
        x for x in called if (name(x[0]), dotted(x[1].func)) not in allowed and not name(x[0]).startswith(TIMED)
    ] == []
    assert [f"{name(p)}:{line}" for p in FILES for line, module in imports(p) if module.split(".")[0] in modules] == []


def test_clocks_and_chance_stay_in_the_runtime():
    """The wall clock and unseeded randomness belong to runtimes (and the clock to who shows progress)."""
    wrong = {"time.time", "time.monotonic", "time.perf_counter", "random.random", "random.choice", "random.shuffle"}
    wrong |= {"np.random.seed", "np.random.rand", "np.random.randn", "numpy.random.seed"}
    found = [(p, n) for p, n in nodes(ast.Call) if dotted(n.func) in wrong and not name(p).startswith(TIMED)]
    assert places(found) == []


def test_every_blocking_wait_has_a_bound():
    """Waits for threads, processes and connections give a time-out. What is awaited blocks nobody."""
    awaited = {node.value for _, node in nodes(ast.Await)}
    calls = [(path, call) for path, call in nodes(ast.Call) if call not in awaited]
    blocking = {"communicate", "join", "wait"}
    unbounded = [
        (path, call)
        for path, call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in blocking
        and not (call.args or call.keywords)
        and not dotted(call.func).endswith("timers.wait")  # says how long to wait, and does not
    ]
    unbounded += [
        (path, call)
        for path, call in calls
        if dotted(call.func).endswith("create_connection")
        and len(call.args) < 2
        and "timeout" not in {keyword.arg for keyword in call.keywords}
    ]
    assert places(unbounded) == []


@pytest.mark.parametrize("axis", SHARED)
def test_catalogues_equal_files(axis):
    files = {path.stem for path in (SOURCE / axis).glob("*.py")} - {"__init__"} - SHARED[axis]
    listed = {place.partition(":")[0].rpartition(".")[2] for place in catalogue(axis).values()}
    assert listed == files


def test_catalogue_of_partitions_equals_files():
    files = {path.stem for path in (SOURCE / "partition" / "methods").glob("*.py")} - {"__init__"}
    listed = {place.partition(":")[0] for place in catalogue("partition").values()}
    assert listed == {*(f"dure.partition.methods.{file}" for file in files), "dure.partition.whole"}


@pytest.mark.parametrize("axis", AXES)
def test_catalogues_equal_classes(axis):
    """Every public class of a module that a catalogue names is a member."""
    places = [place.partition(":") for place in catalogue(axis).values()]
    modules = {module for module, _, _ in places}
    trees = [tree(SOURCE.parent / f"{module.replace('.', '/')}.py") for module in modules]
    classes = {node.name for each in trees for node in each.body if isinstance(node, ast.ClassDef)}
    assert {each for each in classes if not each.startswith("_")} == {name for _, _, name in places}


@pytest.mark.parametrize("axis", AXES)
def test_a_folder_imports_nothing(axis):
    """A catalogue is read without importing what it names."""
    assert list(imports(SOURCE / axis / "__init__.py")) == []


def test_type_checkers_see_every_public_name():
    assert public_names.STUB.read_text(encoding="utf-8") == public_names.stub(), "run `make format`"
    assert dure.__all__ == sorted(dure._HOMES)
    for public, module in dure._HOMES.items():
        found = getattr(dure, public)
        assert (found.__module__, found.__qualname__) == (module, public)


@pytest.mark.parametrize("axis", AXES)
def test_every_member_has_a_public_name(axis):
    for place in catalogue(axis).values():
        assert getattr(dure, place.partition(":")[2]) is load(place)


SCRIPTS = sorted(path for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py"))


def is_private(text):
    return any(part.startswith("_") and not part.startswith("__") for part in text.split("."))


def private_names(syntax):
    """Private names of dure in a script, as (line, name): imported, read from an object, or of a class of dure."""
    statements = [node for node in ast.walk(syntax) if isinstance(node, ast.Import | ast.ImportFrom)]
    origins = {}  # module of each imported name
    for node in statements:
        module = getattr(node, "module", None)
        for alias in node.names:
            origins[alias.asname or alias.name.partition(".")[0]] = module or alias.name
            if (module or alias.name).split(".")[0] == "dure" and is_private(f"{module}.{alias.name}"):
                yield node.lineno, alias.name
    ours = {each for each, module in origins.items() if module.split(".")[0] == "dure"}
    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            root = owner.partition(".")[0]
            if root not in ("self", "cls", "super()") and (root in ours or root not in origins):
                yield node.lineno, f"{owner}.{node.attr}"
        if isinstance(node, ast.ClassDef) and any(dotted(base).partition(".")[0] in ours for base in node.bases):
            names = [getattr(each, "name", getattr(each, "attr", "")) for each in ast.walk(node)]
            yield from ((node.lineno, f"{node.name}.{each}") for each in names if is_private(each or ""))


def test_benches_and_examples_use_no_private_name_of_dure():
    assert len(SCRIPTS) >= 50
    assert [
        f"{path.relative_to(ROOT)}:{line} {each}" for path in SCRIPTS for line, each in private_names(tree(path))
    ] == []


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("from dure.run.launchers.torchrun import _owner", "_owner"),
        ("from dure.topology._hidden import Shard", "Shard"),
        ("import dure.run.train as train\ntrain._check()", "train._check"),
        ("import dure\ndure.run.launchers._start = None", "dure.run.launchers._start"),
        ("def tell(life):\n    life._on_step()", "life._on_step"),
        ("from dure.run.process import WorkerProcess\nclass A(WorkerProcess):\n    def _tell(self): ...", "A._tell"),
        ("import os\nos._exit(1)", None),
        ("class A:\n    def _own(self): return self._own", None),
    ],
)
def test_a_private_name_of_dure_is_seen(script, found):
    assert [each for _, each in private_names(ast.parse(script))] == ([] if found is None else [found])


DEFINED_TWICE = {"Column", "Layout", "Span"}
"""Public class names that still stand for two things. A name that is defined once must leave this set."""


def test_a_public_class_name_is_defined_once():
    seen = Counter(node.name for _, node in nodes(ast.ClassDef) if not node.name.startswith("_"))
    assert {name for name, count in seen.items() if count > 1} == DEFINED_TWICE


def test_no_marker_of_unfinished_work():
    markers = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    found = [name(path) for path in FILES if any(marker in path.read_text(encoding="utf-8") for marker in markers)]
    assert found == []


@pytest.mark.xdist_group("tree")
def test_the_tests_of_a_group_run_in_one_process(request):
    """A fixture of a minute would otherwise be made in each process."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tree"), "this pytest-xdist does not group tests under this pytest"
