"""DecodeStep: what the decode engine calls on a model family's step; and which step runs which model class."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from fuseopt.modules.children import Children

if TYPE_CHECKING:
    from fuseopt.config import LowBitOptions
    from fuseopt.generation.engine.graphs import StepGraphs
    from fuseopt.generation.engine.layers import Linear
    from fuseopt.generation.engine.low_bit import LowBitChoice, LowBitWeights
    from fuseopt.generation.engine.residual_stream import HeadInput
    from fuseopt.generation.engine.state import CacheShape, DecodeState, Sizes

logger = logging.getLogger(__name__)


class EncoderStep(Protocol):
    """The encoder of an encoder-decoder, run on prompts of token ids without the model's own forward.

    Attributes:
        lora_layers: as of `DecodeStep`.
    """

    lora_layers: Sequence[nn.Module] = ()

    def __init__(self, model: nn.Module) -> None: ...

    @staticmethod
    def constants(model: nn.Module) -> tuple[Hashable, ...]:
        """As `DecodeStep.constants`, of the encoder."""
        return ()

    def state_for(self, graphs: StepGraphs, items: int, length: int) -> Any | None:
        """Static tensors for prompts [items, length]; None if such prompts gain nothing from this encoder."""

    def __call__(self, graphs: StepGraphs, state: Any, input_ids: Tensor, keep: Tensor | None) -> tuple[Tensor, str]:
        """Encodes prompts.

        Args:
            state: from `state_for`, of the prompts' size.
            input_ids: [items, length] int64.
            keep: attention mask [items, length], nonzero where a token counts; None if all do.

        Returns:
            [items, length, width], valid until the next call; and why no CUDA graph was captured, or "".
        """
        ...


class DecodeStep(Protocol):
    """One token a row through a model's decoder, on the model's own weights and a static key-value cache.

    An instance is made for one model and is made anew when a weight's address, dtype or layout, or a value in
    `constants`, has changed. It holds references to the weights, never copies, so that weights edited in place show.
    `prefill` and `__call__` are captured in CUDA graphs: on a GPU they launch work on the current stream, never wait
    for the device, and read what differs from call to call from the state's tensors.

    A step may derive from this class, and then need not write what has a body here.

    Attributes:
        model_class: full name of the only class whose instances it runs, such as
            "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel". A subclass is not served.
        children: the classes that modules below `roots` must have, see `fuseopt.modules.children`.
        prompt_attentions: with these values of `config._attn_implementation`, `prefill` runs the prompts of a
            decoder-only model, else the model's forward does.
        encoder_class: the encoder's step; None for decoder-only models.
        ignores_encoder_mask: cross-attention attends to all of the encoder's output, whatever `attention_mask` says.
        takes_lora: linear layers of the model may be inside LoRA layers of peft (`fuseopt.modules.lora`); those of them
            whose updates the step adds are its `lora_layers`.
        takes_quantised_cache: `head_dim_of` is implemented, and `shape.stored_dtype` may be set, since the step uses
            `state.layer_caches`.
        takes_low_bit: `low_bit_choice`, `quantised_layers` and `quantise` are implemented, so weights may be in 8 or 4
            bits, also those of a pre-quantised checkpoint (`fuseopt.modules.quantised`).
        takes_prefix: `prefill` of a decoder-only model runs prompts from slot `state.start` on; a PrefixCache may fill
            the slots before it.
        is_quantised: `quantise` has found weights to quantise.
        most_quantised_rows: with `is_quantised`, products of more rows than this read the unquantised weights; None if
            no products do.
        token_embedding: [vocab, width], whose dtype and device tell whether the engine's kernels apply.
        shape: of the key-value cache, from which the engine makes a `DecodeState`.
        vocab: width of the logits.
        max_length: how many positions there are in a sequence; None if there is no bound.
        bounds_positions: positions must be below the number of the cache's slots.
        windows: how many slots the self-attention of each layer sees, its own among them; None for all.
    """

    model_class: ClassVar[str]
    children: ClassVar[Children]
    prompt_attentions: ClassVar[tuple[str, ...]] = ("sdpa",)
    encoder_class: ClassVar[type[EncoderStep] | None] = None
    ignores_encoder_mask: ClassVar[bool] = False
    takes_lora: ClassVar[bool] = False
    takes_quantised_cache: ClassVar[bool] = False
    takes_low_bit: ClassVar[bool] = False
    takes_prefix: ClassVar[bool] = False

    lora_layers: Sequence[nn.Module] = ()
    is_quantised: bool = False
    most_quantised_rows: int | None = None
    token_embedding: Tensor
    shape: CacheShape
    vocab: int
    max_length: int | None
    bounds_positions: bool = False
    windows: Sequence[int | None] = ()

    def __init__(self, model: nn.Module) -> None: ...

    @staticmethod
    def roots(model: nn.Module) -> tuple[nn.Module, ...]:
        """The children of `model` whose forwards the step replaces; changes below them are looked for in each call."""
        ...

    @staticmethod
    def constants(model: nn.Module) -> tuple[Hashable, ...]:
        """Other values that `__init__` reads from `model`. If one changes, the step is made anew.

        Parameters, and the attributes that `fuseopt.runtime.module_watch` names, are compared in any case.
        """
        return ()

    @staticmethod
    def not_supported_reasons(model: nn.Module) -> list[str]:
        """Why the step would compute something else than the model's forward; `children` are checked elsewhere."""
        return []

    @classmethod
    def head_dim_of(cls, model: nn.Module) -> int:
        """Size of a head's key in the cache, in elements."""
        raise NotImplementedError

    @classmethod
    def low_bit_choice(cls, model: nn.Module, options: LowBitOptions) -> LowBitChoice:
        """Which linear layers `quantise` quantises, and why not the others; computes nothing."""
        raise NotImplementedError

    @classmethod
    def quantised_layers(cls, model: nn.Module) -> Sequence[Linear]:
        """The pre-quantised linear layers of a model whose modules are those of `children`.

        Raises:
            UnreadableWeight: a step cannot read them.
        """
        raise NotImplementedError

    def quantise(self, model: nn.Module, weights: LowBitWeights) -> None:
        """Reads `weights` in place of the model's from now on."""
        raise NotImplementedError

    def new_state(self, sizes: Sizes) -> DecodeState:
        """The static tensors of steps of these sizes."""
        from fuseopt.generation.engine.state import DecodeState

        return DecodeState(sizes, self.shape, self.vocab)

    def begin(self) -> None:
        """Computes what is the same for all steps of one generate() call, into tensors that the step owns."""

    def prefill(self, state: DecodeState, length: int, masked: bool) -> None:
        """Runs the prompts: fills the caches and `state.logits` [rows, vocab] of each row's last token.

        A decoder-only step reads the prompts from `state.ids` [rows, capacity + 1] and `state.prompt_positions`, and
        their length from `state.slot`. The step of an encoder-decoder reads `state.encoded` [items, cross_capacity,
        width], fills the cross-attention cache, runs the decoder on `state.tokens` [rows], and adds one to
        `state.counters`.

        Args:
            length: tokens a row to run, at least those of the prompts after slot `state.start`, which is 0 unless the
                step `takes_prefix`. The rest is padding that no token may attend to.
            masked: whether `state.keep` excludes any token of the prompts.
        """
        ...

    def takes_any_start(self, state: DecodeState) -> bool:
        """True if `prefill` of unmasked prompts can read its start from `state.start_slot` (see `start_varies`)."""
        return False

    def cross_cache_filled(self, state: DecodeState) -> None:
        """Updates what the step derives from `state.cross_cache`, after the model's own forward has filled that."""

    def __call__(self, state: DecodeState) -> HeadInput:
        """Runs `state.tokens` [rows], writes their keys and values at `state.slot`, and returns the head's input.

        The engine advances `state.slot` and `state.positions` afterwards.
        """
        ...


StepName = str | type[DecodeStep]
"""A step's class or the dotted path of it."""

_REGISTERED: dict[str, StepName] = {}
_OWN_MEMBERS = ("model_class", "children", "roots", "prefill", "__call__")


def register_decode_step(model_class: str, step: StepName) -> None:
    """Lets `generation` run instances of a model class by a step, in place of one that a policy may name.

    Registering a class again replaces its step and logs so.

    Args:
        model_class: full name of the model's class.
        step: a class that fulfils `DecodeStep`, or its dotted path, which is imported to check it.

    Raises:
        ValueError: there is no such step, it lacks members, or it is written for another model class.
    """
    unknown = unknown_step(model_class, step)
    if unknown is not None:
        raise ValueError(unknown)
    if _REGISTERED.get(model_class, step) != step:
        logger.warning("fuseopt: the decode step of %s is now %s", model_class, step_name(step))
    _REGISTERED[model_class] = step


def registered_step(model_class: str) -> StepName | None:
    """What `register_decode_step` was last given for a model class, by its full name."""
    return _REGISTERED.get(model_class)


def decode_step_class(step: StepName) -> type[DecodeStep]:
    """The class of a step, imported on first use.

    Raises:
        ImportError, AttributeError: there is none at this path.
    """
    if not isinstance(step, str):
        return step
    module, _, name = step.rpartition(".")
    if not module:
        raise ImportError(f"{step!r} is not a dotted path")
    return getattr(importlib.import_module(module), name)


def step_name(step: StepName) -> str:
    """The dotted path of a step."""
    return step if isinstance(step, str) else f"{step.__module__}.{step.__qualname__}"


def unknown_step(model_class: str, step: StepName) -> str | None:
    """Why `step` cannot be the decode step of a model class, or None. Imports the step."""
    names = f"the decode step {step_name(step)!r} for {model_class}"
    try:
        step_class = decode_step_class(step)
    except (ImportError, AttributeError) as error:
        return f"{names} does not exist: {error}"
    if not isinstance(step_class, type):
        return f"{names} is not a class"
    bases = {member: (None, getattr(DecodeStep, member, None)) for member in _OWN_MEMBERS}
    missing = [member for member, inherited in bases.items() if getattr(step_class, member, None) in inherited]
    if missing:
        return f"{names} lacks {', '.join(missing)} of DecodeStep (fuseopt/generation/families/step_interface.py)"
    if step_class.model_class != model_class:
        return f"{names} is written for {step_class.model_class}"
    return None
