"""A compiler's words: the first error with file and line in the message, all of them in a file."""

import re

import pytest

from fuseopt.build.compiler_messages import build_error

NOTES = "".join(f"/usr/include/algo.h:{line}:5: note: candidate {line}\n    {line} | sort\n" for line in range(60))
GCC = (
    "FAILED: [code=1] a.o\nc++ -Werror=switch -c a.cpp\nIn file included from a.cpp:1:\n"
    f"a.cpp:7:42:   required from here\n/usr/include/algo.h:45:23: error: no match for operator<\n"
    f"   45 |       return a < b;\n      |              ^\n{NOTES}a.cpp:9:1: error: no member named foo\n"
)
NVCC = 'a.cu(1): warning #177-D: unused\n\na.cu(3): error: identifier "y" is undefined\n    p[0] = y;\n           ^\n'
LINKER = "/usr/bin/ld: a.o: in function `main':\na.cpp:(.text+0x5): undefined reference to `g()'\ncollect2: error: ld\n"


@pytest.mark.parametrize(
    ("said", "shown", "others"),
    [
        (GCC, "\n".join(GCC.splitlines()[3:7]), "1 more, and all"),
        (NVCC, "\n".join(NVCC.splitlines()[2:]), "all"),
        (LINKER, "a.cpp:(.text+0x5): undefined reference to `g()'", "1 more, and all"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_3'\n", None, "all"),
        ("out\nof\norder\n", None, "all"),
    ],
)
def test_the_first_error_is_shown_and_the_rest_kept(said, shown, others, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    message = str(build_error("mine::op does not compile", ["c++", "a b.cpp"], said))
    (log,) = tmp_path.iterdir()
    wanted = f"mine::op does not compile:\n{shown or said.strip()}\n{others} that the compiler said: {log}"
    assert message == wanted
    assert log.read_text() == f"c++ 'a b.cpp'\n\n{said}"


def test_without_a_folder_for_the_log_everything_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    message = str(build_error("it fails", ["c++"], GCC))
    assert GCC in message and re.search(r"c\+\+ \(no log is written: .*absent", message)
