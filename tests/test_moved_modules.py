"""Import paths of earlier versions."""

import importlib
import subprocess
import sys

import pytest

from fuseopt import moved_modules, ops

# Names that stand in both, by the old path; a fresh process each, as importing is what is tried.
IMPORTS = """
import sys, warnings
warnings.simplefilter("always")
import fuseopt.ops
before = {name: value for name, value in vars(fuseopt.ops).items() if callable(value)}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fuseopt.ops.decode_linear import is_fast
    import fuseopt.native
    import fuseopt.build.loader
    assert fuseopt.native.load_all is fuseopt.build.loader.load_all
    from fuseopt import native
    from fuseopt.bench.records import Results
    import fuseopt.bench.ops
    fuseopt.bench.ops.run
messages = [str(each.message) for each in caught if each.category is DeprecationWarning]
assert all(each.filename == "<string>" for each in caught if each.category is DeprecationWarning), caught
assert "fuseopt.ops.decode_linear has moved: import fuseopt.ops.decode.linear" in messages, messages
assert "fuseopt.native has moved: import fuseopt.build.loader" in messages, messages
assert "fuseopt.bench.records has moved: import fuseopt.bench.harness.records" in messages, messages
assert "fuseopt.bench.ops has moved: import fuseopt.bench.suites.ops" in messages, messages
import fuseopt.ops.decode.linear
assert is_fast is sys.modules["fuseopt.ops.decode.linear"].is_fast
# Functions of the ops package that old modules share a name with are the functions.
assert all(getattr(fuseopt.ops, name) is value for name, value in before.items())
"""


def test_old_paths_import_and_warn_where_they_are_used():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.parametrize(("old", "new"), list(moved_modules.moved()))
def test_every_old_path_leads_to_a_module_that_is_there(old, new):
    module, there = importlib.import_module(old), importlib.import_module(new)
    public = next(name for name in vars(there) if not name.startswith("_"))
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(module, public) is getattr(there, public)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_that_name'"), pytest.warns(DeprecationWarning):
        module.nothing_of_that_name  # noqa: B018


def test_looking_for_what_every_module_may_have_imports_and_warns_of_nothing(recwarn):
    module = importlib.import_module("fuseopt.ops.decode_linear")
    assert not hasattr(module, "__file__") and not hasattr(module, "__path__")
    assert not recwarn.list
    assert callable(ops.decode_linear)


def test_an_old_module_runs_as_a_command():
    command = [sys.executable, "-W", "always", "-m", "fuseopt.make_prebuilt", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage" in done.stdout and "use python -m fuseopt.build.make_prebuilt" in done.stderr


def test_a_path_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fuseopt.never_was")
