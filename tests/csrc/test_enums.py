"""Every value of an enum is thought of wherever one is chosen by: a new one is an error there, and no silent default.

Compilers see that in host code (-Werror=switch), and nvcc does not in a kernel.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from fuseopt.build import toolchain

SOURCES = sorted(path for path in toolchain.CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
# How the code goes on where a value is none of the cases: it raises, or says that it does not take it.
LOUD = re.compile(r"default:\s*(?:\w+\(|FUSEOPT_CHECK\(false|TORCH_CHECK\(false|return false;|break;)")


def enums() -> list[tuple[str, set[str]]]:
    """Names and values of all enums of a namespace or class."""
    pattern = r"enum (?:class )?(\w+)(?: : \w+)? \{([^}]*)\}"
    found = [match for path in SOURCES for match in re.findall(pattern, path.read_text())]
    return [(name, set(re.findall(r"(k\w+)", values))) for name, values in found]


def switches() -> list[tuple[str, str]]:
    """Places of all switches, and their text from `switch` to the end."""
    found = []
    for path in SOURCES:
        text = path.read_text()
        for match in re.finditer(r"\bswitch \(", text):
            end, depth = text.index("{", match.start()) + 1, 1
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            found.append((f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}", text[match.start() : end]))
    return found


def test_no_two_enums_share_a_name() -> None:
    """Of one namespace, they would be one type to the linker."""
    assert [name for name, count in Counter(name for name, _ in enums()).items() if count > 1] == []


@pytest.mark.parametrize(("place", "text"), switches(), ids=lambda value: value if len(value) < 50 else "")
def test_no_switch_has_a_silent_default(place: str, text: str) -> None:
    default = re.search(r"default:.*", text)
    cases = set(re.findall(r"case (?:\w+::)*(k\w+)", text))
    if default is not None:
        assert LOUD.match(default[0]) or cases == set(), f"{place}: {default[0]}"
        return
    enum = re.search(r"static_cast<(\w+)>", text[: text.index("{")])
    candidates = [values for name, values in enums() if enum is None or name == enum[1]]
    assert any(cases == values for values in candidates), f"{place}: {sorted(cases)}"


def test_host_code_that_forgets_a_value_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "forgets.cpp"
    source.write_text("enum E { kA, kB }; int f(E e) { switch (e) { case kA: return 1; } return 0; }")
    command = [*toolchain.cpu_recipe().compile_commands[".cpp"], "-c", str(source), "-o", str(tmp_path / "forgets.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0 and "kB" in result.stderr
    source.write_text(source.read_text().replace("case kA:", "case kB: case kA:"))
    assert subprocess.run(command, capture_output=True).returncode == 0
