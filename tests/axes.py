"""Several axes of parameters: some combinations in quick runs, every one in slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def covering(*, indirect: Sequence[str] = (), **axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Marks a test with every combination of the axes' values; those that are not needed for each pair are slow.

    Args:
        axes: the values of each parameter, or a mapping from what ids call them to the values.
        indirect: parameters that fixtures of their names take.
    """
    quick = pairwise([len(list(axis)) for axis in axes.values()])
    return _combinations(axes, lambda indices: indices in quick, indirect)


def thinned(
    share: int, *, indirect: Sequence[str] = (), **axes: Iterable[Any] | Mapping[str, Any]
) -> pytest.MarkDecorator:
    """Marks a test with every combination of the axes' values; all but one in `share`, along diagonals, are slow.

    Each value is in a quick combination if another axis has `share` values or more.

    Args:
        axes, indirect: as those of `covering`.
    """
    return _combinations(axes, lambda indices: sum(indices) % share == 0, indirect)


def _combinations(
    axes: Mapping[str, Iterable[Any]], is_quick: Callable[[tuple[int, ...]], bool], indirect: Sequence[str]
) -> pytest.MarkDecorator:
    named = [list((axis if isinstance(axis, Mapping) else {str(v): v for v in axis}).items()) for axis in axes.values()]
    parameters = []
    for indices in itertools.product(*(range(len(axis)) for axis in named)):
        names, values = zip(*(axis[index] for axis, index in zip(named, indices, strict=True)), strict=True)
        marks = () if is_quick(indices) else pytest.mark.slow
        parameters.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(axes), parameters, indirect=list(indirect))
