"""AttentionConfig: a view of the model's config by which one attention module gets another attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor


class AttentionConfig:
    """A live view of the model's config for one attention module, with one attention implementation exchanged.

    If the model's config says `stands_for`, the view says `name`, under which transformers finds `function`
    (https://huggingface.co/docs/transformers/en/attention_interface). Everything else, and any attention implementation
    that is set later, is read from the model's config, which does not change.

    Attributes:
        stands_for: an implementation, as `model.set_attn_implementation` takes it.
        name: the name under which `function` is registered in transformers; no other code uses it.
        function: has the arguments and results of transformers' functions, such as `eager_attention_forward`.
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
