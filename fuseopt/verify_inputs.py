"""What `verify` is given: checked before anything runs, and completed for encoder-decoder models."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fuseopt.config_checks import nearest
from fuseopt.errors import InputsError, shown

_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_IGNORED = -100
# Arguments of a plain prompt; decoder inputs are the prompt's copy that `checked` makes.
_PLAIN = {"input_ids", "attention_mask", *_DECODER[:1]}

DEFAULT_TOKENS = 16
"""What `verify` generates by default if the config replaces `generate()`."""


def checked(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, trains: bool) -> dict[str, Any]:
    """Keyword arguments of the forward: `inputs`, `labels` and, for an encoder-decoder without either, decoder inputs.

    Args:
        trains: whether a training step runs too, which needs a loss.

    Raises:
        InputsError: naming the argument, the fault and the fix.
    """
    if not isinstance(inputs, Mapping):
        raise InputsError(
            f"inputs: expected a dict of the forward's keyword arguments, such as "
            f"{{'input_ids': ids}} or what a tokenizer returns, got {type(inputs).__name__}"
        )
    given = dict(inputs)
    if labels is not None:
        if not isinstance(labels, Tensor):
            raise InputsError(f"labels: expected a tensor, got {type(labels).__name__}; pass torch.tensor(labels)")
        if given.get("labels") is not None:
            raise InputsError("labels: given twice, as an argument and in inputs; leave one out")
        given["labels"] = labels
    accepted = forward_parameters(model)
    _check_names(model, given, accepted)
    _check_parameters(model, trains)
    for name, value in given.items():
        if isinstance(value, Tensor):
            _check_tensor(model, name, value)
    if trains and "labels" in accepted and given.get("labels") is None:
        raise InputsError(
            f"labels: the training step of {type(model).__name__} needs them for its loss; pass labels=..., for a "
            "causal language model labels=inputs['input_ids'], or train=False to compare eval mode only"
        )
    return given | _decoder_inputs(model, given)


def generation(
    model: nn.Module, given: Mapping[str, Any], generate: Mapping[str, Any] | Literal[False] | None, by_default: bool
) -> Mapping[str, Any] | None:
    """Keyword arguments of `generate()`; None if nothing is to be generated.

    Args:
        given: what `checked` returned.
        generate: of the user; None leaves the choice to `by_default`, False generates nothing.
        by_default: whether to generate `DEFAULT_TOKENS` tokens. This needs a plain prompt in `given`, and a model with
            positions for them.

    Raises:
        InputsError: `generate` is no dict, or the model cannot generate.
    """
    if generate is False:
        return None
    if generate is None:
        return {"max_new_tokens": DEFAULT_TOKENS} if by_default and _is_plain_prompt(model, given) else None
    if not isinstance(generate, Mapping):
        raise InputsError(
            "generate: expected a dict of generate()'s keyword arguments, such as {'max_new_tokens': 16}, "
            f"got {shown(generate)}"
        )
    if not callable(getattr(model, "generate", None)):
        raise InputsError(f"generate: {type(model).__name__} has no generate(); leave the argument out")
    return generate


def prompt(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the user's inputs that `generate()` takes."""
    return {name: value for name, value in inputs.items() if name != "labels"}


def _is_plain_prompt(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether `given` is a prompt of token ids after which the model has positions for `DEFAULT_TOKENS` more."""
    ids, positions = given.get("input_ids"), getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not prompt(given).keys() <= _PLAIN:
        return False
    return not isinstance(positions, int) or ids.shape[1] + DEFAULT_TOKENS <= positions


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of the forward of the model's class, without the one that is bound to the model."""
    forward = inspect.getattr_static(type(model), "forward")
    bound = forward.__get__(model, type(model)) if hasattr(forward, "__get__") else forward
    return inspect.signature(bound).parameters


def _check_names(model: nn.Module, given: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]) -> None:
    # A forward of (*args, **kwargs) passes labels on. One of (input_ids, **kwargs) without labels ignores them.
    kinds = {parameter.kind for parameter in accepted.values()}
    for name in given:
        if not isinstance(name, str):
            raise InputsError(f"inputs: keys must be names of the forward's arguments, got {shown(name)}")
        if name not in accepted and _is_of_generate(model, name):
            raise InputsError(
                f"inputs: {name} is an argument of generate(), and the forward ignores it; "
                f"pass generate={{{name!r}: {shown(given[name])}}}"
            )
        taken = inspect.Parameter.VAR_POSITIONAL if name == "labels" else inspect.Parameter.VAR_KEYWORD
        misspelt = set(difflib.get_close_matches(name, list(accepted), n=1, cutoff=0.85)) - set(given)
        if name not in accepted and (taken not in kinds or misspelt):
            raise InputsError(
                f"inputs: the forward of {type(model).__name__} takes no {name!r}; {nearest(name, list(accepted))}"
                f"it takes {', '.join(accepted)}"
            )
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in accepted.values() if p.kind in named and p.default is p.empty]
    missing = [name for name in needed if name not in given]
    if missing:
        raise InputsError(f"inputs: the forward of {type(model).__name__} needs {', '.join(missing)} too")


def _is_of_generate(model: nn.Module, name: str) -> bool:
    """Whether a name is a setting of generate() alone. Some, such as use_cache, are settings of the forward too."""
    settings, config = getattr(model, "generation_config", None), getattr(model, "config", None)
    return hasattr(settings, name) and not hasattr(config, name)


def _check_parameters(model: nn.Module, trains: bool) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise InputsError(f"model: {name} is on the meta device, without values; load the weights first")
        if trains and parameter._post_accumulate_grad_hooks:
            raise InputsError(
                f"model: {name} has a hook that runs when its gradient is there, such as an optimizer's step, and "
                "would change the model; remove it, or pass train=False"
            )
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputsError("model: no parameter requires a gradient; unfreeze some, or pass train=False")


def _check_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if devices and len(devices) == 1 and value.device not in devices and value.dim():
        device = devices.pop()
        raise InputsError(f"{name}: it is on {value.device} and the model on {device}; pass {name}.to('{device}')")
    if not value.numel():
        raise InputsError(f"{name}: shape {tuple(value.shape)} has no elements; give at least one row and one token")
    if value.is_floating_point() or value.is_meta:
        return
    ids = value if name == "input_ids" else value[value != _IGNORED]
    if name == "labels" and not ids.numel():
        raise InputsError(f"labels: all are {_IGNORED}, which the loss ignores; give some tokens to predict")
    # Other models, such as classifiers, have labels of their own.
    embeddings = _embeddings(model, "get_input_embeddings" if name == "input_ids" else "get_output_embeddings")
    if name in ("input_ids", "labels") and embeddings is not None:
        _check_ids(name, ids, embeddings.weight.shape[0])


def _check_ids(name: str, ids: Tensor, count: int) -> None:
    # On a GPU an index out of range ends the process's CUDA context.
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= count:
        raise InputsError(
            f"{name}: {least if least < 0 else most} is no token id of the model, whose ids are 0 to {count - 1}; "
            "use the model's own tokenizer"
        )


def _embeddings(model: nn.Module, getter: str) -> Any:
    """The module that `model.get_input_embeddings` or `get_output_embeddings` returns, or None."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _decoder_inputs(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """`decoder_input_ids` for an encoder-decoder model that is given neither them nor labels: its prompt, shifted."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    if any(given.get(name) is not None for name in (*_DECODER, "labels", "decoder_outputs")):
        return {}
    first: Any = None
    for holder in (config, getattr(model, "generation_config", None)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            first = getattr(holder, name, None) if first is None else first
    rows = next((value for value in given.values() if isinstance(value, Tensor) and value.dim()), None)
    if rows is None or not isinstance(first, int):
        raise InputsError(
            f"decoder_input_ids: {type(model).__name__} is an encoder-decoder model whose config has no "
            "decoder_start_token_id; pass decoder_input_ids, or labels, in inputs"
        )
    start = torch.full((rows.shape[0], 1), first, dtype=torch.long, device=rows.device)
    ids = given.get("input_ids")
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2 or not isinstance(vocabulary, int):
        return {_DECODER[0]: start}
    return {_DECODER[0]: torch.cat([start, ids[:, :-1] % vocabulary], 1)}
