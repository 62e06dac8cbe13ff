"""verify(): compares the fused model with the stock one on the user's inputs; the reference is a float64 copy."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fuseopt
from fuseopt import apply, verify_inputs, verify_low_bit, verify_runs
from fuseopt.config import Config
from fuseopt.errors import InputsError, printable, shown
from fuseopt.kernel_table import find_kernel
from fuseopt.report import NOTHING
from fuseopt.verify_runs import LOSS
from fuseopt.verify_watch import GENERATE_HINT, LABELS_HINT, Watch

# The largest error allowed to the fused model, as a multiple of the stock model's error,
ERROR_FACTOR = 2.0
# or in units in the last place of the output's largest value, whichever is more.
FLOOR_ULPS = 2.0
# The same multiple for loss and gradients. Some of many small tensors are almost exact in stock by chance, so the stock
# error of a gradient counts as at least the median of all parameters', relative to the gradient's largest value.
TRAINING_FACTOR = 4.0
# The same multiple for the steps with quantised weights in float32 and float64. They are few rows, multiplied by other
# kernels than stock's, so the largest error of either is a matter of chance
# (docs/lab-notes/2026-11-30-verify-of-quantised-steps.md).
STEPS_FACTOR = 4.0

# Calls of the fused model by device type, each compared: on a GPU later calls are captured as CUDA graphs.
_CALLS = {"cuda": 4}


@dataclass(frozen=True)
class Comparison:
    """One tensor of the stock and of the fused model, against float64.

    Attributes:
        name: of an output, such as "logits", or of a parameter.
        difference: largest absolute difference between the fused and the stock model.
        stock_error, fused_error: largest absolute difference of each model from the float64 reference.
        tolerance: largest `fused_error` allowed.
    """

    name: str
    difference: float
    stock_error: float
    fused_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.fused_error <= self.tolerance

    @property
    def excess(self) -> float:
        """`fused_error` as a multiple of `tolerance`; 0 if the stock model itself has no finite error."""
        return 0.0 if math.isinf(self.tolerance) else self.fused_error / self.tolerance

    def __str__(self) -> str:
        return f"stock {self.stock_error:.2e}, fused {self.fused_error:.2e}, allowed {self.tolerance:.2e}"


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        output: name of the output tensor with the largest error relative to its tolerance, such as "logits". The next
            four attributes are of this tensor, as in `Comparison`.
        tokens_agree: whether both models generate the same tokens; None if `verify` was not asked to generate.
        tokens_count: whether `ok` requires `tokens_agree`. True in float32 and float64, unless weights or cache are
            quantised; in half precision near-ties between two tokens are decided by the last bit.
        replaced: number of objects that the config replaced: modules, and attributes of the model such as `generate`.
        loss: of the training step; None if none was run.
        gradient: of the parameter whose gradient has the largest error relative to its tolerance; None as above.
        gradients: number of parameters whose gradients were compared.
        ran: False if none of the replaced objects was called, so that stock was compared with itself.
        not_run: what the config asks for and nothing ran, and what was not compared, one line each.
        weights: how `generate()` quantises the weights, such as "int8"; "" if it does not.
        summary: what was replaced, as `Report.summary`.
        cache: how `generate()` quantises keys and values, "int8" or "fp8"; "" if it does not.
        low_bit: comparisons of the steps with quantised weights; None if no weights are quantised, or nothing was
            generated, or the logits could not be compared, which `not_run` says.
    """

    output: str
    difference: float
    stock_error: float
    fused_error: float
    tolerance: float
    tokens_agree: bool | None
    tokens_count: bool
    replaced: int
    loss: Comparison | None = None
    gradient: Comparison | None = None
    gradients: int = 0
    ran: bool = True
    not_run: tuple[str, ...] = ()
    weights: str = ""
    summary: str = NOTHING
    cache: str = ""
    low_bit: verify_low_bit.LowBitVerification | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """What is less exact than allowed, in a few words; None if nothing is."""
        for compared in (self._outputs, self.loss, self.gradient):
            if compared is not None and not compared.ok:
                return f"{compared.name}: error {compared.fused_error:.1e}, allowed {compared.tolerance:.1e}"
        if self.tokens_count and self.tokens_agree is False:
            return "other tokens"
        return None if self.low_bit is None else self.low_bit.problem

    @property
    def _outputs(self) -> Comparison:
        return Comparison(self.output, self.difference, self.stock_error, self.fused_error, self.tolerance)

    def __str__(self) -> str:
        tokens = {None: "not generated", True: "the same", False: "not the same"}[self.tokens_agree]
        idle = "" if self.ran else "; nothing that was replaced ran"
        lines = [
            f"verify: {'ok' if self.problem is None else f'FAILED ({printable(self.problem)})'}, "
            f"{printable(self.summary)}{idle}",
            f"  {printable(self.output)}: fused differs from stock by {self.difference:.2e} at most",
            f"  error against float64: {self._outputs}",
        ]
        if self.loss is not None and self.gradient is not None:
            lines += [
                f"  training loss, error against float64: {self.loss}",
                f"  gradients of {self.gradients} parameters, the worst of {printable(self.gradient.name)}: "
                f"{self.gradient}",
            ]
        parts = ("weights", self.weights), ("keys and values", self.cache)
        quantised = " and ".join(f"{part} in {kind}" for part, kind in parts if kind)
        why = f"; not required, as generate() decodes with {quantised}" if quantised else ""
        lines.append(f"  tokens: {tokens}{why}")
        if self.low_bit is not None:
            lines.append(str(self.low_bit))
        return "\n".join((*lines, *(f"  not run: {printable(line)}" for line in self.not_run)))


def verify(
    model: nn.Module,
    config: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    labels: Tensor | None = None,
    train: bool | None = None,
    generate: Mapping[str, Any] | Literal[False] | None = None,
) -> Verification:
    """Compares the stock and the fused model on `inputs` with a copy of the stock model that computes in float64.

    All three run in eval mode without gradients. If `train`, they also run a training step, whose loss and gradients
    are compared, with every dropout rate at 0: fused dropout draws other masks from the same seed. Afterwards the model
    is stock or fused as before, with the same gradients, buffers, modes and random generators. On a GPU the fused model
    runs four times, so that calls captured as CUDA graphs are compared too. The float64 copy needs memory for a second
    model, with 8 bytes per parameter, and as much for its gradients.

    Args:
        model: on any device, in any floating-point dtype.
        config: as for `initialize`.
        inputs: required; keyword arguments of the model's forward, such as a tokenizer returns. An encoder-decoder
            model that is given neither decoder inputs nor labels gets its prompt, shifted, as `decoder_input_ids`.
        labels: for the loss; may also be in `inputs`. The loss of a model whose forward takes none is a sum of its
            outputs with random weights.
        train: whether a training step is compared. By default if there are labels, or if the config has
            `memory_efficient_fusion` or a kernel that only acts in training.
        generate: keyword arguments of `model.generate`. If given, both models also generate from `inputs`, greedily by
            default, with the same random seed. By default 16 tokens if the config replaces `generate()`, `inputs` are
            `input_ids` and `attention_mask`, and the model has positions for them. False: nothing is generated.

    Raises:
        NotAModelError, ConfigError: as `initialize`.
        InputsError: an argument is wrong or missing; nothing has been changed.
        InputsError: the model returns no floating-point tensor, or its training step is random without dropout too.
    """
    if inputs is None:
        raise InputsError(
            "inputs: missing; the config comes before the inputs, as in fuseopt.verify(model, 'inference', inputs)"
        )
    decided = fuseopt.plan(model, Config.load(config))  # raises for a bad model or config before anything runs
    wanted = decided.config
    if train is not None and not isinstance(train, bool):
        raise InputsError(f"train: expected True, False or None, got {shown(train)}")
    if train is None:
        has_labels = labels is not None or (isinstance(inputs, Mapping) and inputs.get("labels") is not None)
        train = has_labels or acts_in_training(wanted)
    given = verify_inputs.checked(model, inputs, labels, train)
    replaces_generate = any(
        site.path == "generate" for replacement in decided.replacements for site in replacement.sites
    )
    options = verify_inputs.generation(model, given, generate, replaces_generate)
    with apply.lock(model), apply.as_found_after(model):
        apply.put(model, None)
        with verify_runs.state_kept(model):
            references = References(model, given, train, verify_inputs.prompt(inputs), options)
            with fuseopt.fused(model, wanted):
                found, run = references.compared(model), references.low_bit_run(model)
            return found if run is None else references.with_low_bit(found, model, run)


class References:
    """What a stock model and its float64 copy compute for some inputs, for comparison with fused models.

    Args:
        model: the stock model; inside `verify_runs.state_kept`, as for `compared`.
        inputs: of the forward, checked and complete.
        train: whether a training step is compared too.
        prompt, generate: keyword arguments of `generate()`; nothing is generated if `generate` is None.

    Raises:
        InputsError: the model returns no floating-point tensor, or its training step is random without dropout too.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        train: bool,
        prompt: Mapping[str, Any],
        generate: Mapping[str, Any] | None,
    ) -> None:
        self._inputs, self._prompt, self._generate = inputs, prompt, generate
        with verify_runs.evaluating(model):
            self._forward = _Reference(model, inputs, verify_runs.outputs)
            self._tokens = None if generate is None else verify_runs.tokens(model, prompt, generate)
        if not self._forward.stock:
            raise InputsError(f"verify: {type(model).__name__} returned no floating-point tensor to compare")
        self._step = None
        if train:
            with verify_runs.training(model):
                self._step = _Reference(model, inputs, verify_runs.training_step, TRAINING_FACTOR)
                if verify_runs.is_random(model, inputs, self._step.stock):
                    raise InputsError(
                        f"model: the training step of {type(model).__name__} depends on random numbers although every "
                        "dropout rate is 0, so two cannot be compared; make it deterministic, or pass train=False"
                    )

    def compared(self, model: nn.Module) -> Verification:
        """The same runs of `model`, which is fused now, compared with the references."""
        applied = apply.applied_to(model)
        watch = Watch(applied.changes if applied is not None else ())
        calls = max((_CALLS.get(parameter.device.type, 1) for parameter in model.parameters()), default=1)
        tokens = None
        with watch.watching(), verify_runs.evaluating(model):
            outputs = [c for _ in range(calls) for c in self._forward.compared(model, self._inputs)]
            if self._generate is not None:
                tokens = verify_runs.tokens(model, self._prompt, self._generate)
        gradients: list[Comparison] = []
        if self._step is None:
            not_run = [f"training steps: {LABELS_HINT}"]
        else:
            with watch.watching_training(), verify_runs.training(model) as rate:
                gradients = [c for _ in range(calls) for c in self._step.compared(model, self._inputs)]
            not_run = watch.training_not_run(rate)
        not_run += watch.idle_lines(generated=self._generate is not None)
        losses = [c for c in gradients if c.name == LOSS]
        gradients = [c for c in gradients if c.name != LOSS]
        worst = _worst(outputs)
        dtype = next(iter(model.parameters()), next(iter(self._forward.stock.values()))).dtype
        report = fuseopt.report(model)
        generate = verify_low_bit.fused_generate(model)
        weights, cache = ("", "") if generate is None else (generate.quantised, generate.cache_dtype)
        return Verification(
            worst.name,
            worst.difference,
            worst.stock_error,
            worst.fused_error,
            worst.tolerance,
            tokens_agree=None if tokens is None or self._tokens is None else torch.equal(self._tokens, tokens),
            tokens_count=dtype in (torch.float32, torch.float64) and not (weights or cache),
            replaced=len(report.replaced),
            loss=_worst(losses) if losses else None,
            gradient=_worst(gradients) if gradients else None,
            gradients=len({c.name for c in gradients}),
            ran=watch.saw_any,
            not_run=tuple(not_run),
            weights=weights,
            summary=report.summary,
            cache=cache,
        )

    def low_bit_run(self, model: nn.Module) -> verify_low_bit.StepRun | None:
        """Runs generate() of the fused `model`; None if its weights are not quantised or nothing is to be generated."""
        generate = verify_low_bit.fused_generate(model)
        if generate is None or not generate.quantised or self._generate is None:
            return None
        with verify_runs.evaluating(model):
            return verify_low_bit.step_run(model, generate, self._prompt, self._generate)

    def with_low_bit(self, found: Verification, model: nn.Module, run: verify_low_bit.StepRun) -> Verification:
        """`found` with the comparisons of `run`, a `low_bit_run`; `model` must be stock again."""
        if run.not_compared is not None:
            line = f"logits with weights in {found.weights}: {run.not_compared}"
            return replace(found, not_run=(*found.not_run, line))
        with verify_runs.evaluating(model):
            factor = STEPS_FACTOR if run.logits.element_size() >= 4 else ERROR_FACTOR
            dequantised = _Reference(
                model, run.prompt, functools.partial(verify_low_bit.dequantised_logits, run), factor
            )
            (steps,) = dequantised.against({verify_low_bit.STEP_LOGITS: run.logits})
            expected = verify_low_bit.forced_logits(model, run.prompt, run.tokens)
        drift = verify_low_bit.Drift.between(expected, run.logits)
        return replace(
            found,
            low_bit=verify_low_bit.LowBitVerification(steps, verify_low_bit.rounding_error(run), drift, run.shortened),
        )


class _Reference:
    """What `run` finds for the stock model and for its float64 copy; `factor` of the stock error is allowed."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], run: verify_runs.Run, factor: float = ERROR_FACTOR
    ) -> None:
        self._run, self._factor = run, factor
        try:
            self.stock = run(model, inputs)
        except Exception as error:
            error.add_note("verify: raised by the stock model, before anything was replaced; check the inputs")
            raise
        self._exact = verify_runs.in_float64(run, model, inputs)
        self._tolerances = dict(self._allowed(model))

    def compared(self, model: nn.Module, inputs: Mapping[str, Any]) -> list[Comparison]:
        """One run of `model`, compared tensor by tensor."""
        return self.against(self._run(model, inputs))

    def against(self, fused: verify_runs.Tensors) -> list[Comparison]:
        """The tensors of a fused run by name, each compared with stock's and the exact one."""
        return [
            _compare(name, stock, fused.get(name), self._exact[name], self._tolerances[name])
            for name, stock in self.stock.items()
        ]

    def _allowed(self, model: nn.Module) -> Iterator[tuple[str, float]]:
        trains = self._run is verify_runs.training_step
        errors = {name: _largest_difference(stock, self._exact[name]) for name, stock in self.stock.items()}
        largest = {name: _largest_value(exact) for name, exact in self._exact.items()}
        ratios = [errors[name] / largest[name] for name in errors if name != LOSS and largest[name]]
        typical = statistics.median(ratios) if trains and ratios else 0.0
        tensors = (*self.stock.values(), *(p for p in model.parameters() if p.is_floating_point()))
        coarsest = max((torch.finfo(tensor.dtype).eps for tensor in tensors), default=0.0)
        for name, stock in self.stock.items():
            info = torch.finfo(stock.dtype)
            # A loss in float32 of logits in half precision has the errors of the latter; half a unit is allowed.
            eps = info.eps if stock.dim() else max(info.eps, coarsest / (2 * FLOOR_ULPS))
            error = errors[name] if name == LOSS else max(errors[name], typical * largest[name])
            yield name, max(self._factor * error, FLOOR_ULPS * eps * largest[name], info.tiny)


def _worst(compared: Iterable[Comparison]) -> Comparison:
    return max(compared, key=lambda comparison: (comparison.excess, comparison.fused_error))


def _compare(name: str, stock: Tensor, fused: Tensor | None, exact: Tensor, tolerance: float) -> Comparison:
    stock_error = _largest_difference(stock, exact)
    if fused is None or fused.shape != stock.shape or fused.dtype != stock.dtype:
        return Comparison(name, math.inf, stock_error, math.inf, tolerance)
    return Comparison(
        name, _largest_difference(fused, stock), stock_error, _largest_difference(fused, exact), tolerance
    )


def _largest_value(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    # Equal infinities, and NaN on both sides, differ by 0; NaN on one side differs by infinity.
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf).max().item()


def with_options(found: Verification) -> str:
    """`found` as text whose hints name options of the command line in place of arguments."""
    text = str(found).replace(LABELS_HINT, "pass --train to compare loss and gradients")
    return text.replace(GENERATE_HINT, "pass --generate 16 to compare tokens")


def acts_in_training(config: Config) -> bool:
    """Whether the config has `memory_efficient_fusion`, or a kernel that only acts in training."""
    fusion = config.active_fusion
    requests = (*fusion.custom_cuda_kernels, *fusion.triton_kernels)
    return fusion.memory_efficient_fusion is not None or any(find_kernel(r.name).only_trains for r in requests)
