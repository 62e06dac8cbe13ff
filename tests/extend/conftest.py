from collections.abc import Iterator

import pytest

import fuseopt
from fuseopt.extend import registered


@pytest.fixture(autouse=True)
def no_ops_left() -> Iterator[None]:
    yield
    for name in registered():
        fuseopt.unregister(name)
