"""How an attention module is given another attention function: its own view of the model's config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor


class AttentionConfig:
    """The config of one attention module, in which one attention implementation reads as a function of fuseopt.

    A live view: everything else, and any other attention implementation set later, is read from the model's own config,
    which stays as it is. The function is made known to transformers under a name of its own, which no other model uses
    (https://huggingface.co/docs/transformers/en/attention_interface).

    Attributes:
        stands_for: the implementation, as `model.set_attn_implementation` has it.
        name: under which `function` is known.
        function: with the arguments and results of transformers' own, `eager_attention_forward` for instance.
    """

    stands_for: ClassVar[str]
    name: ClassVar[str]
    function: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]]

    def __init__(self, config: Any, backend: str) -> None:
        self.__setstate__({"config": config, "backend": backend})

    @property
    def _attn_implementation(self) -> str:
        implementation: str = self.config._attn_implementation
        return self.name if implementation == self.stands_for and self._is_wanted() else implementation

    def _is_wanted(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if "config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.config, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.__dict__.update(state)
        ALL_ATTENTION_FUNCTIONS.register(self.name, type(self).function)
