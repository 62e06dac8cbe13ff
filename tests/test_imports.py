"""Which layer may import which, and that importing fuseopt stays light."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fuseopt

PACKAGE = Path(fuseopt.__file__).parent
# From the bottom up: a module imports from its own layer and those before it.
LAYERS = (
    {
        "_version",
        "moved_modules",
        "errors",
        "dotted_path",
        "kernel_table",
        "config_checks",
        "config_file",
        "config_fusion",
        "config",
        "module_paths",
        "measurements",
        "tables",
        "report",
        "csrc",
        "build",
        "tuning",
    },
    {"ops"},
    {"runtime"},
    {"modules"},
    {"blocks", "training"},
    {"generation", "models", "model_index", "plan", "apply"},
    {"strategies"},
    {"api", "__init__", "verify", "verify_inputs", "verify_low_bit", "verify_runs", "verify_watch", "auto", "extend"},
    {"bench", "cli", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Inside of a layer: what a module or folder never imports.
NEVER = {
    "fuseopt.bench.harness": ("fuseopt.bench.suites",),
    "fuseopt.blocks": ("fuseopt.training",),
    "fuseopt.training": ("fuseopt.blocks",),
    "fuseopt.training.passes": tuple(
        f"fuseopt.training.{driver}"
        for driver in ("captured_steps", "early_kernels", "forward", "partitioner", "regional_compile", "step_graphs")
    ),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(path: Path, *, for_types: bool = True) -> set[str]:
    """Full names of the modules a file imports, inside functions too, and with `for_types` under TYPE_CHECKING."""
    names = set()
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def modules_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE).with_suffix("")
    return ".".join(("fuseopt", *(part for part in relative.parts if part != "__init__")))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_point_one_way(path):
    own = LEVEL[layer(modules_of(path))]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "fuseopt" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= own, f"{path} imports {name} from a layer above its own"


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", NEVER)
def test_what_a_folder_never_imports(package):
    paths = [path for path in FILES if is_inside(modules_of(path), package)]
    assert len(paths) > 5
    for path in paths:
        for name in imported(path):
            assert not any(is_inside(name, other) for other in NEVER[package]), f"{path} imports {name}"


def test_no_modules_import_each_other():
    """Packages are left out: each imports its modules. So are imports for type checkers alone."""
    modules = {modules_of(path): path for path in FILES if path.name != "__init__.py"}
    graph = {name: imported(path, for_types=False) & modules.keys() - {name} for name, path in modules.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules) > 100


@pytest.mark.parametrize("layer_name", ["build", "ops", "runtime", "modules"])
def test_these_layers_never_import_transformers(layer_name):
    paths = [path for path in FILES if layer(modules_of(path)) == layer_name]
    assert paths
    for path in paths:
        assert not any(name.split(".")[0] == "transformers" for name in imported(path)), path


# One process for all, since it imports torch for seconds. What a step has imported stands behind its name.
LIGHT = """
import gc, json, sys, time, torch
gc.freeze()  # a search of all that torch has made may fall into what is timed, or not
found = {}
def note(step):
    names = ("transformers", "triton", "torch._dynamo", "torch._inductor")
    found[step] = [name for name in names if name in sys.modules]
start = time.process_time(); import fuseopt.api; found["seconds"] = time.process_time() - start
note("fuseopt")
found["cuda"] = torch.cuda.is_initialized()
import fuseopt.ops
note("fuseopt.ops")
from fuseopt.cli import main
main(["env", "--json"])
note("env")
print(json.dumps(found))
"""


def test_importing_fuseopt_and_its_ops_and_describing_the_machine_is_light():
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
        found = json.loads(result.stdout.splitlines()[-1])
        assert found["fuseopt"] == [] and not found["cuda"]
        assert not {"transformers", "triton", "torch._dynamo"} & set(found["fuseopt.ops"])
        assert not {"transformers", "triton"} & set(found["env"])
        if found["seconds"] < 0.3:
            break
    assert found["seconds"] < 0.3


# Whatever fuseopt imports lazily under a name that is also a function's: the function stays, whichever comes first.
LAZY = """
import sys
import fuseopt
assert not {"torch", "transformers"} & sys.modules.keys()
from fuseopt.plan import Plan
import fuseopt.report, fuseopt.verify
for function in (fuseopt.plan, fuseopt.report, fuseopt.verify):
    assert sys.modules["fuseopt.api"].__dict__[function.__name__] is function
assert fuseopt.errors is sys.modules["fuseopt.errors"] and fuseopt.Plan is Plan
assert not hasattr(fuseopt, "never_was") and {*fuseopt.__all__} <= {*dir(fuseopt)}
for name in fuseopt.__all__:
    getattr(fuseopt, name)
"""


def test_importing_the_package_imports_no_torch_and_its_functions_stay_functions():
    subprocess.run([sys.executable, "-c", LAZY], check=True)


# What two threads import for their first calls: a step's kernels are compiled in threads.
TOGETHER = """
from concurrent.futures import ThreadPoolExecutor
import torch, fuseopt.ops
from fuseopt.ops.library import triton_function
ops = torch.ops.fuseopt.relative_attention_line.triton, torch.ops.fuseopt.relative_attention_fwd.triton
with ThreadPoolExecutor(2) as threads:
    assert [found.__name__ for found in threads.map(triton_function, ops)] == [op._opname for op in ops]
"""


def test_threads_that_first_call_kernels_at_the_same_time_find_them():
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", TOGETHER], check=True)
