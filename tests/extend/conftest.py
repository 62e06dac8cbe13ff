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


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The functions of Python, by name, that calls of an expression on a GPU run."""
    from fuseopt.extend import elementwise_op, triton_expression

    asked = []

    def counting(name, run):
        def counted(*given):
            asked.append(name)
            return run(*given)

        return counted

    for owner, names in (
        (triton_expression.Kernels, ("forward", "backward", "prepare_forward", "prepare_backward")),
        (elementwise_op._Kernels, ("_takes",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    return asked
