"""The key of Inductor's disk cache changes with every file that decides what is compiled."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fuseopt
from fuseopt.training import code_key, inductor_patterns, partitioner

PACKAGE = Path(fuseopt.__file__).parent


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A copy of the package's sources, from which the keys are computed."""
    copy = tmp_path / "fuseopt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("csrc", "_lib", "__pycache__", "*.so"))
    monkeypatch.setattr(code_key, "_PACKAGE", copy)
    return copy


KEYS: dict[str, Callable[[], object]] = {
    "partitioner": lambda: partitioner.Partitioner(in_regions=True).uuid(),
    "joint graph pass": lambda: inductor_patterns._Pass(lambda graph: None).uuid(),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_every_file_of_ops_and_traced_modules_is_in_the_key_of_compiled_code(package, key):
    def fresh() -> object:
        code_key.get_hash_for_files.cache_clear()  # a process reads its files once
        return key()

    files = [
        path
        for folder in ("blocks", "modules", "ops", "runtime", "training", "tuning")
        for path in (package / folder).rglob("*")
        if path.is_file()
    ]
    files += [*(package / "tuning").glob("*.py"), *(package / "tuning").glob("*.inc")]
    assert len(files) > 80 and package / "ops" / "triton" / "rms_norm.py" in files
    before = fresh()
    assert fresh() == before
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        assert fresh() != before, file
        file.write_bytes(content)
    assert fresh() == before
    for new in ("training/deeper/new_pass.py", "ops/new_op.py", "tuning/sm_90.py", "tuning/sm_90.json"):
        path = package / new
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
        assert fresh() != before, new
        path.unlink()
        assert fresh() == before
