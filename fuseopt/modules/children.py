"""The exact class of each child in GPT-2, T5 and the families with a decode step, and a search for other classes.

Code that reads a child's weights or bypasses its forward relies on these classes. For example it skips a Dropout in
eval mode and reads a Conv1D's weight as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from torch import nn

from fuseopt.modules.base import full_name, source_class

Children = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Full class name -> name of a child -> full names of the child's allowed classes.

A name that ends in a dot, such as "transformers.activations.", allows every class of that Python module. Items of a
ModuleList are listed with the owner of the list: "layer.1" is one item, "layer.*" every item.
"""

ACTIVATIONS = ("transformers.activations.", "torch.nn.modules.activation.")
MODULE_LIST = "torch.nn.modules.container.ModuleList"
LINEAR = "torch.nn.modules.linear.Linear"
CONV1D = "transformers.pytorch_utils.Conv1D"
LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
_EMBEDDING = "torch.nn.modules.sparse.Embedding"
_DROPOUT = "torch.nn.modules.dropout.Dropout"
_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"


def _children(**classes: str | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {name: (of,) if isinstance(of, str) else of for name, of in classes.items()}


GPT2_CHILDREN: Children = {
    f"{_GPT2}LMHeadModel": _children(transformer=f"{_GPT2}Model", lm_head=LINEAR),
    f"{_GPT2}Model": _children(wte=_EMBEDDING, wpe=_EMBEDDING, drop=_DROPOUT, h=MODULE_LIST, ln_f=LAYER_NORM)
    | {"h.*": (f"{_GPT2}Block",)},
    f"{_GPT2}Block": _children(
        ln_1=LAYER_NORM,
        attn=f"{_GPT2}Attention",
        ln_2=LAYER_NORM,
        crossattention=f"{_GPT2}Attention",
        ln_cross_attn=LAYER_NORM,
        mlp=f"{_GPT2}MLP",
    ),
    f"{_GPT2}Attention": _children(
        c_attn=CONV1D, q_attn=CONV1D, c_proj=CONV1D, attn_dropout=_DROPOUT, resid_dropout=_DROPOUT
    ),
    f"{_GPT2}MLP": _children(c_fc=CONV1D, c_proj=CONV1D, act=ACTIVATIONS, dropout=_DROPOUT),
}


def t5_children(prefix: str) -> Children:
    """The children in T5, or in a model that copies its classes.

    Args:
        prefix: start of the class names, such as "transformers.models.t5.modeling_t5.T5".
    """
    norm, attention = f"{prefix}LayerNorm", f"{prefix}Attention"
    feed_forwards = (f"{prefix}DenseActDense", f"{prefix}DenseGatedActDense")
    own, cross, last = (f"{prefix}Layer{kind}" for kind in ("SelfAttention", "CrossAttention", "FF"))
    inner = {"layer_norm": norm, "dropout": _DROPOUT}
    return {
        f"{prefix}ForConditionalGeneration": _children(
            shared=_EMBEDDING, encoder=f"{prefix}Stack", decoder=f"{prefix}Stack", lm_head=LINEAR
        ),
        f"{prefix}Stack": _children(embed_tokens=_EMBEDDING, block=MODULE_LIST, final_layer_norm=norm, dropout=_DROPOUT)
        | {"block.*": (f"{prefix}Block",)},
        f"{prefix}Block": {
            "layer": (MODULE_LIST,),
            "layer.0": (own,),
            "layer.1": (cross, last),
            "layer.2": (last,),
        },
        own: _children(SelfAttention=attention, **inner),
        cross: _children(EncDecAttention=attention, **inner),
        last: _children(DenseReluDense=feed_forwards, **inner),
        attention: _children(q=LINEAR, k=LINEAR, v=LINEAR, o=LINEAR, relative_attention_bias=_EMBEDDING),
        feed_forwards[0]: _children(wi=LINEAR, wo=LINEAR, act=ACTIVATIONS, dropout=_DROPOUT),
        feed_forwards[1]: _children(wi_0=LINEAR, wi_1=LINEAR, wo=LINEAR, act=ACTIVATIONS, dropout=_DROPOUT),
    }


_NEOX = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoX"
GPT_NEOX_CHILDREN: Children = {
    f"{_NEOX}ForCausalLM": _children(gpt_neox=f"{_NEOX}Model", lm_head=LINEAR),
    f"{_NEOX}Model": _children(
        embed_in=_EMBEDDING,
        emb_dropout=_DROPOUT,
        layers=MODULE_LIST,
        final_layer_norm=LAYER_NORM,
        rotary_emb=f"{_NEOX}RotaryEmbedding",
    )
    | {"layers.*": (f"{_NEOX}Layer",)},
    f"{_NEOX}Layer": _children(
        input_layernorm=LAYER_NORM,
        post_attention_layernorm=LAYER_NORM,
        post_attention_dropout=_DROPOUT,
        post_mlp_dropout=_DROPOUT,
        attention=f"{_NEOX}Attention",
        mlp=f"{_NEOX}MLP",
    ),
    f"{_NEOX}Attention": _children(query_key_value=LINEAR, dense=LINEAR),
    f"{_NEOX}MLP": _children(dense_h_to_4h=LINEAR, dense_4h_to_h=LINEAR, act=ACTIVATIONS),
}
_GPTJ = "transformers.models.gptj.modeling_gptj.GPTJ"
GPTJ_CHILDREN: Children = {
    f"{_GPTJ}ForCausalLM": _children(transformer=f"{_GPTJ}Model", lm_head=LINEAR),
    f"{_GPTJ}Model": _children(wte=_EMBEDDING, drop=_DROPOUT, h=MODULE_LIST, ln_f=LAYER_NORM)
    | {"h.*": (f"{_GPTJ}Block",)},
    f"{_GPTJ}Block": _children(ln_1=LAYER_NORM, attn=f"{_GPTJ}Attention", mlp=f"{_GPTJ}MLP"),
    f"{_GPTJ}Attention": _children(
        q_proj=LINEAR, k_proj=LINEAR, v_proj=LINEAR, out_proj=LINEAR, attn_dropout=_DROPOUT, resid_dropout=_DROPOUT
    ),
    f"{_GPTJ}MLP": _children(fc_in=LINEAR, fc_out=LINEAR, act=ACTIVATIONS, dropout=_DROPOUT),
}
_OPT = "transformers.models.opt.modeling_opt.OPT"
OPT_CHILDREN: Children = {
    f"{_OPT}ForCausalLM": _children(model=f"{_OPT}Model", lm_head=LINEAR),
    f"{_OPT}Model": _children(decoder=f"{_OPT}Decoder"),
    f"{_OPT}Decoder": _children(
        embed_tokens=_EMBEDDING,
        embed_positions=f"{_OPT}LearnedPositionalEmbedding",
        layers=MODULE_LIST,
        final_layer_norm=LAYER_NORM,
        project_in=LINEAR,
        project_out=LINEAR,
    )
    | {"layers.*": (f"{_OPT}DecoderLayer",)},
    f"{_OPT}DecoderLayer": _children(
        self_attn=f"{_OPT}Attention",
        self_attn_layer_norm=LAYER_NORM,
        fc1=LINEAR,
        activation_fn=ACTIVATIONS,
        fc2=LINEAR,
        final_layer_norm=LAYER_NORM,
    ),
    f"{_OPT}Attention": _children(q_proj=LINEAR, k_proj=LINEAR, v_proj=LINEAR, out_proj=LINEAR),
}


def llama_children(prefix: str, *, model: str = "Model", embedding: str = "", norm: str = "RMSNorm") -> Children:
    """The children in Llama, or in a model that names its modules as it does.

    Args:
        prefix: start of the class names, such as "transformers.models.llama.modeling_llama.Llama".
        model: end of the class name of the stack.
        embedding: end of the class name of the token embedding; empty for torch.nn.Embedding.
        norm: end of the class name of the norms; empty for torch.nn.LayerNorm.
    """
    norms, tokens = f"{prefix}{norm}" if norm else LAYER_NORM, f"{prefix}{embedding}" if embedding else _EMBEDDING
    return {
        f"{prefix}ForCausalLM": _children(model=f"{prefix}{model}", lm_head=LINEAR),
        f"{prefix}{model}": _children(
            embed_tokens=tokens, layers=MODULE_LIST, norm=norms, rotary_emb=f"{prefix}RotaryEmbedding"
        )
        | {"layers.*": (f"{prefix}DecoderLayer",)},
        f"{prefix}DecoderLayer": _children(
            self_attn=f"{prefix}Attention",
            mlp=f"{prefix}MLP",
            input_layernorm=norms,
            post_attention_layernorm=norms,
            pre_feedforward_layernorm=norms,
            post_feedforward_layernorm=norms,
            dropout=_DROPOUT,
            resid_attn_dropout=_DROPOUT,
            resid_mlp_dropout=_DROPOUT,
        ),
        f"{prefix}Attention": _children(
            q_proj=LINEAR,
            k_proj=LINEAR,
            v_proj=LINEAR,
            qkv_proj=LINEAR,
            o_proj=LINEAR,
            q_norm=norms,
            k_norm=norms,
        ),
        f"{prefix}MLP": _children(
            gate_proj=LINEAR,
            up_proj=LINEAR,
            gate_up_proj=LINEAR,
            down_proj=LINEAR,
            c_fc=LINEAR,
            c_proj=LINEAR,
            act=ACTIVATIONS,
            act_fn=ACTIVATIONS,
            activation_fn=ACTIVATIONS,
        ),
    }


def bart_children(prefix: str, model_class: str, *, positions: str, embedding: str = "") -> Children:
    """The children in BART, or in a model that names its modules as it does, of encoder and decoder.

    Args:
        prefix: start of the class names, such as "transformers.models.bart.modeling_bart.Bart".
        model_class: full name of the model's class.
        positions: kind of positional embedding in its class name, "Learned" or "Sinusoidal".
        embedding: end of the class name of the token embedding; empty for torch.nn.Embedding.
    """
    tokens = f"{prefix}{embedding}" if embedding else _EMBEDDING
    layer: dict[str, str | tuple[str, ...]] = {
        "self_attn": f"{prefix}Attention",
        "self_attn_layer_norm": LAYER_NORM,
        "activation_fn": ACTIVATIONS,
        "fc1": LINEAR,
        "fc2": LINEAR,
        "final_layer_norm": LAYER_NORM,
    }
    cross: dict[str, str | tuple[str, ...]] = {
        "encoder_attn": f"{prefix}Attention",
        "encoder_attn_layer_norm": LAYER_NORM,
    }
    stacks: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for kind in ("Encoder", "Decoder"):
        stacks[f"{prefix}{kind}"] = _children(
            embed_tokens=tokens,
            embed_positions=f"{prefix}{positions}PositionalEmbedding",
            layers=MODULE_LIST,
            layernorm_embedding=LAYER_NORM,
            layer_norm=LAYER_NORM,
        ) | {"layers.*": (f"{prefix}{kind}Layer",)}
        stacks[f"{prefix}{kind}Layer"] = _children(**(layer | cross if kind == "Decoder" else layer))
    return {
        model_class: _children(model=f"{prefix}Model", lm_head=LINEAR),
        f"{prefix}Model": _children(shared=tokens, encoder=f"{prefix}Encoder", decoder=f"{prefix}Decoder"),
        f"{prefix}Attention": _children(q_proj=LINEAR, k_proj=LINEAR, v_proj=LINEAR, out_proj=LINEAR),
        **stacks,
    }


_WHISPER = "transformers.models.whisper.modeling_whisper.Whisper"
_CONV1D = "torch.nn.modules.conv.Conv1d"
WHISPER_CHILDREN: Children = {
    **bart_children(_WHISPER, f"{_WHISPER}ForConditionalGeneration", positions=""),
    f"{_WHISPER}ForConditionalGeneration": _children(model=f"{_WHISPER}Model", proj_out=LINEAR),
    f"{_WHISPER}Encoder": _children(
        conv1=_CONV1D, conv2=_CONV1D, embed_positions=_EMBEDDING, layers=MODULE_LIST, layer_norm=LAYER_NORM
    )
    | {"layers.*": (f"{_WHISPER}EncoderLayer",)},
}


def unexpected_modules(
    module: nn.Module,
    children: Children,
    roots: Sequence[nn.Module] | None = None,
    accepts: Callable[[nn.Module, Sequence[str]], bool] | None = None,
) -> list[tuple[str, object]]:
    """The (path, object) of each descendant of `module` whose class is not the one listed for its place.

    Does not search below such a descendant. Written for speed, because a decode step checks hundreds of modules.

    Args:
        children: the allowed classes of the children of each class.
        roots: the children of `module` to search; None for all.
        accepts: whether a module may be in place of the classes listed, of which it has none. Its children are not
            searched.
    """
    found: list[tuple[str, object]] = []
    owners = [(module, "")]
    while owners:
        owner, prefix = owners.pop()
        expected, state = children.get(_name_of(source_class(owner)), {}), owner.__dict__
        inside = list(state["_modules"].items())
        if owner is module and roots is not None:
            inside = [(name, child) for name, child in inside if any(child is root for root in roots)]
        for name, child in inside:
            if child is None:
                continue
            names = expected.get(name) or expected.get(f"{name.rpartition('.')[0]}.*", ())
            cls = _name_of(source_class(child))
            if cls not in names and not any(of.endswith(".") and cls.startswith(of) for of in names):
                if accepts is None or not accepts(child, names):
                    found.append((f"{prefix}{name}", child))
            elif cls == MODULE_LIST:
                inside += ((f"{name}.{index}", item) for index, item in child._modules.items())
            elif child.__dict__["_modules"]:
                owners.append((child, f"{prefix}{name}."))
        # A plain attribute goes before a child. One that is None says that there is no child.
        shadowed = (name for name in expected if name in state)
        found += (
            (f"{prefix}{name}", state[name])
            for name in shadowed
            if state[name] is not None or name in state["_modules"]
        )
    return found


_name_of: Callable[[type], str] = lru_cache(1024)(full_name)
