"""`places` of csrc/python: what tells whether weights are where they were."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuseopt import native


@pytest.fixture
def places() -> Callable:
    library = native.python_library()
    assert library is not None, native.state("python").reason
    return library.places


def test_they_tell_where_tensors_lie_and_how_many_elements_they_have(places: Callable) -> None:
    parameter, other = nn.Parameter(torch.randn(4, 6)), torch.randn(3)
    before = places([parameter, other])
    assert places([parameter, other]) == before == places([parameter.detach(), other.view(3, 1)])
    assert before != places([other, parameter])
    assert before != places([parameter])
    assert before != places([parameter[:3], other])  # as many addresses, fewer elements
    parameter.data = parameter.data.clone()
    assert before != places([parameter, other])
    assert places([]) == b""
    assert places([torch.empty(0), torch.empty(5, device="meta")]) != places([torch.empty(0)])


@pytest.mark.parametrize("tensors", [(torch.ones(2),), [torch.ones(2), 3], [None], None])
def test_only_lists_of_tensors_have_places(places: Callable, tensors: object) -> None:
    with pytest.raises(TypeError, match="places takes a list of tensors"):
        places(tensors)
