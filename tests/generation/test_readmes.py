"""The READMEs in generation/ name files, classes and functions that exist, and each file of their folder."""

import re
from pathlib import Path

import pytest

import fuseopt
import fuseopt.ops

PACKAGE = Path(fuseopt.__file__).parent / "generation"
FOLDERS = [PACKAGE, *(PACKAGE / name for name in ("engine", "hf", "prompt", "select"))]
# Of transformers, and attributes of instances; every other name in backticks has to be defined.
NOT_OURS = {"generate", "generate()", "generation", "self", "_sample", "_beam_search", "do_sample", "state.ids"}
NOT_OURS |= {"_get_logits_processor", "Selection.key"}


def rows(text):
    """The cells of each table row but the heads, by the table's own head."""
    for table in re.split(r"\n\n+", text):
        lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
        for line in lines[2:]:
            yield lines[0], [cell.strip() for cell in line]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def is_defined(name, text):
    """Whether the text defines a function, class or member `Owner.member`."""
    owner, _, member = name.removesuffix("()").rpartition(".")
    if owner:
        found = re.search(rf"^class {owner}\b.*?(?=^class |^def |\Z)", text, re.MULTILINE | re.DOTALL)
        return found is not None and re.search(rf"^    def {member}\(", found[0], re.MULTILINE) is not None
    return re.search(rf"^((class|def) {member}\b|{member}\b.* = )", text, re.MULTILINE) is not None


def timeline():
    return [cells for head, cells in rows((PACKAGE / "README.md").read_text()) if head[-1].strip() == "file"]


def test_the_timeline_has_the_numbers_of_the_comments():
    source = "".join((PACKAGE / name).read_text() for name in ("generate.py", "call.py"))
    comments = "\n".join(re.findall(r"^\s*# (.*)$", source, re.MULTILINE))
    numbers = [int(number) for number, *_ in timeline()]
    assert numbers == list(range(1, 14))
    assert {int(number) for number in re.findall(r"\b(\d+)\.(?= |:)", comments)} == set(numbers)


@pytest.mark.parametrize("cells", timeline(), ids=lambda cells: cells[0])
def test_the_functions_of_a_step_are_in_its_files(cells):
    _, _, functions, files = cells
    texts = [(PACKAGE / file).read_text() for file in names(files)]
    assert names(functions) and texts
    for name in names(functions):
        assert any(is_defined(name, text) for text in texts), name
    for text in texts:
        assert any(is_defined(name, text) for name in names(functions))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_names_exist(folder):
    """A path is a file, and every other name is a class, function, method or constant.

    The section on design names what torch and transformers have, too.
    """
    text, *_ = (folder / "README.md").read_text().split("\n## Design\n")
    paths = [*PACKAGE.rglob("*.py"), Path(__file__).with_name("same_calls.py")]
    sources = [path.read_text() for path in paths]
    for name in set(names(text)) - NOT_OURS:
        if "/" in name or name.endswith(".py"):
            where = (folder / name, PACKAGE / name, PACKAGE.parent / name, PACKAGE.parents[1] / name)
            assert any(path.exists() for path in where), name
        elif name.startswith("ops."):
            assert hasattr(fuseopt.ops, name.removeprefix("ops.")), name
        else:
            assert any(is_defined(name, source) for source in sources), name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_file_is_named(folder):
    text = (folder / "README.md").read_text()
    missing = [path.name for path in folder.glob("*.py") if path.name != "__init__.py" and f"`{path.name}`" not in text]
    assert not missing


def test_a_function_that_is_gone_is_noticed():
    source = "class A:\n    def run(self):\n        pass\n\n\nclass B:\n    def stop(self):\n        pass\n"
    assert is_defined("A.run", source) and is_defined("B.stop", source) and is_defined("A", source)
    assert not (is_defined("A.stop", source) or is_defined("run", source) or is_defined("C.run", source))
