"""Each binding takes the arguments of its op's schema in the schema's order: the stable ABI does not compare them."""

import re

import pytest
import torch

from fuseopt import ops, toolchain

TYPES = {
    "Tensor": "Tensor",
    "std::optional<Tensor>": "Optional[Tensor]",
    "std::vector<Tensor>": "List[Tensor]",
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


def bindings() -> list[tuple[str, list[str]]]:
    """Of every function that a library registers: the op, and the types of its arguments as schemas have them."""
    found = []
    for source in sorted((toolchain.CSRC / "cuda").glob("*_binding.cpp")):
        text = source.read_text()
        for name, function in re.findall(r'library\.impl\("(\w+)", TORCH_BOX\(&(\w+)\)\)', text):
            definition = re.search(rf"^[\w:<>, ]+ {function}\(([^)]*)\) {{", text, re.MULTILINE)
            assert definition is not None, function
            arguments = re.split(r",\s+(?![^<]*>)", definition[1])
            found.append((name, [" ".join(argument.split()[:-1]).removeprefix("const ") for argument in arguments]))
    return found


@pytest.mark.parametrize(("name", "types"), bindings(), ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_are_those_of_the_schema(name: str, types: list[str]) -> None:
    schema = getattr(torch.ops.fuseopt, name).default._schema
    assert [TYPES.get(kind.removesuffix("&"), kind) for kind in types] == [str(a.type) for a in schema.arguments]


def test_ops_are_found() -> None:
    names = [name for name, _ in bindings()]
    assert len(names) > 20 and {"edit_logits", "decode_select_", "beam_candidates"} < set(names)
    assert {"edit_logits", "process_logits"} < set(ops.__all__)  # importing these defines the schemas
