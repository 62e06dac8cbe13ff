"""The wheel of `make wheel`: what is in it, and that an installation of it compiles nothing."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fuseopt.build import prebuilt, toolchain

ROOT = Path(__file__).parents[2]
PARTS = ("fuseopt", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what a wheel is made from, without libraries."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def wheel_of(checkout: Path) -> Path:
    out = checkout / "dist"
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, checkout)
    (wheel,) = out.iterdir()
    return wheel


def test_without_libraries_the_wheel_is_pure_python(checkout):
    pytest.importorskip("setuptools.command.bdist_wheel")
    wheel = wheel_of(checkout)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_an_installed_wheel_uses_its_libraries_and_compiles_nothing(checkout, tmp_path):
    pytest.importorskip("setuptools.command.bdist_wheel")
    run(sys.executable, "-m", "fuseopt.build.make_prebuilt", "--architectures", "90", cwd=checkout)
    wheel = wheel_of(checkout)
    assert "-py3-none-linux_" in wheel.name
    libraries = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert libraries == {"cpu", "python"} | ({"cuda"} if has_nvcc() else set())

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    # torch and the rest come from this environment, from behind what was installed.
    (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"])
    environment = {"PATH": "/nowhere", "CXX": "/nowhere/c++", "FUSEOPT_CACHE_DIR": str(tmp_path / "cache")}
    code = (
        "import torch, fuseopt, fuseopt.ops as ops; from fuseopt.build import loader; print(fuseopt.__file__)\n"
        "state = loader.load('cpu'); print(state.status, state.origin, state.passed_over)\n"
        "print(loader.state('python').origin, loader.python_library() is not None)\n"
        "x = torch.randn(3, 8); print((ops.gelu(x, backend='cpu') - torch.nn.functional.gelu(x)).abs().max() < 1e-6)"
    )
    said = run(python, "-I", "-c", code, **environment).splitlines()
    assert said[0].startswith(str(site))
    assert said[1:] == ["loaded prebuilt None", "prebuilt True", "tensor(True)"]
    assert not (tmp_path / "cache").exists()
    found = json.loads(run(python, "-I", "-m", "fuseopt", "env", "--json", **environment))["native code"]
    assert "available (prebuilt)" in found["cpu"]
    assert f"cpu: {prebuilt.Contents('', os.uname().machine, size=0)}" in found["prebuilt"]
    assert ("sm_90, PTX" in found["prebuilt"]) == has_nvcc()


def has_nvcc() -> bool:
    try:
        return bool(toolchain.find_nvcc())
    except toolchain.ToolchainError:
        return False
