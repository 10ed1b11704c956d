"""Who may import whom, and other rules that keep the parts apart. Reads the source, runs none of it.

The table is docs/architecture.md's, in the form that can be enforced. A new package or top-level
module needs a line here: think about where it stands before adding one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MAX_LINES = 500

FOUNDATION = {
    "causal",
    "config",
    "control",
    "request",
    "grammar",
    "step",
    "kv_spec",
    "kv_ownership",
    "hf_config",
    "hardware",
    "limits",
    "metrics",
    "tracing",
}
RANK_ARITHMETIC = {f"distributed.{name}" for name in ("mesh", "pcp_layout", "layouts", "slots", "stages")}

MAY_IMPORT: dict[str, set[str]] = {
    # Foundation: no torch, and nothing above.
    "causal": set(),
    "config": set(),
    "request": set(),
    "kv_spec": {"config"},
    "kv_ownership": set(),
    "hardware": set(),
    "limits": set(),
    "checkpoint_files": {"gguf_file"},
    "gguf_file": set(),
    "gguf_tokenizer": {"gguf_file"},
    "tokenizer": {"checkpoint_files", "gguf_file", "gguf_tokenizer"},
    "step": {"request"},
    "grammar": {"request"},
    "metrics": {"step"},
    "tracing": set(),
    "control": {"config"},
    "hf_config": {"config", "checkpoint_files", "gguf_file", "quantization.scheme"},
    "quantization": {"checkpoint_files", "gguf_file", "kernels"},
    "quantization.formats": set(),
    "quantization.scheme": set(),
    "quantization.catalog": {"checkpoint_files"},
    "flops": {"causal", "config"},
    "weight_sizes": {"config", "flops", "checkpoint_files", "gguf_file"}
    | {"quantization.catalog", "quantization.formats", "quantization.scheme"},
    "memory": {"config", "kv_spec", "limits", "traffic"} | RANK_ARITHMETIC,
    "traffic": {"config", "kv_spec"} | RANK_ARITHMETIC,
    "distributed.mesh": {"config"},
    "distributed.pcp_layout": {"causal"},
    "distributed.slots": set(),
    "distributed.layouts": {"config", "kv_spec", "flops", "distributed.mesh", "distributed.stages"},
    "distributed.stages": {"config", "flops"},
    # Users' side and control plane.
    "__init__": {"engine", "request"},
    "__main__": {"cli"},
    "cli": {"server", "engine", "benchmark", "convert", "checkpoint_files", "tokenizer", "flops"}
    | FOUNDATION
    | RANK_ARITHMETIC,
    "server": {"engine"} | FOUNDATION | RANK_ARITHMETIC,
    "benchmark": {"engine", "flops"} | FOUNDATION,
    "benchmark.doctor_side": {"attention", "kernels", "distributed", "workspace"} | RANK_ARITHMETIC,
    "engine": {"memory", "tokenizer", "checkpoint_files", "weight_sizes"} | FOUNDATION | RANK_ARITHMETIC,
    "engine.executor": {"worker"} | FOUNDATION | RANK_ARITHMETIC,
    # What computes. `layers` and `attention` do not know each other; a model gets attention as `ctx`.
    "workspace": set(),
    "distributed": {"distributed.mesh", "distributed.slots", "config", "kernels"},
    "attention": {"causal", "config", "kv_spec", "kv_ownership", "limits"}
    | {"workspace", "distributed", "kernels"},
    "layers": {"config", "limits", "traffic", "workspace", "distributed", "kernels"},
    "loader": {"layers", "checkpoint_files", "config", "quantization"},
    "attention.backend": {"config"},  # what a model sees of attention: nothing of PCP
    "models": {"attention.backend", "layers", "config", "hf_config", "workspace", "distributed"},
    "sampling": {"request", "step", "grammar", "tokenizer"},
    "worker": {
        "attention",
        "control",
        "distributed",
        "hardware",
        "kernels",
        "layers",
        "limits",
        "loader",
        "memory",
    }
    | {"models", "sampling", "config", "kv_spec", "kv_ownership", "request", "step", "traffic", "tracing"}
    | {"workspace"}
    | RANK_ARITHMETIC,
    # Beside the engine.
    "convert": {"config", "hf_config", "checkpoint_files", "gguf_tokenizer", "quantization"},
    "kernels": set(),
}
"""Package or module (the longest name that fits counts) -> what it may import besides itself."""

MAY_IMPORT_ANYTHING = {"testing"}
"""And nothing imports it."""

NO_TORCH = (
    {"checkpoint_files", "gguf_file", "quantization.formats", "quantization.scheme", "quantization.catalog"}
    | {"flops", "memory", "traffic", "tokenizer", "gguf_tokenizer", "engine", "server", "cli"}
    | FOUNDATION
    | RANK_ARITHMETIC
)
"""Never import torch themselves, and importing them must not bring it in."""

TORCH = {"torch", "transformers", "tokenizers", "safetensors"}


class Import(NamedTuple):
    """An import statement. `lazy`: inside a function, or for type checkers only."""

    target: str
    lazy: bool


# Reading the source


def module_name(path: Path) -> str:
    """`src/prefold/engine/llm.py` -> `engine.llm`; a package is called by its `__init__`."""
    return ".".join(path.relative_to(SOURCE / "prefold").with_suffix("").parts)


@cache
def modules() -> dict[str, ast.Module]:
    files = sorted((SOURCE / "prefold").rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def imports_of(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """All imports, wherever they stand."""
    for node in ast.iter_child_nodes(tree):
        inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = True
        if isinstance(node, ast.Import):
            yield from (Import(name.name, lazy) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            for name in node.names:
                # `from prefold.engine import llm` imports a module, `... import LLM` a name of one.
                full = f"{node.module}.{name.name}"
                yield Import(full if resolve(full) else str(node.module), lazy)
        else:
            yield from imports_of(node, inner)


def resolve(target: str) -> str | None:
    """`prefold.engine.llm` -> `engine.llm`, `prefold.engine` -> `engine.__init__`; None if not ours."""
    if target == "prefold":
        return "__init__"
    name = target.removeprefix("prefold.")
    if name == target:
        return None
    return next((found for found in (name, f"{name}.__init__") if found in modules()), None)


@cache
def our_imports(module: str) -> tuple[Import, ...]:
    """Imports of our own modules by `module`, with resolved names; the root package is left out."""
    found = (Import(resolve(i.target) or "", i.lazy) for i in imports_of(modules()[module]))
    return tuple(i for i in found if i.target not in ("", "__init__"))


def unit_of(module: str) -> str:
    """The entry of the table that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    known = MAY_IMPORT.keys() | MAY_IMPORT_ANYTHING
    return next((name for name in names if name in known), parts[0])


def package_of(unit: str) -> str:
    return unit.split(".")[0]


# Imports


def test_docs_have_a_line_per_part():
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    named = " ".join(line.split("|")[1] for line in lines if line.startswith("| `"))
    parts = {package_of(module) for module in modules()} - {"__init__", "__main__"}
    assert not [part for part in sorted(parts) if f"`{part}`" not in named]


def test_every_folder_is_a_package():
    """Or an installed copy would lack it."""
    folders = {path.parent for path in (SOURCE / "prefold").rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_part_has_a_line_in_the_table():
    unknown = {unit_of(module) for module in modules()} - MAY_IMPORT.keys() - MAY_IMPORT_ANYTHING
    assert not unknown, f"no line in MAY_IMPORT for {sorted(unknown)}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_follow_the_table(module: str):
    unit = unit_of(module)
    if unit in MAY_IMPORT_ANYTHING:
        return
    allowed = MAY_IMPORT[unit] | {unit}
    for target, _ in our_imports(module):
        other = unit_of(target)
        # A package's name covers its parts, and the parts are free among themselves.
        covered = {other, package_of(other)} & allowed or package_of(other) == package_of(unit)
        assert covered, f"{module} must not import {target}"


def test_testing_is_imported_by_nobody():
    offenders = [
        module
        for module in modules()
        if unit_of(module) != "testing" and any(unit_of(i.target) == "testing" for i in our_imports(module))
    ]
    assert not offenders


def test_only_the_executor_knows_workers():
    known = {m for m in modules() if any(unit_of(i.target) == "worker" for i in our_imports(m))}
    assert {m for m in known if package_of(m) not in ("worker", "testing")} == {"engine.executor"}


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A cycle as a list of nodes, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return path[path.index(node) :] + [node]
        if node in done:
            return None
        for following in sorted(graph.get(node, ())):
            if cycle := visit(following, [*path, node]):
                return cycle
        done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


def test_no_cycles_between_modules():
    graph = {module: {i.target for i in our_imports(module)} for module in modules() if module != "__init__"}
    assert find_cycle(graph) is None


def test_no_cycles_between_packages():
    graph: dict[str, set[str]] = {}
    for module in modules():
        if module != "__init__":
            package = package_of(module)
            others = {package_of(i.target) for i in our_imports(module)} - {package}
            graph.setdefault(package, set()).update(others)
    assert find_cycle(graph) is None


# No torch in the control plane


def is_torch_free(module: str) -> bool:
    return unit_of(module) in NO_TORCH or package_of(module) in NO_TORCH


@pytest.mark.parametrize("module", sorted(filter(is_torch_free, modules())))
def test_control_plane_does_not_name_torch(module: str):
    named = {i.target.split(".")[0] for i in imports_of(modules()[module]) if not i.lazy}
    assert not named & TORCH
    assert "torch" not in {i.target.split(".")[0] for i in imports_of(modules()[module])}


@pytest.mark.parametrize("module", sorted(filter(is_torch_free, modules())))
def test_control_plane_reaches_no_torch(module: str):
    """Over everything that an import of the module runs."""
    seen, waiting = {module}, [module]
    while waiting:
        current = waiting.pop()
        eager = [i for i in imports_of(modules()[current]) if not i.lazy]
        heavy = [i.target for i in eager if i.target.split(".")[0] in TORCH]
        assert not heavy, f"{module} reaches {heavy} through {current}"
        reached = {i.target for i in our_imports(current) if not i.lazy}
        # Importing a module runs the __init__ of its packages.
        reached |= {f"{name.rpartition('.')[0]}.__init__" for name in reached if "." in name}
        reached &= modules().keys()
        waiting.extend(sorted(reached - seen))
        seen |= reached


def test_control_plane_imports_without_torch():
    names = [f"prefold.{m}".removesuffix(".__init__") for m in modules() if is_torch_free(m)]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"loaded = set({sorted(TORCH)!r}) & sys.modules.keys()\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Size and state


def our_files() -> list[Path]:
    return sorted(path for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", our_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES


CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__all__")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
IMMUTABLE_CALLS = {
    "re.compile",
    "frozenset",
    "tuple",
    "Path",
    "TypeVar",
    "logging.getLogger",
    "ContextVar",  # of a thread, or of a task
    "min",
    "max",
    "int",
    "float",
    "str",
    "_load_library",  # functions of a shared library, and the types of their arguments
    "_LIBRARY.prefold_instruction_set",
    "library.declare",
    "library.structure",
    "BeforeValidator",
}
CACHES = {"cache", "lru_cache", "functools.cache", "functools.lru_cache"}
MUTATORS = {
    *("append", "extend", "insert", "pop", "popitem", "remove", "clear", "update"),
    *("setdefault", "add", "discard", "sort", "reverse"),
}


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of the assignments in a body, those inside if, try and with included."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue  # a script's own variables
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for inner in ("body", "orelse", "finalbody"):
                yield from _assignments(getattr(node, inner, []))


def mutable_state(tree: ast.Module) -> list[str]:
    """What a module holds, or does to its constants, that would make it stateful."""
    found = []
    for name, value in _assignments(tree.body):
        is_call = isinstance(value, ast.Call) and ast.unparse(value.func) not in IMMUTABLE_CALLS
        if is_call or (isinstance(value, MUTABLE) and not CONSTANT.fullmatch(name)):
            found.append(f"{name} = {ast.unparse(value)[:60]}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
            found += [f"@{decorator} {node.name}" for decorator in sorted(decorators & CACHES)]
        elif isinstance(node, ast.ClassDef):
            shared = [s for s in node.body if isinstance(s, ast.Assign) and isinstance(s.value, MUTABLE)]
            found += [f"class {node.name}: {ast.unparse(s)[:60]}" for s in shared]
        elif (mutated := _mutated(node)) and CONSTANT.fullmatch(mutated):
            found.append(ast.unparse(node))
    return found


def _mutated(node: ast.AST) -> str | None:
    """The name whose object a node changes, if it does."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return ast.unparse(node.func.value)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return ast.unparse(node.value)
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target)
    return None


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_mutable_state_at_module_level(module: str):
    assert mutable_state(modules()[module]) == []


@pytest.mark.parametrize(
    "code",
    [
        "seen = {}",
        "seen: dict = {}",
        "_groups = []",
        "REGISTRY = dict()",
        "group = Group()",
        "if True:\n    cache = {}",
        "def f():\n    global x\n    x = 1",
        "TABLE = {}\ndef f():\n    TABLE['a'] = 1",
        "TABLE = []\nTABLE.append(1)",
        "TABLE = {}\nTABLE |= {1: 2}",
        "TABLE = {1: 2}\ndel TABLE[1]",
        "from functools import lru_cache\n@lru_cache(maxsize=1)\ndef f(): ...",
        "class A:\n    shared = []",
    ],
)
def test_mutable_state_is_found(code: str):
    assert mutable_state(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "TABLE = {1: 2}\nx = TABLE[1]",
        "__all__ = ['a']",
        "logger = logging.getLogger('a')",
        "Ints = list[int]",
        "def f():\n    seen = {}\n    seen[1] = 2",
        "class A:\n    def __init__(self):\n        self.b = []",
        "PATTERN = re.compile('a')",
    ],
)
def test_constants_are_no_mutable_state(code: str):
    assert mutable_state(ast.parse(code)) == []


# Group sizes

GROUPS_THEMSELVES = ("distributed", "engine.executor", "traffic", "cli", "testing")
"""Where a size of 1 may be a case of its own: such a group is the identity and sends nothing, and one
rank is no process."""

SIZES = {"world_size", "tp_size", "pcp_size", "tensor_parallel_size", "prefill_context_parallel_size"}


def size_branches(tree: ast.AST) -> list[str]:
    """Comparisons that ask whether a group has one rank or more."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        left, right, op = node.left, node.comparators[0], node.ops[0]
        sides = [ast.unparse(side) for side in (left, right)]
        # `size < 1` checks input; everything else tells one rank from several.
        if "1" in sides and not (isinstance(op, ast.Lt) and sides[1] == "1"):
            other = sides[1 - sides.index("1")]
            name = other.rpartition(".")[2]
            if name in SIZES or re.search(r"(group|tp|pcp|mesh)\w*\.size$", other, re.IGNORECASE):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("module", [m for m in sorted(modules()) if not m.startswith(GROUPS_THEMSELVES)])
def test_nothing_depends_on_the_size_of_a_group(module: str):
    assert size_branches(modules()[module]) == []


@pytest.mark.parametrize(
    "code",
    [
        "if self.tp_group.size > 1: pass",
        "x = 1 if env.tp.size == 1 else 2",
        "y = config.parallel.world_size != 1",
        "if 1 < pcp_group.size: pass",
    ],
)
def test_size_branches_are_found(code: str):
    assert size_branches(ast.parse(code))


@pytest.mark.parametrize("code", ["if x.size == 1: pass", "if tp.size < 1: pass", "n = tp_group.size // 1"])
def test_other_comparisons_are_left_alone(code: str):
    assert size_branches(ast.parse(code)) == []
