"""`fuseopt bench curves`: whether a fused model trains like stock, by loss curves of several seeds and by gradients."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fuseopt.bench.harness import progress
from fuseopt.bench.harness.architectures import dropout_rates, load_config, random_model
from fuseopt.bench.harness.measure import measure
from fuseopt.bench.harness.records import STOCK, Record, Results
from fuseopt.bench.harness.workloads import FusionConfig, failed, fuse
from fuseopt.errors import ConfigError

_T = TypeVar("_T")
EXACT_STEPS = 50
WINDOW = 25
LEARNING_RATE = 1e-3
SUCCESSORS = 8
# Relative change of every weight, about the rounding error of float32.
NUDGE = 1e-7


@dataclass(frozen=True)
class Row:
    """A training run from random weights on text of a random Markov chain with `SUCCESSORS` successors per token.

    Attributes:
        model: an architecture by name, or a folder with a config.json.
        length: tokens per row; a T5 also has as many decoder tokens, the continuation.
        dropout: value of every dropout rate of the model.
        autocast: whether to train under autocast to bfloat16.
    """

    model: str
    batch: int = 16
    length: int = 128
    dropout: float = 0.1
    autocast: bool = True

    @property
    def name(self) -> str:
        precision = "bfloat16 autocast" if self.autocast else "float32"
        return f"{self.model}, {self.batch} x {self.length}, dropout {self.dropout:g}, {precision}"


def run(
    *, device: torch.device, rows: Sequence[Row], configs: Mapping[str, FusionConfig], steps: int, seeds: int
) -> Results:
    """Trains stock and every config for `steps` steps from the same weights; each seed has its own text and dropout.

    Then, without dropout, it compares the losses of `EXACT_STEPS` steps in float32, and the gradients of one step with
    float64. Training amplifies any difference, so the losses are shown beside those of stock from weights that differ
    by a rounding error. A config that raises gets rows with the reason. Progress on stderr shows each training.

    Raises:
        ConfigError: an unknown model; a config that replaces nothing.
    """
    records = measure(rows, lambda row: _records(row, configs, device, steps, seeds))
    return Results.measured_here("curves", records)


def _records(
    row: Row, configs: Mapping[str, FusionConfig], device: torch.device, steps: int, seeds: int
) -> Iterator[Record]:
    case = f"{row.name}, {steps} steps"

    def curves_of(config: FusionConfig | None) -> list[list[float]]:
        return [_losses(row, config, device, seed, steps) for seed in range(seeds)]

    stock = curves_of(None)
    ends = sorted(curve[-1] for curve in map(_windows, stock))
    yield Record(case, STOCK, note=f"{seeds} seeds end at {ends[0]:.4f} to {ends[-1]:.4f}")
    for name, config in configs.items():
        fused = _attempt(functools.partial(curves_of, config))
        if isinstance(fused, str):
            yield Record(case, name, note=fused)
            continue
        inside, end = _inside(list(map(_windows, fused)), list(map(_windows, stock)))
        note = f"mean ends at {end:.4f}; inside stock's seeds in {inside:.0%} of the windows of {WINDOW} steps"
        yield Record(case, name, note=note)
    exact = dataclasses.replace(row, dropout=0.0, autocast=False)
    expected = _losses(exact, None, device, 0, EXACT_STEPS)
    nudged = _losses(exact, None, device, 0, EXACT_STEPS, NUDGE)
    others = {
        name: _attempt(functools.partial(_losses, exact, config, device, 0, EXACT_STEPS))
        for name, config in configs.items()
    }
    for name, losses in {STOCK: nudged, **others}.items():
        if isinstance(losses, str):
            yield Record(f"{exact.name}, {EXACT_STEPS} steps", name, note=losses)
            continue
        worst = max(abs(own - other) / other for own, other in zip(losses, expected, strict=True))
        note = "of the losses" + (f", weights {NUDGE:g} of themselves off" if name == STOCK else "")
        yield Record(f"{exact.name}, {EXACT_STEPS} steps", name, difference=f"{worst:.1e}", note=note)
    without = dataclasses.replace(row, dropout=0.0)
    stock_error, errors = _gradient_errors(without, configs, device)
    case = f"{without.name}, gradients against float64"
    yield Record(case, STOCK, difference=f"{stock_error:.1e}")
    for name, error in errors.items():
        if isinstance(error, str):
            yield Record(case, name, note=error)
        else:
            yield Record(case, name, difference=f"{error:.1e}", note=f"{error / stock_error:.3f} times stock's")


def _attempt(train: Callable[[], _T]) -> _T | str:
    """What `train` returns, or the note on the exception that it raises.

    Raises:
        ConfigError: the config replaces nothing.
    """
    try:
        return train()
    except ConfigError:
        raise
    except Exception as error:
        return failed(error)


def _windows(losses: Sequence[float]) -> list[float]:
    """The means of every `WINDOW` steps."""
    return [statistics.fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def _inside(fused: Sequence[Sequence[float]], stock: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The share of windows in which the mean of `fused` lies within the seeds of `stock`; and the last mean."""
    means = [statistics.fmean(window) for window in zip(*fused, strict=True)]
    pairs = list(zip(means, zip(*stock, strict=True), strict=True))
    return sum(min(window) <= mean <= max(window) for mean, window in pairs) / len(pairs), means[-1]


def _model(row: Row, config: FusionConfig | None, device: torch.device, seed: int) -> nn.Module:
    model = random_model(row.model, device, torch.float32, **dropout_rates(row.model, row.dropout)).train()
    torch.manual_seed(seed)
    if config is not None:
        _, unmet = fuse(model, "", config)
        if unmet is not None:
            raise ConfigError(f"nothing is replaced in {row.model}: {unmet}")
    return model


def _losses(
    row: Row, config: FusionConfig | None, device: torch.device, seed: int, steps: int, nudge: float = 0.0
) -> list[float]:
    model = _model(row, config, device, seed)
    with torch.no_grad():
        for parameter in model.parameters() if nudge else ():
            parameter *= 1 + nudge * torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    what = f"{STOCK if config is None else 'fused'}, seed {seed}"
    for batch in progress.steps(_batches(row, device, seed, steps), what, steps):
        losses.append(_loss(model, batch, row.autocast))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def _loss(model: nn.Module, batch: Mapping[str, Tensor], autocast: bool) -> Tensor:
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        return model(**batch).loss


def _gradient_errors(
    row: Row, configs: Mapping[str, FusionConfig], device: torch.device
) -> tuple[float, dict[str, float | str]]:
    """The norm of all gradients' differences from float64, relative to the norm of the gradients, in one step.

    Of stock and of each config; for a config that raises, the note that says so.
    """
    (batch,) = _batches(row, device, 0, 1)
    exact = _model(row, None, device, 0).double()
    _loss(exact, batch, False).backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    size = sum(gradient.square().sum() for gradient in expected.values()) ** 0.5

    def error(config: FusionConfig | None) -> float:
        model = _model(row, config, device, 0)
        _loss(model, batch, row.autocast).backward()
        gradients = ((parameter.grad, expected[path]) for path, parameter in model.named_parameters())
        distance = sum((gradient.double() - other).square().sum() for gradient, other in gradients) ** 0.5
        return (distance / size).item()

    return error(None), {name: _attempt(functools.partial(error, config)) for name, config in configs.items()}


def _batches(row: Row, device: torch.device, seed: int, count: int) -> Iterator[dict[str, Tensor]]:
    """Batches of one Markov chain; the seed decides its path. Drawn on the CPU, so they are equal on every device."""
    config = load_config(row.model)
    chain = torch.Generator().manual_seed(0)
    successors = torch.randint(config.vocab_size, (config.vocab_size, SUCCESSORS), generator=chain)
    weights = 1 / torch.arange(1.0, SUCCESSORS + 1)
    draws = torch.Generator().manual_seed(seed)
    columns = row.length * (2 if config.is_encoder_decoder else 1)
    for _ in range(count):
        steps = torch.multinomial(weights, row.batch * columns, replacement=True, generator=draws)
        tokens = [torch.randint(config.vocab_size, (row.batch,), generator=draws)]
        for step in steps.view(columns, row.batch)[1:]:
            tokens.append(successors[tokens[-1], step])
        ids = torch.stack(tokens, 1).to(device)
        labels = ids[:, -row.length :].contiguous()
        yield {"input_ids": ids[:, : row.length].contiguous(), "labels": labels}
