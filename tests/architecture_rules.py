"""The rules that tests/test_architecture.py applies: each turns one parsed file into complaints.

To add one: a function from `Source` to complaints, a row in `RULES`, a bad and a good snippet in the test.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernel", "policies", "models", "profiles", "actors", "client")
MAY_IMPORT = {
    "kernel": (),
    "policies": ("kernel",),
    "models": ("kernel",),
    "profiles": ("kernel",),
    "actors": ("kernel", "policies", "models", "profiles"),
    "client": FOLDERS,
}
DETERMINISTIC = ("actors/", "policies/")
PROGRAMS = ("profiles/gpu_check",)
"""Run and never imported by others: they stand above all folders."""
TORCH_FOLDERS = ("models/", "kernel/devices/cpu.py", "kernel/devices/cuda")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400

CLOCKS_AND_CHANCE = (
    *(
        "time.",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
    ),
    *("random.", "secrets.", "os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4", "numpy.random."),
)
SEEDABLE = ("random.Random", "numpy.random.default_rng", "numpy.random.Philox", "numpy.random.PCG64")
GENERATOR_TYPES = ("numpy.random.Generator", "numpy.random.BitGenerator", "numpy.random.SeedSequence")
THREADS = (
    "threading",
    "_thread",
    "concurrent.futures",
    "multiprocessing",
    "anyio.to_thread",
    "anyio.from_thread",
)
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")
BANNED = (*PICKLES, "zmq.asyncio", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load")
BANNED_METHODS = ("recv_pyobj", "send_pyobj")
DYNAMIC_IMPORTS = ("importlib.import_module", "__import__")
SET_MAKERS = ("set", "frozenset")
SET_TYPES = (*SET_MAKERS, "AbstractSet", "MutableSet")
ORDER_FREE = ("sorted", "min", "max", "sum", "any", "all", "len", *SET_MAKERS)
ORDER_TAKING = ("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "next")
MUTABLE_MAKERS = (
    *(
        "list",
        "dict",
        "set",
        "bytearray",
        "collections.defaultdict",
        "collections.deque",
        "collections.OrderedDict",
    ),
    *("collections.Counter", "itertools.count", "itertools.cycle"),
)
READ_ONLY_TYPES = ("Mapping", "Sequence", "Collection", "Set", "AbstractSet", "Iterable")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the root with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> dotted name of what it stands for."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self.module_of(node)}.{alias.name}"
        return names

    def module_of(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that `from … import` names, relative ones included."""
        if not node.level:
            return node.module or ""
        parents = ("muxk", *self.path.split("/"))[: -node.level]
        return ".".join((*parents, *([node.module] if node.module else [])))

    def dotted(self, node: ast.AST) -> str:
        """`t.monotonic` after `import time as t` -> `time.monotonic`; empty for what is not a plain name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def imported_modules(self) -> Iterator[tuple[ast.AST, str]]:
        """Every module (or name in a module) an import statement or `import_module("…")` brings in."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node, f"{self.module_of(node)}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and self.dotted(node.func) in DYNAMIC_IMPORTS:
                yield from ((node, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant))


Rule = Callable[[Source], Iterator[str]]


def at(source: Source, node: ast.AST, complaint: str) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 1)}: {complaint}"


def is_or_is_in(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def folders_import_only_what_they_may(source: Source) -> Iterator[str]:
    if source.path.startswith(PROGRAMS):
        return
    own = source.path.split("/")[0]
    for node, name in source.imported_modules():
        if name.split(".")[0] == "muxk":
            target = (*name.split("."), "")[1]
            if target != own and target not in MAY_IMPORT[own]:
                yield at(source, node, f"{own}/ may not import {name}")


def torch_stays_in_models_and_devices(source: Source) -> Iterator[str]:
    if source.path.startswith((*TORCH_FOLDERS, *PROGRAMS)):
        return
    for node, name in source.imported_modules():
        if is_or_is_in(name, ("torch",)):
            yield at(source, node, "torch belongs in models/ and kernel/devices/{cpu,cuda}.py")


def references(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Imports of names and uses of dotted names, aliases resolved."""
    yield from source.imported_modules()
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            yield node, source.dotted(node)


def no_clocks_and_no_chance(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if (
            isinstance(node, ast.Call)
            and not node.args
            and not node.keywords
            and source.dotted(node.func) in SEEDABLE
        ):
            yield at(source, node, f"{source.dotted(node.func)} without a seed")
    for node, name in references(source):
        if name.startswith(CLOCKS_AND_CHANCE) and name not in (*SEEDABLE, *GENERATOR_TYPES):
            yield at(source, node, f"{name}: time and randomness come from the kernel")


def no_hash_of_objects(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == "hash" and isinstance(node.ctx, ast.Load):
            yield at(source, node, "hash() differs between processes")


def no_threads(source: Source) -> Iterator[str]:
    for node, name in source.imported_modules():
        if is_or_is_in(name, THREADS):
            yield at(source, node, f"{name}: work leaves the loop through offload()")


def nothing_that_runs_foreign_code(source: Source) -> Iterator[str]:
    for node, name in references(source):
        if is_or_is_in(name, BANNED) or name in ("eval", "exec"):
            yield at(source, node, f"{name} is banned")
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
            yield at(source, node, f"{node.attr} is pickle")
    for node in source.nodes:
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield at(source, node, "allow_pickle is pickle")


def key(node: ast.AST) -> str:
    """`x` for a name, `.x` for an attribute of anything, empty for the rest."""
    return (
        node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""
    )


def is_set(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SET_MAKERS
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_set(node.left, known) or is_set(node.right, known)
    return key(node) in known


def is_set_type(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).split("[")[0] in SET_TYPES


def names_of_sets(body: list[ast.AST]) -> set[str]:
    """Keys of the names and attributes that the nodes of `body` annotate as a set or assign one to."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and is_set_type(n.annotation)]
            names |= {f".{ast.unparse(field.target)}" for field in fields}
        elif isinstance(node, ast.arg) and is_set_type(node.annotation):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and is_set_type(node.annotation):
            names.add(key(node.target))
        elif isinstance(node, ast.Assign) and is_set(node.value, names):
            names |= {key(target) for target in node.targets}
    return names - {""}


def iterated(body: list[ast.AST]) -> Iterator[ast.expr]:
    """What the nodes of `body` iterate over in an order that can be observed."""
    unordered = {
        argument
        for node in body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDER_FREE
        for argument in node.args
    }
    for node in body:
        if isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and node not in unordered:
            yield from (generator.iter for generator in node.generators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDER_TAKING:
            yield from node.args if node not in unordered else ()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "pop" and not node.args:
                yield node.func.value
            elif node.func.attr in ("join", "extend"):
                yield from node.args


def no_iteration_over_sets(source: Source) -> Iterator[str]:
    fields = {name for name in names_of_sets(source.nodes) if name.startswith(".")}
    functions = [n for n in source.nodes if isinstance(n, Function)]
    inside = {child for function in functions for child in ast.walk(function)}
    for body in (*(list(ast.walk(f)) for f in functions), [n for n in source.nodes if n not in inside]):
        known = fields | names_of_sets(body)
        for target in iterated(body):
            if is_set(target, known):
                yield at(
                    source,
                    target,
                    f"sort the set `{ast.unparse(target)}`: its order differs between processes",
                )


def is_mutable(source: Source, node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call):
        return source.dotted(node.func) in MUTABLE_MAKERS
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def is_read_only(node: ast.Assign | ast.AnnAssign) -> bool:
    """`__all__`, or an ALL_CAPS name whose annotation makes mypy refuse every change."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    kind = ast.unparse(node.annotation).replace("Final[", "").split("[")[0].rpartition(".")[2]
    return kind in READ_ONLY_TYPES and isinstance(node.target, ast.Name) and node.target.id.isupper()


def no_mutable_state_in_modules(source: Source) -> Iterator[str]:
    owned = {
        n for o in source.nodes if isinstance(o, Function | ast.ClassDef | ast.Lambda) for n in ast.walk(o)
    }
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield at(source, node, "global state")
        elif not isinstance(node, ast.Assign | ast.AnnAssign) or node in owned:
            continue
        elif is_mutable(source, node.value) and not is_read_only(node):
            yield at(
                source, node, "mutable module state: a tuple, frozenset, MappingProxyType or `X: Mapping[…]`"
            )


def functions_and_files_are_short(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if (
            isinstance(node, Function)
            and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
        ):
            yield at(source, node, f"{node.name} has {lines} lines, over {FUNCTION_LINES_MAX}")
    if (lines := source.text.count("\n")) > FILE_LINES_MAX:
        yield f"{source.path}: {lines} lines, over {FILE_LINES_MAX}"


EVERYWHERE = tuple(f"{folder}/" for folder in FOLDERS)
RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (folders_import_only_what_they_may, EVERYWHERE),
    (torch_stays_in_models_and_devices, EVERYWHERE),
    (nothing_that_runs_foreign_code, EVERYWHERE),
    (functions_and_files_are_short, EVERYWHERE),
    (no_mutable_state_in_modules, EVERYWHERE),
    (no_clocks_and_no_chance, DETERMINISTIC),
    (no_hash_of_objects, DETERMINISTIC),
    (no_iteration_over_sets, DETERMINISTIC),
    (no_threads, DETERMINISTIC),
)


def product_sources(prefixes: tuple[str, ...] = EVERYWHERE) -> list[Source]:
    return [source for source in all_sources() if source.path.startswith(prefixes)]


@cache
def all_sources() -> tuple[Source, ...]:
    """Every file once: parsing them takes far longer than any rule."""
    files = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
    return tuple(Source(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in files)
