"""The rooms of CONTRIBUTING.md and the public surface, held true."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gradwire

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PURE = ("core", "costs", "plan", "planner", "sim")
TORCH = ("torch", "triton")

ABOVE_ENGINE = tuple(
    f"gradwire.{room}"
    for room in ("api", "auto", "bench", "cli", "doctor", "integrations", "profiler", "record", "report", "testbed")
)

# room -> what it may not import, itself or through other modules of gradwire
FORBIDDEN = {
    **dict.fromkeys(PURE, TORCH),
    "testbed": TORCH,
    "report": (*TORCH, "gradwire.bench", "gradwire.cli", "gradwire.engine"),
    "compressors": ("gradwire.collectives", "gradwire.planner", "gradwire.engine"),
    "collectives": ("gradwire.compressors",),
    "exchange": ("gradwire.engine", *ABOVE_ENGINE),
    "engine": ABOVE_ENGINE,
    "auto": (
        "gradwire.api",
        "gradwire.bench",
        "gradwire.cli",
        "gradwire.doctor",
        "gradwire.report",
        "gradwire.testbed",
    ),
    "profiler": ("gradwire.bench", "gradwire.cli", "gradwire.doctor", "gradwire.planner.joint", "gradwire.testbed"),
    "record": ("gradwire.bench", "gradwire.cli", "gradwire.doctor", "gradwire.report", "gradwire.testbed"),
    "doctor": ("gradwire.bench", "gradwire.cli", "gradwire.report"),
    "integrations": ("gradwire.bench", "gradwire.cli", "gradwire.doctor", "gradwire.report", "gradwire.testbed"),
}
FRAMEWORKS = ("transformers", "accelerate", "lightning", "ray", "gradwire.integrations")

# What a training script is promised, and what a plan is written with.
PROMISED = {
    "parallelize", "Plan", "Policy", "Uniform", "Backward", "Pipelined", "Delayed", "LocalSteps", "Nesterov",
    "QSGD", "Cast", "ErrorFeedback", "Identity", "GradwireError",
}  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def by_kind(tree: ast.AST) -> defaultdict[type[ast.AST], list[Any]]:
    """All nodes of a tree by their class: each tree is walked once, for all rules."""
    found: defaultdict[type[ast.AST], list[Any]] = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def is_type_checking(node: ast.AST) -> bool:
    """Return whether the node is `if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in (
        getattr(node.test, "id", ""),
        getattr(node.test, "attr", ""),
    )


def statements(tree: ast.AST, *, functions: bool = True) -> Iterator[ast.stmt]:
    """All statements that run: not the bodies of `if TYPE_CHECKING`, and those of functions only if asked."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from statements(other, functions=functions)
        elif isinstance(child, ast.stmt):
            if functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
                yield from statements(child, functions=functions)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from statements(child, functions=functions)


def imported(path: Path, *, functions: bool = True) -> set[str]:
    """Full names of the modules that a file imports; of `from a import b` both a and, if it is a module, a.b."""
    found: set[str] = set()
    for node in statements(parsed(path), functions=functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}; write the whole name"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    modules = {name for name in found if name in MODULES or not name.startswith("gradwire")}
    # importing a.b.c runs a and a.b too
    return modules | {name.rsplit(".", n)[0] for name in modules for n in range(1, name.count(".") + 1)}


@cache
def direct(module: str) -> frozenset[str]:
    # gradwire/__init__.py resolves its names on first use: what its functions import, its importers do not
    return frozenset(imported(MODULES[module], functions=module != "gradwire"))


def reached(start: str) -> dict[str, str]:
    """Everything that importing a module may load, each with the module that imports it."""
    via: dict[str, str] = {}
    queue = [start]
    while queue:
        module = queue.pop()
        for name in sorted(direct(module) - via.keys() - {start}):
            via[name] = module
            if name in MODULES:
                queue.append(name)
    return via


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_rooms_import_only_what_they_may() -> None:
    wrong = [
        f"{module} reaches {name}, imported by {importer}"
        for module in MODULES
        for name, importer in reached(module).items()
        if within(name, FORBIDDEN.get(room_of(module), ()))
    ]
    assert not wrong


OWN_FACES = (
    "gradwire.bench",
    "gradwire.cli",
    "gradwire.integrations",
    "gradwire.report",
    "gradwire.doctor.flight",
    "gradwire.kernels.cpu",
    "gradwire.kernels.reference",
    "gradwire.kernels.triton",
    "gradwire.planner.bits",
    "gradwire.record.recording",
    "gradwire.record.tensorboard",
)
"""Modules that others name, since the face of their package would load what few need: torch, numpy, frameworks."""


def test_a_package_is_entered_through_its_face() -> None:
    wrong = []
    for module, path in MODULES.items():
        for node in by_kind(parsed(path))[ast.ImportFrom]:
            if node.module not in MODULES or room_of(node.module) in ("", room_of(module)):
                continue
            shown = all_of(parse(node.module)) if node.module.count(".") == 1 else []
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else node.module
                if name.count(".") > 1 and alias.name not in (shown or []) and not within(name, OWN_FACES):
                    wrong.append(f"{module}:{node.lineno} imports {alias.name} from {node.module}")
    assert not wrong


@pytest.mark.parametrize("room", ["collectives", "engine", "exchange", "transport"])
def test_nothing_that_runs_in_a_step_imports_the_planner(room: str) -> None:
    """A plan arrives made; `gradwire.plan` has what users write."""
    wrong = {module for module in MODULES if room_of(module) == room and "gradwire.planner" in reached(module)}
    assert not wrong


def file_circles() -> list[set[str]]:
    """Modules that import each other in a circle, `if TYPE_CHECKING` included; faces are doors and not files."""
    files = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    above = {name: typed_imports(name) & files - {name} for name in files}
    while free := [name for name, others in above.items() if not others & above.keys()]:
        for name in free:
            del above[name]
    below = {name: {other for other in above if name in above[other]} for name in above}
    while free := [name for name, others in below.items() if not others & below.keys()]:
        for name in free:
            del below[name]
    return [below.keys() & {name, *above[name]} for name in below]


def typed_imports(module: str) -> set[str]:
    """The modules that a file names in any import, those for types included."""
    found: set[str] = set()
    for node in by_kind(parse(module))[ast.ImportFrom]:
        if node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def test_no_files_import_each_other() -> None:
    assert file_circles() == []


def test_nothing_imports_the_cli_but_main() -> None:
    importers = {name for name in MODULES if within_any_cli(direct(name))}
    assert importers <= {"gradwire.__main__", "gradwire.cli"} | {n for n in MODULES if n.startswith("gradwire.cli.")}


def test_nothing_imports_the_doctor_but_the_cli() -> None:
    importers = {name for name in MODULES if any(within(each, ("gradwire.doctor",)) for each in direct(name))}
    assert {name for name in importers if room_of(name) != "doctor"} == {"gradwire.cli.jobs"}


def test_nothing_imports_integrations_but_scripts() -> None:
    importers = {name for name in MODULES if any(within(each, FRAMEWORKS) for each in direct(name))}
    assert {room_of(name) for name in importers} <= {"integrations"}


def test_nothing_imports_auto_but_those_above() -> None:
    """What decides is loaded by nothing that executes."""
    importers = {name for name in MODULES if any(within(each, ("gradwire.auto",)) for each in direct(name))}
    assert {room_of(name) for name in importers} <= {"api", "auto", "bench", "cli", "integrations"}


def rooms_imported() -> dict[str, set[str]]:
    """Of each package, the packages that its modules import, in functions too."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        if room := room_of(module):
            found.setdefault(room, set()).update(
                room_of(name) for name in direct(module) if name in MODULES and room_of(name) not in ("", room)
            )
    return found


def test_packages_import_each_other_in_one_direction() -> None:
    left = rooms_imported()
    while free := [room for room, others in left.items() if not others & left.keys()]:
        for room in free:
            del left[room]
    assert not left, f"import circles: {left}"


def classes() -> dict[str, list[str]]:
    """The modules of each class name; private ones too."""
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in by_kind(parsed(path))[ast.ClassDef]:
            found.setdefault(node.name.lstrip("_"), []).append(module)
    return found


def test_a_class_name_is_one_class() -> None:
    shared = {name: modules for name, modules in classes().items() if len(modules) > 1}
    assert len(shared) <= 5, shared


def test_integrations_are_thin() -> None:
    thin = {name: path for name, path in MODULES.items() if name.startswith("gradwire.integrations.")}
    assert len(thin) >= 7
    assert not {name: count for name, path in thin.items() if (count := len(path.read_text().splitlines())) > 200}


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines, as attributes, methods, functions or variables."""
    kinds = by_kind(tree)
    names = {node.name for node in [*kinds[ast.FunctionDef], *kinds[ast.ClassDef]]}
    names |= {node.attr for node in kinds[ast.Attribute] if isinstance(node.ctx, ast.Store)}
    return names | {node.id for node in kinds[ast.Name] if isinstance(node.ctx, ast.Store)}


def test_no_private_attribute_of_another_package_is_used() -> None:
    trees = {module: parsed(path) for module, path in MODULES.items()}
    defined: dict[str, set[str]] = {}
    for module, tree in trees.items():
        defined.setdefault(room_of(module), set()).update(name for name in own_names(tree) if name.startswith("_"))
    wrong = []
    for module, tree in trees.items():
        for node in by_kind(tree)[ast.Attribute]:
            if not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if node.attr in ("_replace", "_asdict", "_fields", "_exit"):  # public names of tuples and of os
                continue
            elsewhere = [room for room, names in defined.items() if node.attr in names and room != room_of(module)]
            if node.attr not in defined[room_of(module)] and elsewhere:
                wrong.append(f"{module}:{node.lineno} uses {node.attr} of {elsewhere}")
    assert not wrong


INSIDE = {"executor", "lent", "memory", "buckets", *("_executor", "_lent", "_buckets")}
HOLDS_AN_EXCHANGE = {"exchange", "running", "usual", "corrected", *("_exchange", "_usual", "_corrected")}


def reaches_into_exchanges(tree: ast.AST) -> list[int]:
    """The lines that ask a variable or attribute with the name of an exchange for a part of its inside."""
    return [
        node.lineno
        for node in by_kind(tree)[ast.Attribute]
        if node.attr in INSIDE and getattr(node.value, "attr", getattr(node.value, "id", "")) in HOLDS_AN_EXCHANGE
    ]


def test_nobody_reaches_into_an_exchange() -> None:
    wrong = {
        f"{module}:{line}"
        for module in MODULES
        if room_of(module) != "exchange"
        for line in reaches_into_exchanges(parse(module))
    }
    assert not wrong, "ask the exchange itself"
    bad = "reducer.running.executor.finish()\nexchange._lent\nself._exchange.buckets[0]\nsession.exchange.memory.state()"
    assert sorted(reaches_into_exchanges(ast.parse(bad))) == [1, 2, 3, 4]
    assert reaches_into_exchanges(ast.parse("stats.memory\nplan.buckets\nexchange.plan.buckets\nself._buckets")) == []


def classes_of_schedules() -> set[str]:
    """The data of all schedules, and the classes that run them."""
    found = set()
    for module in MODULES:
        for node in by_kind(parse(module))[ast.ClassDef]:
            is_data = within(module, ("gradwire.core.schedules",)) and any(ast.unparse(base) == "Schedule" for base in node.bases)
            if is_data or (within(module, ("gradwire.engine.schedules",)) and node.name.endswith("Schedule")):
                found.add(node.name)
    return found


def test_what_a_schedule_is_like_is_asked_of_it() -> None:
    """No type tests on schedule classes but where schedules are defined."""
    wrong, schedules = [], classes_of_schedules()
    assert schedules >= {"Backward", "Delayed", "BackwardSchedule", "ShardedSchedule"}
    for module, path in MODULES.items():
        if within(module, ("gradwire.core", "gradwire.engine.schedules")):
            continue
        for node in by_kind(parsed(path))[ast.Call]:
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                if named & schedules:
                    wrong.append(f"{module}:{node.lineno}")
    assert not wrong, "give `gradwire.core.schedules.base.Schedule`, or `Traits`, a property, and ask the schedule for it"


def test_nothing_imports_what_a_wheel_does_not_have() -> None:
    """No wheel has `benchmarks` and `tests`: they import gradwire, never the other way round, and not by a name in a string."""
    assert {name for name in MODULES if any(within(each, ("benchmarks", "tests")) for each in direct(name))} == set()
    named = {
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in by_kind(parsed(path))[ast.Constant]
        if isinstance(node.value, str) and node.value.split(".")[0] == "benchmarks"
    }
    assert not named


def within_any_cli(names: frozenset[str]) -> bool:
    return any(within(name, ("gradwire.cli",)) for name in names)


def test_the_walk_sees_what_python_does() -> None:
    """The rules above are worth nothing if the walk is blind: it must find imports that are known to be there."""
    assert {"gradwire.core", "gradwire.plan.schemes"} <= direct("gradwire.plan.policy")
    assert "gradwire.errors" in reached("gradwire.plan.policy")
    assert "gradwire" in reached("gradwire.core.specs")
    code = "if TYPE_CHECKING:\n import a\nelse:\n import b\ndef f():\n import c\nif True:\n import d\n"
    names = [node.names[0].name for node in statements(ast.parse(code)) if isinstance(node, ast.Import)]
    assert names == ["b", "c", "d"]
    shallow = [node.names[0].name for node in statements(ast.parse(code), functions=False) if isinstance(node, ast.Import)]
    assert shallow == ["b", "d"]


def bound_names(tree: ast.Module) -> set[str]:
    """Names that a module's top level binds."""
    names: set[str] = set()
    for node in statements(tree, functions=False):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                names |= {each.id for each in ast.walk(part) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return names | {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def all_of(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`, [] if it is computed, None if there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return []
    return None


def is_internal(module: str) -> bool:
    """Named with an underscore, or inside a package below the top that says itself what is public."""
    package, _, name = module.rpartition(".")
    return name.startswith("_") or ("." in package and all_of(parse(package)) is not None)


def parse(module: str) -> ast.Module:
    return parsed(MODULES[module])


def test_public_modules_say_what_is_public() -> None:
    wrong = []
    for module in MODULES:
        tree = parse(module)
        names, listed = bound_names(tree), all_of(tree)
        if listed is None:
            wrong += [f"{module} has no __all__"] if names and not is_internal(module) else []
            continue
        if len(set(listed)) < len(listed):
            wrong.append(f"{module}.__all__ has a name twice")
        if "__getattr__" not in names and not set(listed) <= names:
            wrong.append(f"{module}.__all__ names what it does not have: {set(listed) - names}")
    assert not wrong


def isort_key(name: str) -> tuple[int, str]:
    """ruff's order of __all__: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_public_surface_is_sorted_complete_and_resolves() -> None:
    assert list(gradwire.__all__) == sorted(gradwire.__all__, key=isort_key)
    assert len(set(gradwire.__all__)) == len(gradwire.__all__)
    assert set(gradwire.__all__) >= PROMISED
    for name in gradwire.__all__:
        assert getattr(gradwire, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gradwire.no_such_name  # type: ignore[attr-defined]


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    code = "import gradwire; print(*[n for n in dir(gradwire) if not n.startswith('_')])"
    assert set(python(code).split()) == {name for name in gradwire.__all__ if not name.startswith("_")}


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("torch", "numpy", "triton", "typer", "rich", "sklearn", "matplotlib")

# what may not be loaded when these modules are, and those above them
LIGHT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gradwire", "gradwire.errors"): (*HEAVY, "msgspec"),
    (
        *("gradwire.core", "gradwire.costs", "gradwire.planner", "gradwire.sim.timeline"),
        *("gradwire.record.run", "gradwire.report.page", "gradwire.report.pictures"),
    ): HEAVY,
    ("gradwire.testbed",): TORCH,
    ("gradwire.api",): FRAMEWORKS,
}


def test_light_imports_stay_light() -> None:
    modules = [module for group in LIGHT for module in group]
    code = "import importlib, sys\nfor module in sys.argv[1:]:\n importlib.import_module(module)\n print(*sys.modules)"
    loaded = dict(zip(modules, python(code, *modules).splitlines(), strict=True))
    for group, unloaded in LIGHT.items():
        for module in group:
            assert module in loaded[module].split()
            assert [name for name in loaded[module].split() if within(name, unloaded)] == [], f"{module} loads them"


# room of tests -> modules of tests/support that no file there may import
TEST_ROOMS = {
    "unit": {"worlds", "interpreters", "script_ends", "triton_processes", "soak"},
    "ranks": {"interpreters", "script_ends", "triton_processes", "soak"},
    "kernels": {"worlds", "interpreters", "script_ends", "soak"},
    "integrations": {"script_ends", "triton_processes", "soak"},
    "scripts": set[str](),
    "soak": set[str](),
}


def test_tests_are_in_their_rooms() -> None:
    rooms = {room_of(name) for name in MODULES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        room, *packages = path.relative_to(ROOT / "tests").parts[:-1]
        assert room in TEST_ROOMS, path
        assert not imported(path) & TEST_ROOMS[room], f"{path} starts processes: move the file"
        assert room != "unit" or not packages or packages[0] in rooms, path


def test_no_two_files_of_tests_have_one_name() -> None:
    """Tests import the modules of tests/support, and each other's, by their names alone."""
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "soak"]
    assert sorted(set(names)) == sorted(names)


def sources() -> list[Path]:
    suffixes = {".py", ".cpp", ".h", ".md", ".toml", ".json", ".yml", ".yaml", ".txt", ".sh"}
    rooms = ["src", "csrc", "tests", "benchmarks", "examples", "docs"]
    found = [path for room in rooms for path in sorted((ROOT / room).rglob("*")) if path.suffix in suffixes]
    return found + [path for path in sorted(ROOT.glob("*")) if path.suffix in suffixes]


def test_no_file_knows_this_machine() -> None:
    """Paths of the machine a file was written on work nowhere else."""
    home = re.compile(r"/(?:work|home|root|Users)/[A-Za-z0-9_.]")
    wrong = []
    for path in sources():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if home.search(line)
        ]
    assert wrong == []


# What turns bytes into objects by running what the bytes say, by the last two parts of the name that is called
UNPICKLES = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.load", "cPickle.loads", "dill.load", "dill.loads"),
    *("cloudpickle.load", "cloudpickle.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "numpy.load", "np.load"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
SAFELY = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
WRITES = {
    "write_text",
    "write_bytes",
    "savefig",
    "imsave",
    "json.dump",
    "np.save",
    "numpy.save",
    "torch.save",
    "tofile",
}
# core.files is how files are written; the launcher writes /etc/hosts of a namespace that dies with it
MAY_WRITE = {"gradwire.core.files", "gradwire.testbed.launch"}


@cache
def called(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call, with the dotted name of what is called, import aliases resolved."""
    found = []
    real: dict[str, str] = {}
    for node in by_kind(tree)[ast.Import]:
        real |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in by_kind(tree)[ast.ImportFrom]:
        real |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in by_kind(tree)[ast.Call]:
        first, _, rest = dotted(node.func).partition(".")
        found.append((real.get(first, first) + (rest and "." + rest), node))
    return found


def dotted(function: ast.expr) -> str:
    """The text of what is called. Names with dots, which most are, need no unparsing."""
    names: list[str] = []
    node = function
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else ast.unparse(node), *names])


def is_one_of(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return name in names or ".".join(parts[-2:]) in names or (len(parts) > 1 and parts[-1] in names - {"eval", "exec"})


def unpickling(tree: ast.AST) -> list[str]:
    wrong = []
    for name, call in called(tree):
        safe = SAFELY.get(".".join(name.split(".")[-2:]))
        if safe is not None:
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
            if given.get(safe[0], not safe[1]) is not safe[1]:
                wrong.append(f"{name} without {safe[0]}={safe[1]} in line {call.lineno}")
        elif is_one_of(name, UNPICKLES):
            wrong.append(f"{name} in line {call.lineno}")
    return wrong


def writing(tree: ast.AST) -> list[str]:
    """Calls that write a file: by name, or `open` with a mode other than reading."""
    wrong = []
    for name, call in called(tree):
        modes = [arg.value for arg in [*call.args[:2], *(k.value for k in call.keywords if k.arg == "mode")]
                 if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]  # fmt: skip
        opens = name in ("open", "io.open") or name.endswith((".open", ".fdopen"))
        opens &= any(re.fullmatch(r"[rwaxbt+]{1,3}", mode) and set(mode) & set("wax+") for mode in modes)
        if opens or is_one_of(name, WRITES):
            wrong.append(f"{name} in line {call.lineno}")
    return wrong


def test_nothing_is_unpickled() -> None:
    """What comes from the wire or a file is read as the format that it should be, and runs nothing."""
    assert [f"{module}: {each}" for module in MODULES for each in unpickling(parse(module))] == []


def test_files_are_written_by_the_one_helper() -> None:
    into_memory = {"gradwire.report.pictures": "savefig", "gradwire.integrations.handles": "torch.save"}
    wrong = [
        f"{module}: {each}"
        for module in MODULES.keys() - MAY_WRITE
        for each in writing(parse(module))
        if into_memory.get(module, "\n") not in each
    ]
    assert wrong == [], "write_whole of gradwire.core.files leaves no half-written file"


def test_these_rules_see_what_they_are_for() -> None:
    bad = [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.load(f)",
        "from pickle import loads\nloads(b'')",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list(a)",
        "eval('1')",
        "exec(code)",
        "import yaml\nyaml.load(f)",
    ]
    assert [code for code in bad if not unpickling(ast.parse(code))] == []
    good = ["import torch\ntorch.load(f, weights_only=True)", "model.eval()", "json.loads(text)", "Plan.load(path)"]
    assert [code for code in good if unpickling(ast.parse(code))] == []
    bad = [
        *(
            "path.write_text('')",
            "open(path, 'w')",
            "open(path, mode='ab')",
            "path.open('w')",
            "os.fdopen(handle, 'wb')",
        ),
        *("figure.savefig(path)", "import json\njson.dump(a, f)", "import torch\ntorch.save(a, path)"),
    ]
    assert [code for code in bad if not writing(ast.parse(code))] == []
    good = ["open(path)", "path.open()", "open(path, 'rb')", "path.read_text()", "os.open(os.devnull, os.O_WRONLY)"]
    assert [code for code in good if writing(ast.parse(code))] == []


def test_no_name_of_the_kernels_is_used_twice() -> None:
    """Their headers share one namespace per SIMD level: a constant of the same name elsewhere would silently be taken."""
    defined: dict[str, list[str]] = {}
    for header in sorted((ROOT / "csrc").glob("*.hpp")):
        for line in header.read_text().splitlines():
            if line.startswith("constexpr"):
                for name in re.findall(r"\b(k[A-Z]\w*)(?:\[\d*\])?\s*=", line):
                    defined.setdefault(name, []).append(header.name)
    assert len(defined) > 10
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_simd_levels_share_no_function() -> None:
    """The linker would keep one level's copy for all: a processor without its instructions would end the process."""
    for header in ("kernels.hpp", "sparse_layout.hpp"):  # what is outside the levels' own namespaces
        text = (ROOT / "csrc" / header).read_text()
        assert re.findall(r"^(?:constexpr |template.*)*inline .*", text, re.MULTILINE) == []
        assert "static inline" in text
