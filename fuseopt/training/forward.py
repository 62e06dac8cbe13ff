"""TrainingForward: a model's forward, compiled for training steps and as its class has it for everything else.

Dynamo traces the whole step; `fuseopt.training.partitioner` decides what the backward pass recomputes.
"""

from __future__ import annotations

import inspect
import itertools
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
from fuseopt.runtime.references import weak_attribute
from fuseopt.training import captured_steps, stock_fallback, whole_rows
from fuseopt.training.passes import bias_gradients

# Dynamo by default does not notice a hook registered after compilation, and gives up at the 9th variant of a call,
# which unfreezing a model layer by layer reaches. Under DistributedDataParallel it cuts the graph into one for each
# bucket of gradients; what a cut crosses has to be kept, and a mask that crosses one is no longer known to be causal.
# Behind a compilation it would search all that came of it for garbage, for seconds.
_DYNAMO_OPTIONS = {
    "skip_nnmodule_hook_guards": False,
    "recompile_limit": 64,
    "optimize_ddp": False,
    "run_gc_after_compile": False,
}

_NUMBERS = itertools.count()

# What a caller, or for the latter two the model's config, asks transformers to return beside loss and logits.
_CACHES = ("use_cache", "past_key_values")
_CAPTURES = ("output_attentions", "output_hidden_states")


class TrainingForward:
    """Stands in for `model.forward` on one instance, with that method's signature, `__self__` and `__func__`.

    Call: whatever the class's forward takes -> what it returns, of the same type. A call is compiled when the model is
    in training mode and grad mode is on. It goes to the class's own forward in eval mode; without gradients, as in
    `generate()`; inside somebody else's torch.compile or torch.export; and when `use_cache=True`, `past_key_values`,
    `output_attentions` or `output_hidden_states` is asked for (the latter two in the model's config as well).

    What a compiled call does differently: `use_cache` is off, so `past_key_values` is None and sequences packed into a
    row by their `position_ids` are told apart; dropout draws other numbers from the same seed; a parameter behind
    outputs that the loss does not use gets a gradient of zeros, not None; there is no double backward. Gradient
    checkpointing stays in force inside the compiled graph.

    Every combination of arguments, dtypes, hooks and frozen parameters is compiled once, at its first call; a dimension
    that changes is compiled once more, for all its later values but the first, which keeps its own code. Copies and
    pickles hold no compiled code.

    If a step cannot be compiled, that step and all later ones run the class's own forward, with one warning and the
    reason in the report. If that forward raises on the same arguments, its error is raised, and later steps are
    compiled again. A failed attempt leaves random generators, buffers and gradients unchanged.

    Args:
        model: any module, referred to weakly. Its step is compiled if Dynamo traces its forward without a graph break.
        backend: "inductor", or "aot_eager" for the same graph on torch's own kernels.
        budget: of the activations, in bytes, that are kept when only what is cheap is recomputed: the part that may be
            kept, 0 to 1.
        cuda_graphs: whether steps on a GPU, of the first size that comes, are launched as two CUDA graphs, one forward
            and one backward; "auto" for steps in which the GPU waited for the host. Gradients that the next step finds
            are copied before it: theirs is memory of the graphs.
        strict: raise if a step cannot be compiled, instead of falling back.

    Raises:
        CompileError: with `strict`, by a call that cannot be compiled.
    """

    model = weak_attribute("model")
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
        return {name: getattr(self, name) for name in ("model", "backend", "budget", "cuda_graphs", "strict")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update((name, value) for name, value in state.items() if name not in ("model", "strict"))
        self.model = state["model"]
        self._fallback = stock_fallback.StockFallback(type(self.model).__name__, self.backend, state["strict"])
        # accelerate wraps the function of a bound method and binds the result again, so there has to be one.
        self._captured = captured_steps.CapturedSteps(self.model, self.cuda_graphs)
        options = {"backend": self.backend, "budget": self.budget}
        self.__func__ = _unbound(type(self.model).forward, options, self._captured, self._fallback)
        self.__signature__ = inspect.signature(types.MethodType(self.__func__, self.model))

    @property
    def strict(self) -> bool:
        return self._fallback.strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._fallback.strict = strict
        if strict:
            # A model that has fallen back tries to compile again, and then raises.
            self._fallback.reason = ""

    def report_lines(self) -> tuple[str, ...]:
        return (*self._fallback.report_lines(), *self._captured.report_lines())


def not_supported_reasons(model: nn.Module) -> list[str]:
    """Why the forward of `model` cannot be exchanged for a TrainingForward; empty when it can."""
    if TorchVersion(torch.__version__) < (2, 11):
        return [f"it needs torch 2.11 or later, and this is {torch.__version__}"]
    if isinstance(model, torch.jit.ScriptModule):
        return ["it is a TorchScript module, which Dynamo cannot trace"]
    reasons = []
    if "forward" in model.__dict__:
        reasons.append("its forward has been replaced on the instance, as torch.compile and accelerate's hooks do")
    if model._compiled_call_impl is not None:
        reasons.append("it is compiled already, by model.compile()")
    if type(model).forward is nn.Module.forward:
        reasons.append("its class has no forward")
    if _has_sharded_parts(model):
        reasons.append("fully_shard gathers its parts one by one, which no graph holds; shard it as a whole")
    return reasons or _missing_from_torch()


def _missing_from_torch() -> list[str]:
    """What compiling stands on is private to torch and may be gone from a later version."""
    try:
        from torch._dynamo import config as dynamo_config
        from torch._dynamo import eval_frame

        from fuseopt.training import partitioner
    except (ImportError, AttributeError, TypeError) as error:
        return [f"torch {torch.__version__} has changed what it stands on: {error}"]
    missing = _missing(_DYNAMO_OPTIONS, dynamo_config) + _missing(["remove_from_cache"], eval_frame)
    missing += partitioner.missing_options()
    return [_gone(missing)] if missing else []


def not_captured_reason(model: nn.Module) -> str | None:
    """Why the steps of a TrainingForward of `model` are launched kernel by kernel, whatever `cuda_graphs` asks for.

    None where they can be captured, as soon as the model is on a GPU.
    """
    missing = captured_steps.missing_from_torch()
    if missing:
        return _gone(missing)
    return "fully_shard puts the weights elsewhere in every step" if _is_sharded(model) else None


def _missing(names: Iterable[str], config: object) -> list[str]:
    return [name for name in names if not hasattr(config, name)]


def _gone(options: Iterable[str]) -> str:
    return f"torch {torch.__version__} no longer has its options {', '.join(options)}"


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
    """The function of (model, *args, **kwargs) that compiles training steps and leaves the rest to `forward`.

    Args:
        options: of `partitioner.compile_graph`.
        captured: what steps on a GPU are handed to.
        fallback: records that a step cannot be compiled.
    """
    signature = inspect.signature(forward)
    # Dynamo remembers by the code's name which sizes change.
    title = f"{forward.__qualname__}_{next(_NUMBERS)}"
    names = list(signature.parameters)[1:]
    # By which parameters take gradients: torch 2.11 does not guard on that, and an unfrozen one would get none. And by
    # whether sizes are the first that came: of what fits a call Dynamo takes what ran last, and after a batch of
    # another size would go on by what was compiled for any.
    steps: dict[tuple[tuple[bool, ...], bool], Callable[..., Any]] = {}
    usual: list[torch.Size] = []
    attentions: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()

    def training_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if fallback.reason or not _is_training_step(model) or _asks_for_more(model, given):
            return forward(model, *args, **kwargs)
        open_names = set(names[len(args) :])
        changed = {"use_cache": False} if "use_cache" in open_names or _hands_on_use_cache(model) else {}
        rows = whole_rows.arguments(model, given)
        changed |= rows if open_names.issuperset(rows) else {}
        parameters = parameters_below(model)
        trained = tuple(parameter.requires_grad for parameter in parameters)
        sizes = [value.shape for value in (*args, *{**kwargs, **changed}.values()) if isinstance(value, torch.Tensor)]
        key = trained, sizes == (usual or sizes)
        step = steps.get(key)
        if step is None:
            # fully_shard may have come after `initialize`.
            may_capture = captured.when and key[1] and not _is_sharded(model)
            step = steps[key] = _compile(forward, title, {**options, "captured": captured if may_capture else None})
        if model not in attentions:
            attentions[model] = bias_gradients.attentions(model)
        try:
            # Most of what compiling makes stays until it is done: seconds would go into looking for garbage there.
            with gc_pause.paused(), bias_gradients.left_out(attentions[model]):
                outputs = whole_rows.without_cache(step(model, *args, **{**kwargs, **changed}))
            usual[:] = usual or sizes
            return outputs
        except Exception as error:
            root = stock_fallback.root_of(error)
            if isinstance(root, (torch.OutOfMemoryError, CompileError)):
                raise root from None
            # Not the error itself: its traceback has frames, whose variables keep tensors alive.
            reason, cause = stock_fallback.reason_of(error), error if fallback.strict else None
        # Wrong arguments make the trace fail too: then the error to show is the one that `forward` has for them.
        outputs = forward(model, *args, **kwargs)
        fallback.begin(reason, cause)
        steps.clear()
        return outputs

    training_forward.__signature__ = signature  # type: ignore[attr-defined]
    return training_forward


def _is_training_step(model: nn.Module) -> bool:
    # Dynamo cannot be entered from inside torch.func's transforms.
    transformed = torch._C._are_functorch_transforms_active()
    return model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed


def _hands_on_use_cache(model: nn.Module) -> bool:
    """Whether it is one of peft's models around one that takes `use_cache`."""
    inner = getattr(model, "get_base_model", None)
    return inner is not None and "use_cache" in inspect.signature(inner().forward).parameters


def _asks_for_more(model: nn.Module, given: Mapping[str, Any]) -> bool:
    config = config_of(model)
    asked = [given.get(name) for name in _CACHES]
    # transformers registers its capturing hooks under a lock at the first such call, which breaks the graph.
    asked += [given.get(name, getattr(config, name, None)) for name in _CAPTURES]
    return any(value is not None and value is not False for value in asked)


def _compile(forward: Callable[..., Any], title: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import exc
    from torch._dynamo.eval_frame import remove_from_cache

    from fuseopt.training import early_kernels, partitioner

    if options["backend"] == "inductor":
        early_kernels.start()

    def step(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(model, *args, **kwargs)

    # Dynamo keeps what it compiles, and counts it, by code object, which models must not share.
    step = types.FunctionType(step.__code__.replace(co_name=title), step.__globals__, title, None, step.__closure__)

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Those that Dynamo met with while it traced: by way of frames they would keep what the caller's hold, the first
        # step's outputs too, until Python searches everything.
        gc_pause.drop_tracebacks(exc.ObservedException)
        return _tried_once(partitioner.compile_graph(graph, inputs, **options))

    compiled = dynamo_config.patch(_DYNAMO_OPTIONS)(torch.compile(step, backend=compile_graph, fullgraph=True))
    # What Dynamo keeps by this code object refers to it, and would outlive it with all that was compiled.
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
