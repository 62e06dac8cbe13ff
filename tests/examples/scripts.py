"""Loading and running the scripts in examples/."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    """The script examples/`name`.py as a module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training_config(folder: Path) -> str:
    """A file with the preset `training`, but without code generation, which takes most of the time on a CPU."""
    fusion = {"memory_efficient_fusion": {"backend": "aot_eager"}, "triton_kernels": ["FusedLinearCrossEntropy"]}
    path = folder / "training.json"
    path.write_text(json.dumps({"kernel_fusion": fusion}))
    return str(path)


def losses_of(printed: str) -> dict[str, list[float]]:
    """First and last loss in the rows `stock` and `fused` of a printed table."""
    rows = [line.split() for line in printed.splitlines() if line.startswith(("stock ", "fused "))]
    return {row[0]: [float(row[1]), float(row[2])] for row in rows}
