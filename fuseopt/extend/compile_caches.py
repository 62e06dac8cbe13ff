"""Puts the sources of users' ops into the keys of torch.compile's caches on disk.

torch knows an op in a graph by its name. Without this, a program whose op has changed would get the gradient that was
traced from the op's former function, or the result's former shape, from a cache of an earlier run.
"""

import torch.compiler.config as settings


def tag(name: str, digest: str) -> None:
    """Make the keys of graphs that are compiled from now on those of the op with this digest.

    Called when torch computes the op's fake, which is before it looks for a graph.
    """
    mark = f"{name}={digest}"
    marks = settings.cache_key_tag.split()
    if mark not in marks:
        settings.cache_key_tag = " ".join([*(each for each in marks if not each.startswith(f"{name}=")), mark])
