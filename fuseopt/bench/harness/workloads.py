"""What is timed: a model doing some work, stock and under several configs, or a logits processor alone."""

from __future__ import annotations

import copy
import functools
import itertools
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from fuseopt import api, apply
from fuseopt.bench.harness import progress
from fuseopt.bench.harness.records import FAILED, STOCK
from fuseopt.build import loader
from fuseopt.errors import CompileError, ConfigError
from fuseopt.ops import registry
from fuseopt.runtime.timer import Call

FusionConfig = Mapping[str, Any] | str
Work = Callable[[nn.Module], Tensor]


class Case(Protocol):
    """One piece of work to time in several ways.

    Attributes:
        rounds: samples of each way, see `time_in_turns`.
        calls_per_sample: calls whose mean is one sample.
        steps: units of work in a call, such as tokens; times are per unit.
        warm_up: calls before the one whose result is compared.
    """

    @property
    def name(self) -> str: ...

    @property
    def rounds(self) -> int: ...

    @property
    def calls_per_sample(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def warm_up(self) -> int: ...

    def calls(self) -> Mapping[str, Call | str]:
        """The calls to time against each other, stock first; for one that is not possible, the reason instead."""


@dataclass(frozen=True)
class ModelCase:
    """`work` done by the model that `model()` returns: stock, and under each config.

    Attributes:
        stock_work: what the stock model does instead, with the same result; by default `work`.
        others: further ways of the stock model to the same result, by name.
    """

    name: str
    model: Callable[[], nn.Module]
    work: Work
    configs: Mapping[str, FusionConfig]
    rounds: int = 7
    calls_per_sample: int = 1
    stock_work: Work | None = None
    others: Mapping[str, Work] = field(default_factory=dict)
    steps: int = 1
    warm_up: int = 0

    def calls(self) -> Mapping[str, Call | str]:
        stock = self.model()
        calls: dict[str, Call | str] = {STOCK: functools.partial(self.stock_work or self.work, stock)}
        for name, work in self.others.items():
            calls[name] = functools.partial(work, parameter_sharing_copy(stock))
        for name, config in self.configs.items():
            twin = parameter_sharing_copy(stock)
            try:
                label, unmet = fuse(twin, name, config)
            except ConfigError:
                raise
            except Exception as error:
                label, unmet = name, failed(error)
            calls[label] = unmet or functools.partial(self.work, twin)
        return calls


@dataclass(frozen=True)
class ProcessorCase:
    """A logits processor of transformers and its fused form, which calls the op `op`, on the same tokens and scores."""

    name: str
    op: str
    stock: LogitsProcessor
    fused: LogitsProcessor
    input_ids: Tensor
    scores: Tensor
    rounds: int = 25
    calls_per_sample: int = 4
    steps: int = 1
    warm_up: int = 0

    def calls(self) -> Mapping[str, Call | str]:
        device = self.scores.device
        if device.type in loader.KINDS:
            loader.load(device.type)
        choice = registry.get(self.op).choose("auto", device, [self.scores.dtype])
        return {
            STOCK: functools.partial(self.stock, self.input_ids, self.scores),
            _label(type(self.fused).__name__, {choice.backend}): functools.partial(
                self.fused, self.input_ids, self.scores
            ),
        }


def fuse(model: nn.Module, name: str, config: FusionConfig) -> tuple[str, str | None]:
    """Fuses `model`. Returns `name` with the backends used, and the reason if nothing was replaced, else None."""
    with warnings.catch_warnings():
        # A config that replaces nothing is shown as a row with the reason.
        warnings.simplefilter("ignore", category=UserWarning)
        # Without the line that `initialize` logs, which would break the progress bar.
        api.initialize_silently(model, config, strict=False)
    # Without strict, a step that cannot be compiled would silently time the stock forward.
    apply.be_strict(model, True)
    report = api.report(model)
    backends = {row.backend for row in report.replaced if row.backend}
    return (_label(name, backends), None) if report.replaced else (name, "; ".join(report.unmet))


def failed(error: Exception) -> str:
    """The one-line note for a call that raised `error`; also writes the traceback to stderr."""
    progress.say("".join(traceback.format_exception(error)))
    return FAILED + "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def call(input: Tensor) -> Work:
    """Work: a module's output for one argument, without gradients."""

    def work(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module(input)

    return work


def forward(**inputs: Any) -> Work:
    """Work: the logits of a forward without gradients."""

    def work(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    return work


def training_forward(**inputs: Any) -> Work:
    """Work: the logits of a forward in training mode, which saves activations for a backward."""

    def work(model: nn.Module) -> Tensor:
        return model.train()(**inputs).logits.detach()

    return work


def compiled(work: Work) -> Work:
    """`work` by the model under torch.compile; the first call compiles."""

    def compiled_work(model: nn.Module) -> Tensor:
        if model._compiled_call_impl is None:
            model.compile()
        return work(model)

    return compiled_work


# Seconds between alarms: Python ignores what one raises in a destructor or in the callback of a weak reference.
_NEXT_ALARM = 5.0


class _TimeIsUp(BaseException):
    """Raised by an alarm. Inductor's tuner ignores any Exception of a candidate, so this is none."""


def limited(work: Work, seconds: float) -> Work:
    """`work`, or a CompileError once it has taken so many seconds; runs in the main thread.

    A compilation in another process may go on for a while.
    """

    def stop(*_: object) -> None:
        raise _TimeIsUp

    def limited_work(model: nn.Module) -> Tensor:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, _NEXT_ALARM)
        try:
            return work(model)
        except _TimeIsUp:
            raise CompileError(f"not finished in {seconds:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return limited_work


def generate(inputs: Tensor, *, new_tokens_from: int | None = None, **kwargs: Any) -> Work:
    """Work: the tokens of a `generate()` call on prompts without padding; sampling uses the same seed in every call.

    A prefix cache is emptied before each call that has the same ids as the last one.

    Args:
        inputs: token ids [batch, length] int64, or features [batch, mels, frames] of audio in float32.
        new_tokens_from: each call of a model has new ids from this position on, which are equal in the n-th calls of
            all models. None for the same ids in every call.
    """
    options = {"do_sample": False, **kwargs}
    calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def work(model: nn.Module) -> Tensor:
        if options["do_sample"]:
            torch.manual_seed(0)
        if new_tokens_from is not None:
            count = calls[model] = calls.get(model, 0) + 1
            prefix, others = inputs[:, :new_tokens_from], inputs[:, new_tokens_from:]
            prompts = torch.cat((prefix, 1 + (others + count) % (model.config.vocab_size - 1)), dim=1)
            return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        apply.forget_prompts(model)
        if inputs.is_floating_point():
            return model.generate(inputs.to(model.dtype), **options)
        return model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)

    return work


def training_step(input_ids: Tensor, dtype: torch.dtype) -> Work:
    """Work: the loss of a forward under autocast to `dtype`, followed by the backward."""

    def work(model: nn.Module) -> Tensor:
        model.train()
        model.zero_grad(set_to_none=True)
        with torch.autocast(input_ids.device.type, dtype):
            loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        return loss.detach()

    return work


def random_tokens(device: torch.device, vocab: int, batch: int, length: int) -> Tensor:
    """Token ids [batch, length], int64, never 0, which is padding; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocab, (batch, length), generator=generator).to(device)


def random_features(device: torch.device, batch: int, mels: int, frames: int) -> Tensor:
    """Features of audio [batch, mels, frames], float32; the same in every run."""
    return torch.randn(batch, mels, frames, generator=torch.Generator().manual_seed(0)).to(device)


def beams_name(beams: int) -> str:
    """The decoding method, as in a case's name."""
    return "greedy" if beams == 1 else f"{beams} beams"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference(result: Tensor, stock: Tensor) -> str:
    """The largest absolute difference of a result from stock's, or how many tokens differ."""
    if stock.is_floating_point():
        # Equal entries, -inf among them, differ by 0.
        apart = torch.where(result == stock, 0.0, (result.double() - stock.double()).abs())
        return f"{apart.max().item():.1e}"
    if result.shape != stock.shape:
        return f"shape {list(result.shape)}, not {list(stock.shape)}"
    others = int((result != stock).sum())
    return f"{others} of {stock.numel()} tokens" if others else "tokens equal"


def parameter_sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with its own modules and config that shares its Parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in itertools.chain(model.parameters(), model.buffers())})


def _label(name: str, backends: Set[str]) -> str:
    listed = ", ".join(sorted(backends))
    return name if listed in name else f"{name} [{listed}]"
