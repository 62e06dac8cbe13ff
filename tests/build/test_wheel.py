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

import fuseopt
from fuseopt.build import prebuilt, toolchain
from tests import tiny

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "configs" / "kernels_gpt2.json"
PARTS = ("fuseopt", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,  # most of it compiles the CUDA library
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

    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # torch and the rest come from this environment, from behind what was installed.
    (site,) = environment.glob("lib/python*/site-packages")
    assert (site / "fuseopt" / "py.typed").exists()
    (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"])
    nothing = {"PATH": "/nowhere", "CXX": "/nowhere/c++", "FUSEOPT_CACHE_DIR": str(tmp_path / "cache")}
    code = (
        "import torch, fuseopt, fuseopt.ops as ops; from fuseopt.build import loader; print(fuseopt.__file__)\n"
        "state = loader.load('cpu'); print(state.status, state.origin, state.passed_over)\n"
        "print(loader.state('python').origin, loader.python_library() is not None)\n"
        "x = torch.randn(3, 8); print((ops.gelu(x, backend='cpu') - torch.nn.functional.gelu(x)).abs().max() < 1e-6)"
    )
    said = run(python, "-I", "-c", code, **nothing).splitlines()
    assert said[0].startswith(str(site))
    assert said[1:] == ["loaded prebuilt None", "prebuilt True", "tensor(True)"]

    command = environment / "bin" / "fuseopt"
    assert run(command, "--version", cwd=tmp_path, **nothing) == f"fuseopt {fuseopt.__version__}\n"
    tiny.gpt2().save_pretrained(tmp_path / "model")
    assert "-> FusedLayerNorm[cpu]" in run(command, "plan", "model", "--config", CONFIG, cwd=tmp_path, **nothing)
    said = run(command, "verify", "model", "--config", CONFIG, "--generate", "4", cwd=tmp_path, **nothing)
    assert "verify: ok, " in said and "tokens: the same" in said
    found = json.loads(run(command, "env", "--json", cwd=tmp_path, **nothing))["native code"]
    assert "available (prebuilt)" in found["cpu"]
    assert f"cpu: {prebuilt.Contents('', os.uname().machine, size=0)}" in found["prebuilt"]
    assert ("sm_90, PTX" in found["prebuilt"]) == has_nvcc()
    assert not (tmp_path / "cache").exists()


def has_nvcc() -> bool:
    try:
        return bool(toolchain.find_nvcc())
    except toolchain.ToolchainError:
        return False
