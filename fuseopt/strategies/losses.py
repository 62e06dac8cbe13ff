"""FusedCrossEntropy: the loss of causal language models, and which models get that loss from transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fuseopt.model_index import Site
from fuseopt.modules import FusedCausalLMLoss
from fuseopt.plan import Replacement, Skip
from fuseopt.strategies.context import ProposalContext

CAUSAL_LM = "ForCausalLM"


def propose(context: ProposalContext) -> Iterator[Replacement | Skip]:
    """One replacement for the losses of the model and of models inside it, such as a peft model's base model."""
    sites = loss_sites(context.index.model, lambda module: has_causal_lm_loss(module) or guesses_its_loss(module))
    if sites:
        build = functools.partial(FusedCausalLMLoss, causal_lm_loss(), context.wanted)
        reason = "the loss is transformers' ForCausalLMLoss"
        yield context.replacement(sites, f"{CAUSAL_LM}Loss", FusedCausalLMLoss.__name__, reason, build)


def loss_sites(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> tuple[Site, ...]:
    """The loss attribute of `model` and of the modules inside it for which `wanted` is true."""
    return tuple(
        Site(module, "_loss_function", f"{path}.loss_function".lstrip("."))
        for path, module in model.named_modules()
        if wanted(module)
    )


def has_causal_lm_loss(model: nn.Module) -> bool:
    """True if PreTrainedModel chose ForCausalLMLoss by the class name, and no other loss has been set."""
    return model.__dict__.get("loss_type") == CAUSAL_LM and "_loss_function" not in model.__dict__


def guesses_its_loss(model: nn.Module) -> bool:
    """True if `model` takes labels but PreTrainedModel found no loss for its class name, as with GPT2LMHeadModel.

    transformers then uses ForCausalLMLoss, with a warning.
    """
    return (
        model.__dict__.get("loss_type", "") is None
        and "_loss_function" not in model.__dict__
        and "labels" in inspect.signature(model.forward).parameters
    )


def causal_lm_loss() -> Callable[..., Any]:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING[CAUSAL_LM]
