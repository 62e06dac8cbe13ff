"""Tables of model families, from the policies in `fuseopt.models`: what each gains in forward, training, generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from fuseopt.models import COMMON, GPT2, T5, Rule

PACKAGE = "transformers.models."
FORWARD = {
    "inference_blocks": "whole blocks",
    "norms": "RMSNorm",
    "gated": "gated feed-forwards",
    "rotary_attentions": "rotary embedding (by name)",
}
TRAINING = {
    "heads": "loss without logits",
    "relative_attention": "T5 attention",
    "causal_attention": "padded batches",
}
GENERATION = {"decode_steps": "decode loop"}
ANY_FORWARD = "LayerNorm, GELU and other activations"
LARGE_GROUP = "RMSNorm, gated feed-forwards, LayerNorm, activations"
SHOWN = ("gemma", "phi3", "mixtral", "gpt_neox", "bert")
"""Families that the README names as examples of a large group."""


def _rules() -> Iterator[tuple[str, Iterable[Rule]]]:
    for policy in (GPT2, T5, COMMON):
        yield "norms", [rule for rule in policy.kernels if rule.target_name == "FusedRMSNorm"]
        yield "gated", [rule for rule in policy.regions if rule.target_name == "FusedGatedMLP"]
        for field in ("inference_blocks", "rotary_attentions", *TRAINING):
            yield field, getattr(policy, field)


def families() -> dict[str, frozenset[str]]:
    """Folder of a family in transformers.models -> the keys of FORWARD and TRAINING it has, and "decode_steps"."""
    found = defaultdict(set)
    for field, rules in _rules():
        for rule in rules:
            if rule.source.startswith(PACKAGE):
                found[rule.source.removeprefix(PACKAGE).split(".")[0]].add(field)
    for policy in (GPT2, T5, COMMON):
        for source in policy.decode_steps:
            found[source.removeprefix(PACKAGE).split(".")[0]].add("decode_steps")
    return {family: frozenset(fields) for family, fields in found.items()}


def _groups(ignored: frozenset[str]) -> list[tuple[list[str], frozenset[str]]]:
    """(families, what each of them has), those that have most first; differences in `ignored` make no group."""
    groups = defaultdict(list)
    has = families()
    for family in sorted(has):
        groups[has[family] - ignored].append(family)
    ordered = sorted(groups.values(), key=lambda names: ("decode_steps" not in has[names[0]], len(names), names))
    return [(names, frozenset.intersection(*(has[name] for name in names))) for names in ordered]


def _row(names: str, has: frozenset[str], more: str = "") -> str:
    any_forward = [] if "inference_blocks" in has else [more or ANY_FORWARD]
    forward = ", ".join([*(words for field, words in FORWARD.items() if field in has), *any_forward])
    training = ", ".join(["compiled step", *(words for field, words in TRAINING.items() if field in has)])
    decode = GENERATION["decode_steps"] if "decode_steps" in has else "fused forward, n-gram bans"
    return f"| {names} | {forward} | {training} | {decode} |"


HEADER = "| family | forward without gradients | training | `generate()` |\n|---|---|---|---|"


def short_table() -> str:
    """For the README: families that differ in more than norms and feed-forwards."""
    rows = []
    for names, has in _groups(frozenset(FORWARD) - {"inference_blocks"}):
        examples = names if len(names) <= 6 else [name for name in SHOWN if name in names]
        if not examples:
            continue
        text = ", ".join(f"`{name}`" for name in examples)
        rest = len(names) - len(examples)
        rows.append(_row(f"{text} and {rest} more", has, LARGE_GROUP) if rest else _row(text, has))
    rows.append(_row("any other `nn.Module`", frozenset()))
    return "\n".join((HEADER, *rows))


def decoder_table() -> str:
    """Every family with a decode step."""
    rows = [(names, has) for names, has in _groups(frozenset()) if "decode_steps" in has]
    return "\n".join((HEADER, *(_row(", ".join(f"`{name}`" for name in names), has) for names, has in rows)))


def full_list() -> str:
    """Every other family that a policy names, by what it has beyond any other module."""
    lines = []
    for names, has in _groups(frozenset()):
        if "decode_steps" in has:
            continue
        words = ", ".join(words for field, words in (FORWARD | TRAINING).items() if field in has)
        lines.append(f"- **{words}**: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines)
