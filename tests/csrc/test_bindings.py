"""Each binding takes the arguments of its op's schema in the schema's order: the stable ABI does not compare them."""

import re

import pytest
import torch

from fuseopt import ops
from fuseopt.build import toolchain

TYPES = {
    "Tensor": "Tensor",
    "std::optional<Tensor>": "Optional[Tensor]",
    "std::vector<Tensor>": "List[Tensor]",
    "std::vector<int64_t>": "List[int]",
    "int64_t": "int",
    "std::optional<int64_t>": "Optional[int]",
    "double": "float",
    "std::optional<double>": "Optional[float]",
    "bool": "bool",
    "std::string": "str",
    # Schemas have dtypes as their numbers.
    "ScalarType": "int",
    "std::optional<ScalarType>": "Optional[int]",
}


REGISTRATION = re.compile(r'\.impl\(\s*"(\w+)",\s*TORCH_BOX\(\((?:fuseopt::)?checked<(\w+), ([\w:]+)>\)\)\)')


def sources() -> list[str]:
    return [path.read_text() for path in sorted(toolchain.CSRC.rglob("*binding*.cpp"))]


def bindings() -> list[tuple[str, list[str]]]:
    """(op, its argument types as a schema has them) of every function of the CUDA library."""
    found = []
    for source in sorted((toolchain.CSRC / "cuda").rglob("*_binding.cpp")):
        text = source.read_text()
        for name, function, _ in REGISTRATION.findall(text):
            definition = re.search(rf"^[\w:<>, ]+ {function}\(([^)]*)\) {{", text, re.MULTILINE)
            assert definition is not None, function
            arguments = re.split(r",\s+(?![^<]*>)", definition[1])
            found.append((name, [" ".join(argument.split()[:-1]).removeprefix("const ") for argument in arguments]))
    return found


def declarations() -> list[tuple[str, str, list[str]]]:
    """(op, op that its messages name, names of its tensors) of every function that a library registers."""
    texts = [*sources(), *(path.read_text() for path in toolchain.CSRC.glob("**/*.h"))]
    lists = {
        name: re.findall(r'\{"(\w+)", ', items)
        for text in texts
        for name, items in re.findall(r"constexpr Argument (\w+)\[\] = (\{.*?\});", text, re.DOTALL)
    }
    declared = {}
    for text in texts:
        pattern = r'constexpr auto (\w+) =\s*arguments\(\s*"(\w+)",\s*(\{.*?\}\}|\w+)\)(?: \+ (\w+))?;'
        for name, op, items, more in re.findall(pattern, text, re.DOTALL):
            names = lists.get(items) or re.findall(r'\{"(\w+)", ', items)
            declared[name] = op, names + lists.get(more, [])
    registrations = [found for text in sources() for found in REGISTRATION.findall(text)]
    return [(name, *declared[declaration.split("::")[-1]]) for name, _, declaration in registrations]


@pytest.mark.parametrize(("name", "types"), bindings(), ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_are_those_of_the_schema(name: str, types: list[str]) -> None:
    schema = getattr(torch.ops.fuseopt, name).default._schema
    assert [TYPES.get(kind.removesuffix("&"), kind) for kind in types] == [str(a.type) for a in schema.arguments]


@pytest.mark.parametrize(
    ("name", "op", "arguments"), declarations(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_tensor_is_declared_by_its_name_in_the_schema(name: str, op: str, arguments: list[str]) -> None:
    """Calls are checked against the declarations. The compiler checks that each tensor has one."""
    schema = getattr(torch.ops.fuseopt, name).default._schema
    assert op == name
    assert arguments == [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]


def test_nothing_is_registered_unchecked() -> None:
    registered = [name for text in sources() for name in re.findall(r'\.impl\(\s*"(\w+)"', text)]
    assert len(registered) > 60 and registered == [name for name, *_ in declarations()]


def test_ops_are_found() -> None:
    names = [name for name, _ in bindings()]
    assert len(names) > 20 and {"edit_logits", "decode_select_", "beam_candidates"} < set(names)
    assert {"edit_logits", "process_logits"} < set(ops.__all__)  # importing these defines the schemas
