"""DESIGN 1, held by tests: which file may import which, how long a file may be, and what may not be written at all.

The checks are functions of (files -> faults), so that `test_every_check_bites` can hand each of them a planted fault.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [  # lowest first; an import goes to a lower floor
    {"config", "settings", "ledger", "shape", "balance", "memory", "scheduler", "losses", "grade", "sandbox", "transfer",
     "resume", "channel", "kernels", "hardware", "costs", "sheet", "fleet"},
    {"model", "sync", "checkpoint", "data", "reward", "parallel", "optimizer"},
    {"runner", "sharding", "packing", "watch"},
    {"guard"},
    {"actor", "learner", "launch"},
    {"calibrate", "rollout"},
    {"plan", "simulate", "report", "director"},
    {"preference"},
    {"train"},
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
SIDEWAYS = {("ledger", "config"), ("settings", "config"), ("shape", "config"), ("costs", "shape"),
            ("costs", "hardware"), ("fleet", "costs"),
            ("fleet", "hardware"), ("fleet", "scheduler"), ("fleet", "shape"), ("fleet", "balance"),
            ("sheet", "costs"), ("sheet", "hardware"), ("sheet", "shape"), ("director", "plan")}  # arrows within a floor
SHARED_BY_KERNELS = "compiled"  # holds no operation
FOR_ALL = {"config", "settings", "ledger"}
NOT_OURS_TO_IMPORT = {"tests", "bench", "configs", "conftest"}
BROAD_EXCEPTS = {"reward.py": 1}  # a process boundary: whatever a user's reward function raises
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

Files = dict[str, str]  # path relative to the root -> source


def house() -> Files:
    """Every .py of the project except those of tests, benchmarks, hidden folders and run folders."""
    skipped = {"tests", "bench", "runs"}
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    return {str(path): (ROOT / path).read_text() for path in paths
            if path.parts[0] not in skipped and not any(part.startswith(".") for part in path.parts)}


def imported(source: str) -> list[str]:
    """Dotted names of all imports, also those in functions; `from a import b` gives `a.b`, a relative one starts with a dot."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            found += [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return found


def wrong_arrows(files: Files) -> list[str]:
    """Imports that do not go strictly down, and files that have no place in the house."""
    faults = []
    submodules = {Path(path).stem for path in files if path.startswith("kernels/")} - {"__init__", SHARED_BY_KERNELS}
    for path, source in files.items():
        in_kernels = path.startswith("kernels/")
        name = "kernels" if in_kernels else path.removesuffix(".py")
        if name not in FLOOR_OF:
            faults.append(f"{path} has no place in the house")
            continue
        for target in imported(source):
            first, _, rest = target.partition(".")
            if in_kernels and (first == "" or first == "kernels"):
                if first == "" or rest.split(".")[0] in submodules or path == f"kernels/{SHARED_BY_KERNELS}.py":
                    faults.append(f"{path} imports {target} sideways")
            elif in_kernels and first in FLOOR_OF and first != "config":
                faults.append(f"{path} imports {target}: a kernel may import only config")
            elif first in NOT_OURS_TO_IMPORT or first == "":
                faults.append(f"{path} imports {target}")
            elif first in FLOOR_OF and not in_kernels:
                allowed = FLOOR_OF[first] < FLOOR_OF[name] or (name, first) in SIDEWAYS
                if not allowed and not (first in FOR_ALL and name not in ("config", "settings", "ledger", "shape")):
                    faults.append(f"{path} imports {target} sideways or up")
    return faults


def over_budget(files: Files) -> list[str]:
    """Files and a whole that have grown beyond DESIGN's line budgets."""
    lengths = {path: len(source.splitlines()) for path, source in files.items()}
    limits = {path: 350 if path == "train.py" else 250 if path.startswith("kernels/") else 500 for path in files}
    faults = [f"{path}: {lengths[path]} lines, at most {limits[path]}" for path in files if lengths[path] > limits[path]]
    total = sum(length for path, length in lengths.items() if not path.startswith(("tests/", "bench/")))
    return faults + ([f"the house: {total} lines, at most 12000"] if total > 12000 else [])


def stdlib_names(files: Files) -> list[str]:
    """Modules that would hide one of the standard library from every import in the process."""
    return [path for path in files if "/" not in path and path.removesuffix(".py") in sys.stdlib_module_names]


def broad_excepts(files: Files) -> list[str]:
    """`except:`, `except Exception`, `except BaseException` and `suppress(Exception)`, beyond the allowance."""
    faults = []
    for path, source in files.items():
        lines = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
                caught = node.args
            else:
                continue
            if any(kind is None or ast.unparse(kind).rpartition(".")[2] in ("Exception", "BaseException") for kind in caught):
                lines.append(node.lineno)
        faults += [f"{path}:{line} catches everything" for line in sorted(lines)[BROAD_EXCEPTS.get(path, 0):]]
    return faults


def unpickling(files: Files) -> list[str]:
    """Ways to run code out of a file or a message: pickle and its relatives, torch.load, numpy's allow_pickle."""
    faults = []
    for path, source in files.items():
        names = imported(source)
        faults += [f"{path} imports {name}" for name in names if name.split(".")[0] in UNPICKLERS or name == "torch.load"]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "th.load"):
                faults.append(f"{path}:{node.lineno} torch.load")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                faults.append(f"{path}:{node.value.lineno} allow_pickle")
    return faults


def unfinished(files: Files) -> list[str]:
    """Notes to self that were committed."""
    return [f"{path}:{number} {line.strip()}" for path, source in files.items()
            for number, line in enumerate(source.splitlines(), 1) if any(word in line for word in ("TODO", "FIXME", "XXX"))]


CHECKS = [wrong_arrows, over_budget, stdlib_names, broad_excepts, unpickling, unfinished]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_stands(check):
    """DESIGN 1: each import points strictly down, budgets hold, nothing is swallowed, unpickled or left unfinished."""
    assert check(house()) == []


def test_tests_and_benchmarks_stay_readable():
    """DESIGN 1: no file over 500 lines, tests and benchmarks included."""
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    assert over_budget({str(path.relative_to(ROOT)): path.read_text() for path in paths}) == []


KERNELS = {"kernels/__init__.py": "", "kernels/a.py": "", "kernels/b.py": ""}


@pytest.mark.parametrize("check, files", [
    (wrong_arrows, {"actor.py": "import learner"}),
    (wrong_arrows, {"learner.py": "def f():\n    from actor import Engine"}),
    (wrong_arrows, {"model.py": "from data import Prompts"}),
    (wrong_arrows, {"scheduler.py": "from losses import kl"}),
    (wrong_arrows, {"scheduler.py": "import importlib\nimportlib.import_module('model')"}),
    (wrong_arrows, {"losses.py": "from shape import Shape"}),
    (wrong_arrows, {"config.py": "import ledger"}),
    (wrong_arrows, {"shape.py": "import ledger"}),
    (wrong_arrows, {"plan.py": "import report"}),
    (wrong_arrows, {"simulate.py": "import train"}),
    (wrong_arrows, {"train.py": "from tests.test_house import house"}),
    (wrong_arrows, {"sync.py": "from . import model"}),
    (wrong_arrows, {"utils.py": ""}),
    (wrong_arrows, KERNELS | {"kernels/a.py": "from kernels import b"}),
    (wrong_arrows, KERNELS | {"kernels/a.py": "from kernels.b import f"}),
    (wrong_arrows, KERNELS | {"kernels/a.py": "from .b import f"}),
    (wrong_arrows, KERNELS | {"kernels/a.py": "import ledger"}),
    (wrong_arrows, KERNELS | {"kernels/a.py": "from losses import kl"}),
    (over_budget, {"actor.py": "\n" * 501}),
    (over_budget, {"train.py": "\n" * 351}),
    (over_budget, {"kernels/a.py": "\n" * 251}),
    (over_budget, {f"{number}.py": "\n" * 500 for number in range(24)} | {"last.py": "\n"}),
    (stdlib_names, {"queue.py": ""}),
    (broad_excepts, {"actor.py": "try:\n    f()\nexcept:\n    pass"}),
    (broad_excepts, {"actor.py": "try:\n    f()\nexcept (ValueError, Exception):\n    pass"}),
    (broad_excepts, {"reward.py": "try:\n    f()\nexcept Exception:\n    pass\n" * 2}),
    (broad_excepts, {"actor.py": "with contextlib.suppress(BaseException):\n    f()"}),
    (unpickling, {"sync.py": "def f():\n    import pickle"}),
    (unpickling, {"sync.py": "from torch import load"}),
    (unpickling, {"sync.py": "import torch\nx = torch.load('f')"}),
    (unpickling, {"sync.py": "x = np.load(f, allow_pickle=True)"}),
    (unfinished, {"sync.py": "x = 1  # TODO: faster"}),
])
def test_every_check_bites(check, files):
    """A check that finds nothing in a house with one planted fault would guard nothing."""
    assert len(check(files)) == 1


def test_allowed_arrows_are_allowed():
    """The other half: what DESIGN allows is not refused, else people route around the test."""
    assert wrong_arrows(KERNELS | {
        "kernels/a.py": "from kernels import ROW_PAD\nfrom config import ConfigError\nimport torch.nn.functional as F",
        "train.py": "import actor, learner, plan, model, scheduler, kernels.a\nfrom kernels import b",
        "reward.py": "from grade import verdict\nimport sandbox\nimport json", "simulate.py": "import sheet, scheduler",
        "director.py": "from plan import x", "shape.py": "from config import Config", "ledger.py": "import config",
        "model.py": "from shape import Shape\nimport ledger", "losses.py": "import ledger"}) == []
    assert broad_excepts({"reward.py": "try:\n    f()\nexcept Exception:\n    pass"}) == []
