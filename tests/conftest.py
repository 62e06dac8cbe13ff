import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from fuseopt import tuning
from fuseopt.build import library_cache, loader

# The same examples in every run of CI, so that what fails there can be repeated; fresh ones everywhere else.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Inductor reads this once, when it is imported: by a folder's conftest, which for files that are named on the command
# line is before pytest_configure.
# For a CPU, it writes plain loops: what it emits for vectors takes twice as long to compile, and with an empty cache it
# compiles a trial for each kind of them first. And it compiles in the process itself: the ones that it would start for
# that import torch for longer than a CPU's few loops take. Triton's kernels, for a GPU, are worth them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Without a device, torch keeps each seed for it until it is initialised, with a traceback: a millisecond a call.
for backend in (torch.cuda, torch.xpu, torch.mtia):
    if not backend.is_available():
        backend.manual_seed_all = lambda seed: None

# What an earlier run measured of users' ops must not choose their backends.
os.environ.setdefault("FUSEOPT_MEASURED", "0")

NEED_TRITON = ["ops/triton/*", "ops/test_interpreter.py", "test_compile_only.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def each_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Runs a test on the CPU and on a GPU: models and tensors are made on the device without being told.

    On the CPU they are so in any case, without a mode, whose function torch would call, and Dynamo trace, at every
    operation: a third of the time that a T5 takes.
    """
    device = torch.device(request.param)
    with contextlib.nullcontext() if device.type == "cpu" else device:
        yield device


@pytest.fixture
def set_tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Sets one of the measured numbers for every GPU, as Python reads them."""

    def set_everywhere(name: str, value: int) -> None:
        for table in tuning._TABLES.values():
            monkeypatch.setitem(table, name, value)

    return set_everywhere


@pytest.fixture(scope="session", autouse=True)
def native_libraries() -> None:
    """Has the libraries compiled before the first test, whichever that is: ops compile nothing by themselves."""
    loader.load_all(loader.KINDS)


@pytest.fixture(autouse=True)
def memory_for_other_workers() -> Iterator[None]:
    """Leaves other workers on the same GPU what a test has done with."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def most_of_a_gpu(pytestconfig: pytest.Config) -> Iterator[None]:
    """For tests of tens of gigabytes: one at a time, whatever other workers run beside it."""
    import filelock

    with filelock.FileLock(pytestconfig.cache.mkdir("gpu") / "most.lock"):
        yield
        torch.cuda.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled libraries with pytest's own cache: built once, whatever tests, workers and later runs need them.

    A worker beside others computes on one thread, and so do the processes it starts: on 16 cores, 8 workers with 16
    threads each mostly wait for one another.
    """
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if config.pluginmanager.has_plugin("cacheprovider"):
        folder = config.cache.mkdir("native")
        # fuseopt loads nothing from a checkout that belongs to another user, so the user's cache folder is used then.
        with contextlib.suppress(library_cache.CacheError):
            library_cache.check_trusted(folder)
            os.environ.setdefault("FUSEOPT_CACHE_DIR", str(folder))


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what stays until the end: every module and test, which take it half a second.

    And have it search after 10,000 new objects, not after each 700: most of what a trace makes lives until its end.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `interpreter` tests unless TRITON_INTERPRET=1, and skip GPU tests where there are too few GPUs."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    gpus = torch.cuda.device_count()
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker("interpreter") and not interpreting else kept).append(item)
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), found {gpus}"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Counts the compiled training steps, and has them compiled without code generation unless told otherwise."""
    from fuseopt.training import partitioner
    from tests.training_steps import Graphs

    torch._dynamo.reset()
    record = Graphs(getattr(request, "param", "aot_eager"))
    monkeypatch.setattr(partitioner, "compile_graph", record)
    return record
