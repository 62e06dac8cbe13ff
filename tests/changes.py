"""What tests do to a model's weights to see that it shows."""

import torch


def edit(model: torch.nn.Module) -> None:
    """In place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


def replace(model: torch.nn.Module) -> None:
    """By others in other places."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.3
