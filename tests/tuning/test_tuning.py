"""The tables of measured numbers: what Python and C++ read, for which GPU, and what `write` changes."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fuseopt import tuning
from fuseopt.build import toolchain
from fuseopt.cli import _parser
from fuseopt.generation.engine import state

PACKAGE = tuning.FOLDER.parent
FILES = sorted(tuning.FOLDER.glob("sm_*.inc"))
SOURCES = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")]
PRINT_ALL = """
#include <cstdio>
#include <initializer_list>
#include "cuda/common/tuning.h"
#define TUNED(name, value) std::printf("%s %lld\\n", #name, static_cast<long long>(table.name));
int main() {
  for (const auto& table : {fuseopt::kTuningOfSm80, fuseopt::kTuningOfSm90, fuseopt::kTuningOfSm100,
                            fuseopt::kTuningOfSm120}) {
#include "../tuning/sm_90.inc"
  }
}
"""


def test_cpp_and_python_read_the_same_numbers(tmp_path: Path) -> None:
    try:
        include = toolchain.toolkit_root(toolchain.find_nvcc()) / "include"
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    source, program = tmp_path / "print.cpp", tmp_path / "print"
    source.write_text(PRINT_ALL)
    # What the header asks of a device is not called.
    command = ["g++", "-std=c++17", f"-I{toolchain.CSRC}", f"-isystem{include}", str(source), "-o", str(program)]
    subprocess.run([*command, "-no-pie", "-Wl,--unresolved-symbols=ignore-all"], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    read = [f"{name} {value}" for major in (8, 9, 10, 12) for name, value in tuning.table_of(major).items()]
    assert printed == read and len(read) > 100


def test_cpp_includes_the_file_of_every_capability() -> None:
    header = (toolchain.CSRC / "cuda/common/tuning.h").read_text()
    assert re.findall(r'#include "../tuning/(sm_\d+\.inc)"', header) == sorted(
        (path.name for path in FILES), key=lambda name: (name != "sm_90.inc", int(name[3:-4]))
    )


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), 640), ((8, 9), 640), ((9, 0), 640), ((11, 0), 640), ((12, 1), 160)]
)
def test_a_gpu_reads_the_newest_file_that_is_not_newer(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tuning.tuned("decode_linear_max_long_work", torch.device("cuda")) == expected * 10**6
    assert tuning.tuned("decode_linear_max_long_work", torch.device("cpu")) == 640 * 10**6


def test_the_limit_of_a_prompt_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8 + device.index, 0))
    monkeypatch.setitem(tuning.table_of(9), "prompt_free_padding_tokens", 64)
    older, newer = torch.device("cuda", 0), torch.device("cuda", 1)
    assert [state.prompt_length_for(1, 65, device) for device in (older, newer)] == [128, 80]


def test_an_unknown_name_raises() -> None:
    with pytest.raises(KeyError, match="no_such"):
        tuning.tuned("no_such", torch.device("cpu"))


def test_every_number_is_read_and_says_how_it_was_found() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    for name in tuning.table_of(tuning.BASE):
        assert re.search(rf"tuning\(\)\.{name}\b|\"{name}\"", text), name
    for path in FILES:
        is_explained = False
        for line in path.read_text().splitlines():
            is_explained = line.startswith("// TUNED: ") or (is_explained and line.startswith(("//", "TUNED")))
            assert is_explained or not line.startswith("TUNED"), line


def test_no_other_place_counts_multiprocessors() -> None:
    """132 is an H200's number of them: code asks the device."""
    found = [path.name for path in SOURCES if re.search(r"\b132\b", path.read_text())]
    assert found == ["__init__.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def test_write_replaces_a_number_and_how_it_was_found(folder: Path) -> None:
    before = tuning.read_table(folder / "sm_90.inc")
    tuning.write(9, {"decode_linear_long_k": 2048}, "by a test")
    tuning.write(9, {"decode_linear_long_k": 1024}, "again")
    assert tuning.read_table(folder / "sm_90.inc") == before | {"decode_linear_long_k": 1024}
    text = (folder / "sm_90.inc").read_text()
    assert "// TUNED: again\nTUNED(decode_linear_long_k, 1024)" in text and "by a test" not in text
    assert text.count("// TUNED:") == (PACKAGE / "tuning" / "sm_90.inc").read_text().count("// TUNED:")


def test_write_adds_to_the_file_of_another_capability(folder: Path) -> None:
    tuning.write(10, {"decode_linear_max_work": 7, "decode_linear_long_k": 8}, "by a test")
    assert tuning.read_table(folder / "sm_100.inc") == {"decode_linear_max_work": 7, "decode_linear_long_k": 8}
    tuning.write(13, {"decode_linear_max_work": 9}, "by a test")
    assert tuning.read_table(folder / "sm_130.inc") == {"decode_linear_max_work": 9}
    with pytest.raises(KeyError, match="no_such"):
        tuning.write(9, {"no_such": 1}, "by a test")


def test_a_name_that_occurs_twice_raises(folder: Path) -> None:
    with (folder / "sm_120.inc").open("a") as file:
        file.write("TUNED(decode_linear_max_long_work, 1)\n")
    with pytest.raises(ValueError, match="occurs twice"):
        tuning.read_table(folder / "sm_120.inc")


# Constants that are compiled into a kernel, by the end of their name: numbers, or a choice of two. `kMax` is a limit.
IN_CUDA = re.compile(
    r"^ *(?:static )?constexpr \w+ "
    r"(k(?!Max)\w*(?:Loads|Held|Elements|PerProcessor|PerThread|Stages|Unroll|Warps|Tiles))"
    r" = (?:\d+|[^;/]+ \? [^;/]+)[;,]",
    re.MULTILINE,
)
IN_TRITON = re.compile(r"^([A-Z_]*(?:TILING|TILES|WARPS|BYTES|ELEMENTS|PROGRAMS)) = (?:Til|\d)", re.MULTILINE)


def untagged(text: str, constant: re.Pattern[str]) -> list[str]:
    """Constants with no `TUNED:` between the last blank line and themselves."""
    return [match[1] for match in constant.finditer(text) if "TUNED:" not in text[: match.end()].split("\n\n")[-1]]


def test_what_is_compiled_into_kernels_says_how_it_was_found() -> None:
    assert untagged("constexpr int kA = 1;  // TUNED: no\n\nconstexpr int kLoads = 4;\n", IN_CUDA) == ["kLoads"]
    assert not untagged("// TUNED: yes\nconstexpr int kLoads = 4;\n", IN_CUDA)
    kernels = (PACKAGE / "csrc" / "cuda").rglob("*.cu*")
    found = {f"{path.name} {name}" for path in kernels for name in untagged(path.read_text(), IN_CUDA)}
    triton = (PACKAGE / "ops" / "triton").glob("*.py")
    found |= {f"{path.name} {name}" for path in triton for name in untagged(path.read_text(), IN_TRITON)}
    assert found == set()


def test_a_number_without_a_measurement_names_the_command_that_measures_it() -> None:
    tags = [
        re.sub(r"\n\s*(//|#)", "", tag[0])
        for path in (*SOURCES, *FILES)
        for tag in re.finditer(r"(//|#) TUNED: .*(\n\s*\1 .*)*", path.read_text(encoding="utf-8"))
    ]
    commands = [re.findall(r"`fuseopt (.*?)`", tag) for tag in tags if "measurement not recorded" in tag]
    assert len(commands) > 40 and all(commands)
    for command in {each for found in commands for each in found}:
        _parser().parse_args(command.split())
    assert not [tag for tag in tags if re.search(r"TUNED: with [^;:,]*\([\w, ]+\)\.$", tag)]
