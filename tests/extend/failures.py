"""What `fuseopt.check` finds wrong with an op, in tests of what is found without a trace."""

from unittest import mock

import fuseopt
from fuseopt.extend.checking import _Checks


def failures(op: fuseopt.Op, **options) -> dict[str, str]:
    """Details by check, of the `cpu` backend. Opcheck and torch.compile, 0.75 of a check's time, are left
    out: test_check.py has them."""
    with mock.patch.multiple(_Checks, _opcheck=lambda checks: "", _compiles=lambda checks: ""):
        report = fuseopt.check(op, device="cpu", **options)
    assert report.ok == (not report.failures)
    return {row.check: row.detail for row in report.failures if row.backend == "cpu"}
