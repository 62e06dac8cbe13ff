import os
from collections.abc import Iterator

import pytest

from tests.ops.cases import require_backend


@pytest.fixture(scope="session", autouse=True)
def better_interpreter() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.ops.interpreter import better

        yield from better()
    else:
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose `case` cannot run on this machine, or not in this process."""
    if item.get_closest_marker("interpreter") and not os.environ.get("CI"):
        from tests.ops.interpreter import unfit_interpreter

        reason = unfit_interpreter()
        if reason is not None:
            pytest.skip(reason)
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "case" in callspec.params:
        require_backend(callspec.params["case"])
