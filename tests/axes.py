"""Several axes of parameters: each pair of values in quick runs, every combination in slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def pairwise(sizes: list[int]) -> set[tuple[int, ...]]:
    """Combinations of indices such that any two axes have each pair of theirs in one of them; chosen greedily."""
    every = list(itertools.product(*map(range, sizes)))
    pairs = {combination: set(itertools.combinations(enumerate(combination), 2)) for combination in every}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(every, key=lambda combination: len(pairs[combination] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def covering(**axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Marks a test with every combination of the axes' values; those that are not needed for each pair are slow.

    Args:
        axes: the values of each parameter, or a mapping from what ids call them to the values.
    """
    named = [list((axis if isinstance(axis, Mapping) else {str(v): v for v in axis}).items()) for axis in axes.values()]
    quick = pairwise([len(axis) for axis in named])
    parameters = []
    for indices in itertools.product(*(range(len(axis)) for axis in named)):
        names, values = zip(*(axis[index] for axis, index in zip(named, indices, strict=True)), strict=True)
        marks = () if indices in quick else pytest.mark.slow
        parameters.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(axes), parameters)
