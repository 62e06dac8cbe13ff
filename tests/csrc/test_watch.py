"""What csrc/python is asked of a model in every call: where its weights are, and whether its modules are plain."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fuseopt.build import loader
from fuseopt.runtime import module_watch


@pytest.fixture(params=["library", "python"])
def functions(request: pytest.FixtureRequest) -> Any:
    """Those of the library, and what stands in for them where it cannot be compiled."""
    if request.param == "python":
        return SimpleNamespace(places=module_watch._places, has_true=module_watch._has_true)
    library = loader.python_library()
    assert library is not None, loader.state("python").reason
    return library


def test_they_tell_where_tensors_lie_and_how(functions: Any) -> None:
    places = functions.places
    parameter, other = nn.Parameter(torch.randn(4, 4)), torch.randn(3)
    before = places([parameter, other])
    assert places([parameter, other]) == before == places([parameter.detach(), other.view(3)])
    for others in (
        [other, parameter],
        [parameter],
        [parameter[:3], other],
        [parameter.T, other],
        [parameter.view(2, 8), other],
        [parameter, other.view(3, 1)],
        [parameter, other.view(torch.int32)],
    ):
        assert before != places(others)
    parameter.data = parameter.data.clone()
    assert before != places([parameter, other])
    assert places([]) == places([]) != places([torch.empty(0)])
    assert places([torch.empty(0), torch.empty(5, device="meta")]) != places([torch.empty(0)])


def test_one_true_value_is_enough(functions: Any) -> None:
    class Flags(dict):
        pass

    states = [{"a": False, "b": {}}, {"a": 0, "b": OrderedDict(), "c": 1}, Flags(a=None, b="")]
    assert functions.has_true(states, ("a", "b")) is False
    for state, name in ((0, "a"), (1, "b"), (2, "b")):
        changed = [dict(of) for of in states]
        changed[state][name] = {1: 2}
        assert functions.has_true(changed, ("a", "b")) is True
    assert functions.has_true([], ("a", "b")) is False
    with pytest.raises(KeyError, match="c"):
        functions.has_true(states, ("a", "c"))


class Unsure:
    def __bool__(self) -> bool:
        raise RuntimeError("not sure")


def test_errors_of_values_are_raised(functions: Any) -> None:
    with pytest.raises(RuntimeError, match="not sure"):
        functions.has_true([{"a": 0, "b": Unsure()}], ("a", "b"))


@pytest.fixture
def library() -> Any:
    return loader.python_library()


@pytest.mark.parametrize("tensors", [(torch.ones(2),), [torch.ones(2), 3], [None], None])
def test_only_lists_of_tensors_have_places(library: Any, tensors: object) -> None:
    with pytest.raises(TypeError, match="places takes a list of tensors"):
        library.places(tensors)


def test_only_lists_of_dicts_have_true_values(library: Any) -> None:
    with pytest.raises(TypeError, match="has_true takes a list of dicts, and item 1 is none"):
        library.has_true([{"a": 0}, nn.ReLU()], ("a",))
    for arguments in (([{}],), (({},), ("a",)), ([{}], ["a"])):
        with pytest.raises(TypeError):
            library.has_true(*arguments)
