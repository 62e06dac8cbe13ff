import pytest

from tests.ops.cases import require_backend


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose `case` cannot run on this machine, or not in this process."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "case" in callspec.params:
        require_backend(callspec.params["case"])
