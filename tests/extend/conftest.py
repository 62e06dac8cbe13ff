from collections.abc import Iterator

import pytest

import fuseopt
from fuseopt.extend import registered


@pytest.fixture(autouse=True)
def no_ops_left() -> Iterator[None]:
    """Removes the ops that a test registers."""
    before = registered()
    yield
    for name in registered().keys() - before.keys():
        fuseopt.unregister(name)
