"""A library of two tiny sources that compiles in a fraction of a second, for the tests of the loader."""

from pathlib import Path

import pytest

from fuseopt.build import loader, prebuilt, toolchain

SOURCES = {
    "dtypes.h": "constexpr int kAnswer = 42;\n",
    "cpu/answer.cpp": '#include "../dtypes.h"\nextern "C" __attribute__((visibility("default"))) int answer() '
    "{ return kAnswer; }\n",
    "cpu/other.cpp": "int other() { return 0; }\n",
}


@pytest.fixture
def csrc(tmp_path, monkeypatch) -> Path:
    """A source folder of the test's own, an empty cache folder, and a loader that has seen nothing yet."""
    folder = tmp_path / "csrc"
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(toolchain, "CSRC", folder)
    monkeypatch.setattr(loader, "_settled", {})
    monkeypatch.setattr(loader, "_not_loadable", {})
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "_lib")
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSEOPT_NO_BUILD", raising=False)
    loader._recipe.cache_clear()
    yield folder
    loader._recipe.cache_clear()


@pytest.fixture
def logging_compiler(tmp_path, monkeypatch) -> Path:
    """CXX set to a compiler that writes its arguments to a file, the one returned, a line a call."""
    log = tmp_path / "compiler.log"
    log.touch()
    compiler = tmp_path / "logging-c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log
