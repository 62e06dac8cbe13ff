"""Huge pages are asked for under the whole pages of a large new tensor, and for nothing else."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseopt.generation.engine.state import CacheShape, DecodeState, Sizes
from fuseopt.runtime import huge_pages
from fuseopt.runtime.huge_pages import with_huge_pages

SMAPS = Path("/proc/self/smaps")


def flags(address: int) -> set[str]:
    """Flags of the mapping at an address; `hg`: huge pages were asked for."""
    within = False
    for line in SMAPS.read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            within = int(span[1], 16) <= address < int(span[2], 16)
        elif within and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def middle(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


@pytest.fixture
def large() -> Tensor:
    tensor = torch.empty(64 * 2**20, dtype=torch.uint8)  # more than malloc ever takes from its heap
    if not SMAPS.exists() or not flags(middle(tensor)):
        pytest.skip("the system does not show flags of mappings")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no huge pages")
    return tensor


def test_a_large_tensor_is_in_huge_pages(large: Tensor) -> None:
    assert "hg" not in flags(middle(large))
    assert with_huge_pages(large) is large
    assert "hg" in flags(middle(large))


def test_a_view_at_an_odd_address_asks_for_whole_pages_only(large: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *call: calls.append(call))
    view = large[3:-5]
    with_huge_pages(view)
    [(first, size, _)] = calls
    assert first % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert view.data_ptr() <= first < view.data_ptr() + mmap.PAGESIZE
    assert 0 <= view.data_ptr() + view.nbytes - (first + size) < mmap.PAGESIZE


def test_small_tensors_and_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: pytest.fail)
    for tensor in (torch.empty(1000), torch.empty(0), torch.empty(2**26, device="meta")):
        assert with_huge_pages(tensor) is tensor


def test_caches_of_a_decode_state_are_in_huge_pages(large: Tensor) -> None:
    shape = CacheShape(layers=4, heads=8, head_dim=64, dtype=torch.float32, device=torch.device("cpu"), encoder_width=8)
    state = DecodeState(Sizes(rows=1, capacity=8192, cross_capacity=8192), shape, vocab=10)
    assert "hg" in flags(middle(state.cache))
    assert "hg" in flags(middle(state.cross_cache))
    assert not state.cross_cache[..., ::512, :].any()
