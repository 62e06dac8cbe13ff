"""py.typed holds: `mypy --strict` accepts a user's script on an installed fuseopt, and finds the faults in another."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import fuseopt

TESTS = Path(__file__).parent
FAULTS = {
    "fuseopt.initialise(nn.Linear(2, 2))": "attr-defined",
    'fuseopt.initialize(nn.Linear(2, 2), strict="yes")': "arg-type",
    "fuseopt.initialize([1])": "type-var",
    "number: int = fuseopt.plan(nn.Linear(2, 2))": "assignment",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Python of an environment in which the package is installed, as a folder with its py.typed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "fuseopt").symlink_to(Path(fuseopt.__file__).parent)
    (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "python"


def strict_mypy(script: Path, installed: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", installed]
    cache = installed.parents[1] / "cache"
    result = subprocess.run(
        [*command, "--cache-dir", cache, script], cwd=script.parent, capture_output=True, text=True, timeout=500
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_strict_mypy_accepts_a_users_script_and_finds_faults(installed, tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text((TESTS / "typed_user.py").read_text(encoding="utf-8"))
    assert "Success: no issues found" in strict_mypy(script, installed)

    wrong = tmp_path / "wrong.py"
    wrong.write_text("\n".join(("from torch import nn", "import fuseopt", *FAULTS)))
    found = re.findall(r"^wrong\.py:(\d+): error: .*\[([\w-]+)\]$", strict_mypy(wrong, installed), re.MULTILINE)
    assert found == [(str(line), code) for line, code in enumerate(FAULTS.values(), 3)]
    unknown = set(re.findall(r"fuseopt\.(\w+)", script.read_text())) - set(fuseopt.__all__)
    assert unknown == set()
