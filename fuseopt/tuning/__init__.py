"""Numbers that were measured on a GPU, one `sm_*.inc` file per major compute capability; see README.md.

C++ includes the same files (`csrc/cuda/common/tuning.h`), so a number has one place.
"""

import math
import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
BASE = 9
"""The major compute capability whose file has every number, and that all other GPUs start from."""

_ENTRY = re.compile(r"^TUNED\((\w+), ([^)]+)\)$", re.MULTILINE)


def path_of(major: int) -> Path:
    """The file of a major compute capability."""
    return FOLDER / f"sm_{10 * major}.inc"


def read_table(path: Path) -> dict[str, int]:
    """The numbers of one file by name, in its order.

    Raises:
        ValueError: a value is no product of integers, or a name occurs twice.
    """
    table: dict[str, int] = {}
    for name, value in _ENTRY.findall(path.read_text(encoding="utf-8")):
        if name in table:
            raise ValueError(f"{path.name}: {name} occurs twice")
        table[name] = math.prod(int(factor.replace("'", "")) for factor in value.split("*"))
    return table


def _read_all() -> dict[int, dict[str, int]]:
    """Each file's numbers on top of the base's, by major compute capability, in ascending order."""
    majors = sorted(int(path.stem.removeprefix("sm_")) // 10 for path in FOLDER.glob("sm_*.inc"))
    base = read_table(path_of(BASE))
    tables = {}
    for major in majors:
        own = read_table(path_of(major))
        unknown = own.keys() - base.keys()
        if unknown:
            raise ValueError(f"{path_of(major).name}: {', '.join(sorted(unknown))} not in {path_of(BASE).name}")
        tables[major] = base | own
    return tables


# Read once: what torch.compile traces looks numbers up in a dictionary.
_TABLES = _read_all()


def table_of(major: int) -> dict[str, int]:
    """The numbers for a GPU: of the newest file that is not newer than the GPU, or the base's for older GPUs."""
    return _TABLES[max((known for known in _TABLES if known <= major), default=BASE)]


def tuned(name: str, device: torch.device) -> int:
    """A number for the GPU `device`, or the base's if that is no GPU.

    Raises:
        KeyError: there is no such number.
    """
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return table_of(torch.cuda.get_device_capability(device)[0] if is_gpu else BASE)[name]


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 132, an H200's, for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _MEASURED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


_MEASURED_MULTIPROCESSORS = 132


def write(major: int, values: dict[str, int], found: str) -> Path:
    """Write measured numbers into the file of a compute capability, which is created if need be.

    Args:
        values: by name; the base file must have each.
        found: how they were found: one line, after `TUNED:` above each number that is new to the file.

    Raises:
        KeyError: a name that the base file does not have.
    """
    path, base = path_of(major), read_table(path_of(BASE))
    if path.exists():
        text = path.read_text(encoding="utf-8")
    else:
        text = f"// Differences of compute capability {major}.x from {path_of(BASE).name}.\n"
    for name, value in values.items():
        if name not in base:
            raise KeyError(f"{path_of(BASE).name} has no {name}")
        line = f"TUNED({name}, {value})"
        entry = re.search(rf"(?m)^(// TUNED: .*\n(?:// .*\n)*)?TUNED\({name}, [^)]+\)$", text)
        new = f"// TUNED: {found}\n{line}"
        text = f"{text}\n{new}\n" if entry is None else text[: entry.start()] + new + text[entry.end() :]
    path.write_text(text, encoding="utf-8")
    return path
