"""The host loop: the fast forward, with transformers' own processors, criteria and streamer between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fuseopt.generation.graphs import Step, StepGraphs


def run(
    graphs: StepGraphs,
    step: Step,
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    pending: bool,
    scores: list[Tensor] | None,
    logits: list[Tensor] | None,
) -> tuple[Tensor, str]:
    """Decodes until the criteria say so, from the logits in the step's state on.

    Args, returns: as `device_loop.run`; the step has no selection, and `processors`, `criteria`, `config` and
    `streamer` are generate()'s.
    """
    pad = config._pad_token_tensor
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    state, steps, note = step.state, 0, ""
    if pending:
        step()
    while True:
        # A copy: the next step overwrites it, while processors, criteria and the result may keep it.
        next_logits = state.logits.clone()
        next_scores = processors(input_ids, next_logits)
        if scores is not None:
            scores.append(next_scores)
        if logits is not None:
            logits.append(next_logits)
        if config.do_sample:
            probabilities = nn.functional.softmax(next_scores, dim=-1)
            tokens = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(next_scores, dim=-1)
        if has_eos:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~criteria(input_ids, None if scores is None else tuple(scores))
        if streamer is not None:
            streamer.put(tokens.cpu())
        if not unfinished.any():
            break
        if steps == 1:
            note = graphs.capture(step)
        state.tokens.copy_(tokens)
        step()
        steps += 1
    if streamer is not None:
        streamer.end()
    return input_ids, note
