"""How `verify` compares decode steps with weights in 8 or 4 bits: with the dequantised and with the model's weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuseopt import apply
from fuseopt.ops.low_bit import LowBitWeight, dequantize
from fuseopt.verify_inputs import DEFAULT_TOKENS
from fuseopt.verify_runs import Tensors

if TYPE_CHECKING:
    from fuseopt.generation.engine.low_bit import QuantisedModule
    from fuseopt.generation.generate import FusedGenerate
    from fuseopt.verify import Comparison

STEP_LOGITS = "logits of generate()"
_LENGTHS = ("max_new_tokens", "max_length")
MOST_HALF_STEPS = 1.05
"""The largest `rounding_error` allowed: 1, plus 5% since scales may be rounded to half precision."""


@dataclass(frozen=True)
class Drift:
    """Distance of one model's next-token distributions from another's, over the same tokens.

    Attributes:
        kl: Kullback-Leibler divergence from the other model's distribution to this one's, mean over tokens, in nats.
        same_top: share of the tokens for which both models have the same most probable one.
        tokens: how many were compared.
    """

    kl: float
    same_top: float
    tokens: int

    @classmethod
    def between(cls, expected: Tensor, found: Tensor) -> Drift:
        """The drift from `expected` to `found`, logits [rows, tokens, vocab] each."""
        wanted, own = (logits.double().log_softmax(-1) for logits in (expected, found))
        kl = torch.where(wanted.isneginf(), 0.0, wanted.exp() * (wanted - own)).sum(-1)
        same = expected.argmax(-1) == found.argmax(-1)
        return cls(kl.mean().item(), same.double().mean().item(), same.numel())

    def __str__(self) -> str:
        agreed = round(self.same_top * self.tokens)
        return f"KL divergence {self.kl:.1e} nats a token, the same most probable token for {agreed} of {self.tokens}"


@dataclass(frozen=True)
class LowBitVerification:
    """Comparisons of decode steps with weights in 8 or 4 bits: rounding of the steps, and effect of the quantisation.

    Attributes:
        steps: logits of generate() against a stock model with the dequantised weights.
        rounding: the largest error of the quantised weights, see `rounding_error`.
        drift: of the steps' distributions from those of the unquantised model.
        shortened: what the steps continued if not the whole prompt, in words.
    """

    steps: Comparison
    rounding: float
    drift: Drift
    shortened: str = ""

    @property
    def problem(self) -> str | None:
        """The comparison that failed, in one line; None if none did."""
        if not self.steps.ok:
            return f"{self.steps.name}: error {self.steps.fused_error:.1e}, allowed {self.steps.tolerance:.1e}"
        if self.rounding > MOST_HALF_STEPS:
            return f"quantised weights: off by {self.rounding:.2f} half steps, allowed {MOST_HALF_STEPS}"
        return None

    def __str__(self) -> str:
        shortened = f"  steps compared on {self.shortened}\n" if self.shortened else ""
        return (
            f"{shortened}  steps with the dequantised weights, error against float64: {self.steps}\n"
            f"  quantised weights: off by {self.rounding:.2f} half steps at most, allowed "
            f"{MOST_HALF_STEPS}\n"
            f"  what quantising changes: {self.drift}"
        )


@dataclass(frozen=True)
class StepRun:
    """A greedy generate() of the fused model.

    Attributes:
        tokens: [rows, new] int64.
        logits: [rows, new, vocab].
        modules: the quantised layers.
        not_compared: why the logits cannot be compared, since not only quantised weights made them; None if they can.
        prompt: the keyword arguments that `generate()` was called with.
        shortened: what `prompt` is of the user's prompt, in words; "" if it is all.
    """

    tokens: Tensor
    logits: Tensor
    modules: Sequence[QuantisedModule]
    not_compared: str | None
    prompt: Mapping[str, Any] = field(default_factory=dict)
    shortened: str = ""


def fused_generate(model: nn.Module) -> FusedGenerate | None:
    """The FusedGenerate of a fused model; None if it has none."""
    applied = apply.applied_to(model)
    after = (change.after for change in applied.changes) if applied is not None else ()
    return next((fused for fused in after if hasattr(fused, "cache_dtype")), None)


def step_run(
    model: nn.Module, generate: FusedGenerate, prompt: Mapping[str, Any], options: Mapping[str, Any]
) -> StepRun:
    """Runs a greedy `generate()` of the fused model.

    If products with as many rows as the prompt has read the unquantised weights, it runs another one on a part of it.

    Args:
        generate: the model's FusedGenerate, with quantised weights.
        prompt: keyword arguments of `generate()`.
        options: further keyword arguments, of which only the lengths are used.
    """
    from fuseopt.generation.prompt.prefill import UNQUANTISED_PROMPT

    low_bit = generate.checked.low_bit
    assert low_bit is not None
    lengths = {name: options[name] for name in _LENGTHS if name in options}
    lengths = lengths or {"max_new_tokens": DEFAULT_TOKENS}
    tokens, logits = greedy(model, prompt, lengths)
    prompt, shortened = _shortened(generate, prompt)
    if shortened:  # as many steps, which a `max_length` does not say of a part
        tokens, logits = greedy(model, prompt, {"max_new_tokens": tokens.shape[1]})
    call = generate.calls[-1]
    reason = call.reason if call.tier.value == "T2" else UNQUANTISED_PROMPT if call.unquantised_prompt else None
    if generate.cache_dtype:
        reason = f"keys and values are in {generate.cache_dtype}"
    return StepRun(tokens, logits, tuple(low_bit.modules()), reason, prompt, shortened)


def _shortened(generate: FusedGenerate, prompt: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of `prompt` that is small enough for all products to read quantised weights, and what it is in words.

    That is "" if all of it is small enough, or it has other tensors than token ids and their mask. A mask that excludes
    all tokens of a row's part is one of ones there.
    """
    from fuseopt.generation.prompt.prefill import reads_unquantised

    checked = generate.checked
    most = checked.step.most_quantised_rows if checked.is_built else None
    if most is None or not {"input_ids"} <= prompt.keys() <= {"input_ids", "attention_mask"}:
        return prompt, ""
    (rows, length), has_mask = prompt["input_ids"].shape, "attention_mask" in prompt
    if has_mask and prompt["attention_mask"].shape != (rows, length):
        return prompt, ""
    kept_rows, kept = min(rows, most), length
    if not checked.step.shape.encoder_width:
        kept = min(length, most // kept_rows)
        while reads_unquantised(checked.step, checked.graphs, kept_rows, kept):
            kept -= 1
    if (kept_rows, kept) == (rows, length):
        return prompt, ""
    part = {name: values[:kept_rows, length - kept :] for name, values in prompt.items()}
    if has_mask:  # on the right, padding may be all of a part
        kept_mask = part["attention_mask"]
        part["attention_mask"] = torch.where(kept_mask.any(1, keepdim=True), kept_mask, 1)
    return part, (
        f"the last {kept} of {length} tokens of {kept_rows} of {rows} prompts: products of more than {most} rows read "
        "the unquantised weights"
    )


def greedy(
    model: nn.Module, prompt: Mapping[str, Any], lengths: Mapping[str, int], forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """New tokens [rows, new] of a greedy `generate()`, and their logits [rows, new, vocab] before any processor.

    Args:
        forced: tokens [rows, new] int64 to generate instead of the most probable ones.
    """
    processors = {} if forced is None else {"logits_processor": [Forced(forced)]}
    found = model.generate(  # type: ignore[operator]
        **prompt,
        **lengths,
        **processors,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[:, -len(found.logits) :], torch.stack(found.logits, 1)


class Forced:
    """Logits processor that excludes all tokens but a given one in each step.

    Args:
        tokens: [rows, steps] int64, the token of each row and step.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._left = iter(tokens.unbind(1))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).scatter_(1, next(self._left)[:, None], 0.0)


def forced_logits(model: nn.Module, prompt: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Logits [rows, new, vocab] of a `generate()` that is forced to generate `tokens` [rows, new] int64."""
    return greedy(model, prompt, {"max_new_tokens": tokens.shape[1]}, tokens)[1]


def dequantised_logits(run: StepRun, model: nn.Module, prompt: Mapping[str, Any]) -> Tensors:
    """Reference logits of `run`: those of the stock `model`, in its dtype, with the dequantised weights."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in run.modules:
        target = twin.get_submodule(module.path)
        weight = module.dequantised(target.weight.dtype)  # type: ignore[arg-type]
        target.weight = nn.Parameter(weight, requires_grad=False)
    return {STEP_LOGITS: forced_logits(twin, prompt, run.tokens)}


def rounding_error(run: StepRun) -> float:
    """The largest root-mean-square error of weights that share a scale, in half steps of a scale that clips nothing.

    A step is the distance between neighbouring values. Rounding to nearest with that scale errs by at most half a step,
    and `quantize` uses another scale only where it errs less. More than `MOST_HALF_STEPS` is therefore a bug.
    """
    parts = (part for module in run.modules for part in zip(module.weights, module.low_bit, strict=True))
    return max((_half_steps(*part) for part in parts), default=0.0)


def _half_steps(weight: Tensor, low: LowBitWeight) -> float:
    groups = weight.detach().to(low.values.device, torch.float32).unflatten(1, (-1, low.group))
    errors = dequantize(low).unflatten(1, (-1, low.group)) - groups
    if low.zeros is None:
        step = groups.abs().amax(-1) / (127 if low.bits == 8 else 7)
    else:
        step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    # A scale has no finer steps than its dtype.
    half = (step / 2).clamp(min=torch.finfo(low.scales.dtype).smallest_normal)
    found = errors.square().mean(-1).sqrt() / half
    return torch.where(half.isfinite(), found, 0.0).nan_to_num(nan=math.inf).max().item()
