"""Which (op, backend, device) the tests of this folder run on, and how results are compared."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseopt.build import loader
from fuseopt.ops import registry

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no device of sm_90 or newer"
)


@dataclass(frozen=True)
class Case:
    """One backend of one op on one device."""

    op: registry.Op
    backend: str
    device: torch.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op.function(*args, **kwargs, backend=self.backend)

    @property
    def dtype(self) -> torch.dtype:
        """float32, or the first dtype of a backend that does not take it."""
        (backend,) = self.op.candidates(self.backend)
        return torch.float32 if torch.float32 in backend.dtypes else backend.dtypes[0]

    def samples(self, dtype: torch.dtype, requires_grad: bool = False) -> list[registry.SampleInput]:
        """None of a dtype that the backend does not take."""
        (backend,) = self.op.candidates(self.backend)
        if dtype not in backend.dtypes:
            return []
        torch.manual_seed(0)
        return list(self.op.sample_inputs(self.device, dtype, requires_grad))

    def is_differentiable(self) -> bool:
        return self.op.name in _differentiable_names()

    def differentiable_samples(self, dtype: torch.dtype) -> list[registry.SampleInput]:
        """At least one; for tests of `differentiable_cases`."""
        found = [sample for sample in self.samples(dtype, True) if any(t.requires_grad for t in tensors(sample))]
        assert found, f"{self.op.name} has no differentiable sample"
        return found


def cases(*names: str) -> list[Any]:
    """Pytest parameters for each backend of the ops named, or of all functional ones: on CPU, in Triton's interpreter,
    on a GPU."""
    return list(_parameters(names or functional_names(), slow=() if names else SLOW_TO_INTERPRET))


def differentiable_cases() -> list[Any]:
    """The `cases()` of ops of which some sample requires a gradient."""
    return [case for case in cases() if case.values[0].is_differentiable()]


def kernel_cases(parameters: list[Any]) -> list[Any]:
    """The `parameters` whose backend is not the reference, for comparisons with the reference."""
    return [case for case in parameters if case.values[0].backend != "reference"]


@functools.cache
def _differentiable_names() -> frozenset[str]:
    return frozenset(
        name
        for name in functional_names()
        for sample in registry.get(name).sample_inputs(torch.device("cpu"), torch.float32, True)
        if any(tensor.requires_grad for tensor in tensors(sample))
    )


# Their sizes hang together in ways that `variations.resized` does not know, or rounding decides what they remove. Their
# own tests draw sizes.
OF_THEIR_OWN_SIZES = (
    "beam_candidates",
    "decode_attention",
    "decode_embedding",
    "decode_linear",
    "decode_linear_partials",
    "decode_linear_low_rank",
    "decode_linear_of_sum",
    "decode_low_bit_linear",
    "decode_attention_of_8_bits",
    "decode_packed_linear",
    "decode_softmax_linear",
    "edit_logits",
    "filter_scores",
    "layer_norm_of_sum_bwd",
    "low_bit_linear",
    "prefix_attention",
    "relative_attention",
    "rotary_embedding",
    "short_attention",
    "tuned_matmul",
)


# Left out of quick runs of the tests that all ops have: one takes minutes, and another op has the wrappers, and most of
# the kernels, of the rest. Their own tests are interpreted in any case.
SLOW_TO_INTERPRET = ("relative_attention", "cross_entropy", "dropout_add_rms_norm", "rms_norm")

# Products of float32 as three of TF32 keep 22 bits of 24.
OF_TF32_PRODUCTS = ("relative_attention",)

SANITIZED = bool(os.environ.get("SANITIZED"))  # runs under compute-sanitizer


def examples(count: int) -> int:
    """How many Hypothesis is to draw; fewer under compute-sanitizer, where each takes a hundred times as long."""
    return max(count // 10, 6) if SANITIZED else count


def launched_kernels(call: Callable[[], object]) -> list[str]:
    """Names of fuseopt's kernels that `call` launches on the GPU; none if SANITIZED, where there is no profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "fuseopt" in event.name]


def functional_names() -> tuple[str, ...]:
    """The names of the ops that write into nothing that they are given."""
    return tuple(name for name in registry.names() if not registry.get(name).in_place)


def _parameters(names: tuple[str, ...], slow: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        op = registry.get(name)
        for backend in op.backends:
            if backend.name == "triton":
                marks = [pytest.mark.interpreter] + [pytest.mark.slow] * (name in slow)
                yield _parameter(op, "triton", "cpu", *marks)
            elif backend.name != "cuda":
                yield _parameter(op, backend.name, "cpu")
            if backend.name != "cpu":
                yield _parameter(op, backend.name, "cuda", pytest.mark.gpu)


def native_cases(*devices: str) -> list[Any]:
    """Of `cases()` those that run a native library at any sizes, on one of `devices`."""
    resizable = [case for case in cases() if case.values[0].op.name not in OF_THEIR_OWN_SIZES]
    return [
        case for case in resizable if case.values[0].backend in loader.KINDS and case.values[0].device.type in devices
    ]


def _parameter(op: registry.Op, backend: str, device: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(Case(op, backend, torch.device(device)), id=f"{op.name}-{backend}-{device}", marks=marks)


def require_backend(case: Case) -> None:
    """Skip where the machine lacks what the backend needs; fail where the backend refuses all the same."""
    if case.device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if case.backend in loader.KINDS:
        state = loader.load(case.backend)
        assert state.status == "loaded", state.reason
    (backend,) = case.op.candidates(case.backend)
    assert case.op.choose(case.backend, case.device, backend.dtypes[:1]).backend == case.backend


def tensors(sample: registry.SampleInput) -> list[Tensor]:
    """All tensors of a sample, those in lists included."""
    return [value for value in tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(value, Tensor)]


def results(output: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """What an op returned, as a list: of one tensor for most ops."""
    return [output] if isinstance(output, Tensor) else list(output)


def map_tensors(function: Callable[[Tensor], Tensor], sample: registry.SampleInput) -> registry.SampleInput:
    args, kwargs = tree_map_only(Tensor, function, (sample.args, dict(sample.kwargs)))
    return registry.SampleInput(args, kwargs)


def to_float64(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def gradients(
    function: Callable, sample: registry.SampleInput, grad_outputs: Tensor | Sequence[Tensor]
) -> list[Tensor | None]:
    """Of `function(sample)` for each input that requires one."""
    inputs = [tensor for tensor in tensors(sample) if tensor.requires_grad]
    return list(torch.autograd.grad(results(function(*sample.args, **sample.kwargs)), inputs, results(grad_outputs)))


def error(actual: Iterable[Tensor | None], judge: Iterable[Tensor | None], *, least: float = 1e-2) -> float:
    """Largest difference between two lists of tensors, over the size of the judge's largest value in that tensor.

    That size counts as `least` at least: gradients that cancel to zero are what rounding leaves of values near one.
    """
    largest = 0.0
    for value, expected in zip(actual, judge, strict=True):
        assert (value is None) == (expected is None)
        if value is None or value.numel() == 0:
            continue
        value, expected = value.detach().double(), expected.detach().double()
        assert torch.equal(value.isfinite(), expected.isfinite())
        assert torch.equal(value[~value.isfinite()], expected[~expected.isfinite()])
        finite = expected.isfinite()
        difference = (value - expected)[finite].abs().amax() if finite.any() else torch.zeros(())
        scale = expected[finite].abs().amax() if finite.any() else torch.ones(())
        largest = max(largest, (difference / scale.clamp(min=least)).item())
    return largest


def mean_error(actual: Tensor, judge: Tensor) -> float:
    """Root of the mean squared difference, over that of the judge, which counts as 0.01 at least, as in `error`."""
    actual, judge = actual.detach().double(), judge.detach().double()
    finite = judge.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual[~finite], judge[~finite])
    actual, judge = actual[finite], judge[finite]
    if judge.numel() == 0:
        return 0.0
    return ((actual - judge).square().mean().sqrt() / judge.square().mean().sqrt().clamp(min=1e-2)).item()


def answers_a_question(op: Any) -> bool:
    """Whether a raw op computes nothing, but says whether a kernel takes a layer."""
    return [str(result.type) for result in op._schema.returns] == ["bool"]


class RawCalls(TorchDispatchMode):
    """Records the raw ops that run inside the context, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuseopt":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        """Of those that compute: whether a kernel takes a layer is not asked where a call is compiled."""
        return [str(op).removeprefix("fuseopt.") for op, _ in self.calls if not answers_a_question(op)]


class Graphs:
    """A torch.compile backend that runs AOT Autograd's graphs as they are and keeps the raw ops they call."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.compiled = aot_autograd(
            fw_compiler=self._recorder(self.forward), bw_compiler=self._recorder(self.backward)
        )

    def _recorder(self, names: list[str]) -> Callable:
        def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable:
            for node in graph.graph.nodes:
                if getattr(node.target, "namespace", None) == "fuseopt":
                    names.append(str(node.target).removeprefix("fuseopt."))
            return make_boxed_func(graph.forward)

        return compiler
