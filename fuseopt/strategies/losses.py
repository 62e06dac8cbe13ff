"""FusedCrossEntropy: the loss of causal language models. And which models transformers gives that loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fuseopt.models import ModelPolicy
from fuseopt.modules import FusedCausalLMLoss
from fuseopt.plan import ModelIndex, Replacement, Site, Skip
from fuseopt.strategies.propose import Offer, replacement

CAUSAL_LM = "ForCausalLM"


def propose(index: ModelIndex, policy: ModelPolicy, offer: Offer, backend: str) -> Iterator[Replacement | Skip]:
    """One replacement for the loss of the model, and of those inside it, as of an adapter's."""
    sites = loss_sites(index.model, lambda module: has_causal_lm_loss(module) or guesses_its_loss(module))
    if sites:
        build = functools.partial(FusedCausalLMLoss, causal_lm_loss(), backend)
        reason = "the loss is transformers' for causal language models"
        yield replacement(sites, f"{CAUSAL_LM}Loss", FusedCausalLMLoss.__name__, offer, reason, build)


def loss_sites(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> tuple[Site, ...]:
    """Where the losses of the `wanted` models are set: of `model`, and of those inside it."""
    return tuple(
        Site(module, "_loss_function", f"{path}.loss_function".lstrip("."))
        for path, module in model.named_modules()
        if wanted(module)
    )


def has_causal_lm_loss(model: nn.Module) -> bool:
    """Whether PreTrainedModel found that loss for its class name, and it was not set to another."""
    return model.__dict__.get("loss_type") == CAUSAL_LM and "_loss_function" not in model.__dict__


def guesses_its_loss(model: nn.Module) -> bool:
    """Whether `model` takes labels and PreTrainedModel found no loss for its class name, as for GPT2LMHeadModel.

    transformers takes that for causal language models then, and warns.
    """
    return (
        model.__dict__.get("loss_type", "") is None
        and "_loss_function" not in model.__dict__
        and "labels" in inspect.signature(model.forward).parameters
    )


def causal_lm_loss() -> Callable[..., Any]:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING[CAUSAL_LM]
