"""TrainingForward: a model's forward that runs training steps compiled, and all other calls as the class does.

Dynamo traces the whole step as one graph. `training/partitioner.py` compiles it. `_unbound` is the path of one call.
"""

from __future__ import annotations

import inspect
import itertools
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.torch_version import TorchVersion

from fuseopt.errors import CompileError
from fuseopt.runtime import gc_pause
from fuseopt.runtime.module_watch import config_of, parameters_below
from fuseopt.runtime.references import Remembered, code_of_forward, weak_attribute
from fuseopt.training import captured_steps, compile_notice, stock_fallback, t5_checkpointing, unpadded_batches

_DYNAMO_OPTIONS = {
    # Recompile when a hook is registered after compilation; by default Dynamo does not notice.
    "skip_nnmodule_hook_guards": False,
    # The default, 8 variants of a call, is too few for unfreezing a model layer by layer.
    "recompile_limit": 64,
    # Under DistributedDataParallel Dynamo would cut the graph at each bucket of gradients. Tensors that cross a cut
    # must be kept, and a mask that crosses one is no longer recognised as causal.
    "optimize_ddp": False,
    # A garbage collection of everything that a compilation made takes seconds.
    "run_gc_after_compile": False,
}

_NUMBERS = itertools.count()

# Arguments that ask transformers for more than loss and logits. The config may set those of `_CAPTURES` too.
_CACHES = ("use_cache", "past_key_values")
_CAPTURES = ("output_attentions", "output_hidden_states")


class TrainingForward:
    """Stands in for `model.forward` on one instance, with that method's signature, `__self__` and `__func__`.

    Takes and returns what the class's forward does. A call runs compiled if the model is in training mode with
    gradients enabled. The class's own forward runs

    - in eval mode and without gradients, as in `generate()`;
    - inside another torch.compile, torch.export or torch.jit.trace;
    - with `use_cache=True`, `past_key_values`, `output_attentions` or `output_hidden_states` (the last two also if set
      in the model's config).

    A compiled call differs in these ways:

    - `use_cache` is off: `past_key_values` is None, and sequences packed into a row by `position_ids` do not attend to
      each other;
    - dropout draws other numbers from the same seed;
    - a parameter on which only unused outputs depend gets a gradient of zeros, not None;
    - double backward raises.

    Gradient checkpointing remains in effect inside the compiled graph.

    Every combination of arguments, dtypes, hooks and frozen parameters is compiled at its first call. A dimension that
    changes is compiled a second time with a dynamic size, for all values but the first. Each compilation is logged
    (`compile_notice`). Copies and pickles hold no compiled code.

    If a step cannot be compiled, this and all later steps run the class's own forward, with one warning and the reason
    in the report. If the class's forward raises on the same arguments, that error is raised, and later steps are
    compiled again. A failed attempt leaves random generators, buffers and gradients unchanged.

    Args:
        model: any module that Dynamo traces without a graph break; referenced weakly.
        backend: "inductor", or "aot_eager" for the same graph on torch's own kernels.
        budget: fraction, 0 to 1, of the activation bytes that are kept when no matmul is recomputed.
        cuda_graphs: True to launch steps on a GPU, of the first size seen, as two CUDA graphs, forward and backward;
            "auto" to do so only if the GPU waits for the host. Gradients still held at the next step are then copied,
            because they are in the graphs' memory.
        strict: raise if a step cannot be compiled, instead of falling back.

    Raises:
        CompileError: in a call, with `strict`, if the step cannot be compiled.
    """

    model = weak_attribute("model")
    __code__ = code_of_forward("model")
    backend: str
    budget: float
    cuda_graphs: captured_steps.When

    def __init__(
        self,
        model: nn.Module,
        *,
        backend: str = "inductor",
        budget: float = 1.0,
        cuda_graphs: captured_steps.When = False,
        strict: bool = False,
    ) -> None:
        options = {"backend": backend, "budget": budget, "cuda_graphs": cuda_graphs}
        self.__setstate__({"model": model, **options, "strict": strict})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return type(self.model).forward(self.model, *args, **kwargs)
        return self.__func__(self.model, *args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.model

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "backend", "budget", "cuda_graphs", "strict")
        remembered = {name: value for name, value in vars(self).items() if isinstance(value, Remembered)}
        return {**remembered, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update((name, value) for name, value in state.items() if name not in ("model", "strict"))
        self.model = state["model"]
        self._fallback = stock_fallback.StockFallback(type(self.model).__name__, self.backend, state["strict"])
        self._captured = captured_steps.CapturedSteps(self.model, self.cuda_graphs)
        options = {"backend": self.backend, "budget": self.budget}
        # accelerate wraps `forward.__func__` and binds the result again, so it must exist.
        self.__func__ = _unbound(type(self.model).forward, options, self._captured, self._fallback)
        self.__signature__ = inspect.signature(types.MethodType(self.__func__, self.model))

    @property
    def strict(self) -> bool:
        return self._fallback.strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._fallback.strict = strict
        if strict:
            # Steps that fell back are compiled again, and raise.
            self._fallback.reason = ""

    @property
    def fallback_reason(self) -> str:
        """Why training steps run the class's own forward; empty if they do not."""
        return self._fallback.reason

    def report_lines(self) -> tuple[str, ...]:
        return (*self._fallback.report_lines(), *self._captured.report_lines())


def not_supported_reasons(model: nn.Module) -> list[str]:
    """Why the forward of `model` cannot be replaced by a TrainingForward; empty if it can."""
    if TorchVersion(torch.__version__) < (2, 11):
        return [f"it needs torch 2.11 or later, and this is {torch.__version__}"]
    if isinstance(model, torch.jit.ScriptModule):
        return ["it is a TorchScript module, which Dynamo cannot trace"]
    reasons = []
    if "forward" in model.__dict__:
        reasons.append("its forward has been replaced on the instance, as torch.compile and accelerate's hooks do")
    if model._compiled_call_impl is not None:
        reasons.append("it is already compiled by model.compile()")
    if type(model).forward is nn.Module.forward:
        reasons.append("its class has no forward")
    if _has_sharded_parts(model):
        reasons.append(
            "fully_shard shards its submodules separately, which cannot be traced as one graph; shard the whole model"
        )
    return reasons or _missing_from_torch()


def _missing_from_torch() -> list[str]:
    """Reasons if this version of torch lacks private functions or options that compilation uses."""
    try:
        from torch._dynamo import config as dynamo_config
        from torch._dynamo import eval_frame

        from fuseopt.training import partitioner
    except (ImportError, AttributeError, TypeError) as error:
        return [f"torch {torch.__version__} lacks a private module or function that it uses: {error}"]
    missing = _missing(_DYNAMO_OPTIONS, dynamo_config) + _missing(["remove_from_cache"], eval_frame)
    missing += partitioner.missing_options()
    return [_gone(missing)] if missing else []


def not_captured_reason(model: nn.Module) -> str | None:
    """Why training steps of `model` cannot be captured as CUDA graphs; None if they can."""
    missing = captured_steps.missing_from_torch()
    if missing:
        return _gone(missing)
    return "fully_shard changes the addresses of the weights in every step" if _is_sharded(model) else None


def _missing(names: Iterable[str], config: object) -> list[str]:
    return [name for name in names if not hasattr(config, name)]


def _gone(options: Iterable[str]) -> str:
    return f"torch {torch.__version__} lacks {', '.join(options)}"


def _has_sharded_parts(model: nn.Module) -> bool:
    return any(_is_sharded(module) for module in model.modules() if module is not model)


def _is_sharded(module: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _unbound(
    forward: Callable[..., Any],
    options: Mapping[str, Any],
    captured: captured_steps.CapturedSteps,
    fallback: stock_fallback.StockFallback,
) -> Callable[..., Any]:
    """The function `(model, *args, **kwargs)` that compiles training steps and passes all other calls to `forward`.

    Args:
        forward: the class's own.
        options: keyword arguments of `partitioner.compile_graph`.
        captured: the model's captured steps.
        fallback: records that a step cannot be compiled.
    """
    signature = inspect.signature(forward)
    # Dynamo stores which sizes are dynamic by the name of the code object, so each model needs its own.
    title = f"{forward.__qualname__}_{next(_NUMBERS)}"
    names = list(signature.parameters)[1:]
    # Compiled steps by (which parameters require gradients, whether sizes are those of the first call). torch 2.11 does
    # not guard on the former, so an unfrozen parameter would get no gradient. The latter keeps the code for static
    # sizes in use: Dynamo prefers the variant that ran last, which after another size is the one for dynamic sizes.
    steps: dict[tuple[tuple[bool, ...], bool], Callable[..., Any]] = {}
    first_sizes: list[torch.Size] = []
    notice = compile_notice.CompileNotice(forward.__qualname__.partition(".")[0])
    attentions: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()

    def training_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if fallback.reason or not _is_training_step(model) or _asks_for_more(model, given):
            return forward(model, *args, **kwargs)
        open_names = set(names[len(args) :])
        changed = {"use_cache": False} if "use_cache" in open_names or _passes_on_use_cache(model) else {}
        rows = unpadded_batches.arguments(model, given)
        changed |= rows if open_names.issuperset(rows) else {}
        parameters = parameters_below(model)
        trained = tuple(parameter.requires_grad for parameter in parameters)
        sizes = [value.shape for value in (*args, *{**kwargs, **changed}.values()) if isinstance(value, torch.Tensor)]
        key = trained, sizes == (first_sizes or sizes)
        step = steps.get(key)
        if step is None:
            # Checked here as well, because `fully_shard` may be called after `initialize`.
            may_capture = captured.when and key[1] and not _is_sharded(model)
            made_by = {**options, "captured": captured if may_capture else None}
            step = steps[key] = _compile(forward, title, made_by, notice.compiling)
            notice.begin(_is_on_cpu(parameters))
        if model not in attentions:
            attentions[model] = t5_checkpointing.attentions(model)
        began = time.perf_counter()
        try:
            # Compilation makes many long-lived objects; collections among them would take seconds.
            with gc_pause.paused(), t5_checkpointing.without_bias_gradients(attentions[model]):
                outputs = unpadded_batches.without_cache(step(model, *args, **{**kwargs, **changed}))
            first_sizes[:] = first_sizes or sizes
            notice.done({**given, **changed}, time.perf_counter() - began)
            return outputs
        except Exception as error:
            root = stock_fallback.root_of(error)
            if isinstance(root, (torch.OutOfMemoryError, CompileError)):
                raise root from None
            # The error itself is kept only if strict: its traceback keeps frames, and their tensors, alive.
            reason, cause = stock_fallback.reason_of(error), error if fallback.strict else None
        # Wrong arguments make the trace fail too. Then `forward` raises here with the model's own error message.
        outputs = forward(model, *args, **kwargs)
        fallback.begin(reason, cause)
        steps.clear()
        return outputs

    training_forward.__signature__ = signature  # type: ignore[attr-defined]
    return training_forward


def _is_training_step(model: nn.Module) -> bool:
    # Dynamo cannot be called inside of torch.func's transforms.
    is_seen = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing() or torch.compiler.is_compiling()
    return model.training and torch.is_grad_enabled() and not is_seen


def _passes_on_use_cache(model: nn.Module) -> bool:
    """Whether `model` is a peft wrapper around a model whose forward takes `use_cache`."""
    inner = getattr(model, "get_base_model", None)
    return inner is not None and "use_cache" in inspect.signature(inner().forward).parameters


def _asks_for_more(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the call asks for a cache, attentions or hidden states."""
    config = config_of(model)
    asked = [given.get(name) for name in _CACHES]
    # At the first such call transformers registers hooks under a lock, which breaks the graph.
    asked += [given.get(name, getattr(config, name, None)) for name in _CAPTURES]
    return any(value is not None and value is not False for value in asked)


def _is_on_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _compile(
    forward: Callable[..., Any], title: str, options: Mapping[str, Any], on_compilation: Callable[[bool], None]
) -> Callable[..., Any]:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import exc
    from torch._dynamo.eval_frame import remove_from_cache

    from fuseopt.training import early_kernels, partitioner

    if options["backend"] == "inductor":
        early_kernels.start()

    def step(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(model, *args, **kwargs)

    # Dynamo stores and counts compiled variants by code object, so each model gets its own.
    step = types.FunctionType(step.__code__.replace(co_name=title), step.__globals__, title, None, step.__closure__)

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Tracebacks of exceptions that Dynamo observed during the trace keep the callers' frames, and the first step's
        # outputs, alive until a full garbage collection.
        gc_pause.drop_tracebacks(exc.ObservedException)
        on_compilation(_is_on_cpu(value for value in inputs if isinstance(value, torch.Tensor)))
        return _tried_once(partitioner.compile_graph(graph, inputs, **options))

    compiled = dynamo_config.patch(_DYNAMO_OPTIONS)(torch.compile(step, backend=compile_graph, fullgraph=True))
    # Dynamo's cache entries refer to the code object, so without this they would outlive the model.
    weakref.finalize(compiled, remove_from_cache, step.__code__).atexit = False
    return compiled


def _tried_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which restores the states of random generators if it fails before its first success."""
    tried = False

    def step(*inputs: Any) -> Any:
        nonlocal tried
        if tried:
            return run(*inputs)
        with stock_fallback.rng_restored_on_error(inputs):
            outputs = run(*inputs)
        tried = True
        return outputs

    return step
