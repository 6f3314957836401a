"""Which experts a token activates, and with what weights.

The choice is by token id in the first layers and by score plus bias in the others; the weights come from the
scores alone. Everything is float32, whatever the model computes in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``sqrt(softplus(x @ weight.T))``, [T, E] float32.

    Args:
        x: [T, D] input of the experts.
        weight: [E, D] ``gate.weight``.
    """
    return F.softplus(x.float() @ weight.float().T).sqrt()


def choose_by_score(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Return the experts with the largest ``scores + bias``, [T, top_k] int64, best first.

    Args:
        scores: [T, E] float32.
        bias: [E] float32 ``gate.bias``; it decides about the choice only.
        top_k: Experts per token.
    """
    return torch.topk(scores + bias.float(), top_k, dim=-1).indices


def choose_by_token(tid2eid: Tensor, ids: Tensor) -> Tensor:
    """Return the experts of each token id, [T, top_k] int64.

    Args:
        tid2eid: [V, top_k] int64 ``gate.tid2eid``.
        ids: [T] int64 token ids.
    """
    return tid2eid[ids].long()


def route_weights(scores: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Return the chosen scores, scaled so that those of a token sum to `scale`; [T, top_k] float32.

    Args:
        scores: [T, E] float32.
        chosen: [T, top_k] int64.
        scale: ``routed_scaling_factor``; it is applied here and nowhere else.
    """
    picked = scores.gather(1, chosen)
    return picked / picked.sum(-1, keepdim=True) * scale
