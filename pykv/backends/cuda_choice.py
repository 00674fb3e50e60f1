"""Drawing a token where the logits lie, by the rules of engine/sampler.py.

Sums of probabilities are taken in another order than there, so that a draw that falls within
rounding of the border between two tokens may differ.
"""

from __future__ import annotations

import math

import torch

from pykv.backends.base import I64, Choice, Chosen


def choose(logits: torch.Tensor, choice: Choice) -> Chosen:
    """The token for f32 [V]; the device is waited for once."""
    low, high = torch.aminmax(logits)  # NaN where any is
    x = _changed(logits, choice)
    if choice.temperature <= 0:
        token, n = _first(x, x.max()), torch.ones_like(high)
    else:
        token, n = _draw(x, choice)
    finite = torch.isfinite(low) & torch.isfinite(high)
    found = torch.stack([token.double(), n.double(), finite.double()]).tolist()
    return Chosen(int(found[0]), int(found[1]), bool(found[2]))


def _far(ids: I64, x: torch.Tensor) -> torch.Tensor:
    """Numbers beside x, without waiting for what runs there: most of this is launched by then."""
    near = torch.from_numpy(ids)
    return near.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else near


def _changed(x: torch.Tensor, choice: Choice) -> torch.Tensor:
    """The logits after penalties, -inf where a token is never drawn; a copy where they change."""
    if not len(choice.penalised) and not len(choice.suppressed):
        return x
    x = x.clone()
    if len(choice.penalised):
        ids = _far(choice.penalised, x)
        v = x[ids].double()
        v = torch.where(v > 0, v / choice.repeat_penalty, v * choice.repeat_penalty)
        v -= _far(choice.counts, x) * choice.frequency_penalty + choice.presence_penalty
        x.index_copy_(0, ids, v.float())
    if len(choice.suppressed):
        x.index_fill_(0, _far(choice.suppressed, x), -math.inf)
    return x


def _first(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The lowest place of a value."""
    places = torch.arange(len(x), device=x.device)
    return torch.where(x == value, places, len(x)).min()


def _draw(x: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """A token, and how many could have been drawn."""
    plain = choice.top_k <= 0 and choice.typical_p >= 1 and choice.top_p >= 1 and choice.min_p <= 0
    if plain:  # in the order of tokens, as the sampler has it
        ids, values = torch.arange(len(x), device=x.device), x.double()
    else:
        ids, values = _falling(x, choice.top_k if choice.top_k > 0 else len(x))
    kept = values > -math.inf
    places = torch.arange(len(values), device=x.device)
    if choice.typical_p < 1:
        kept &= _typical(values, kept, choice.typical_p)
    if choice.top_p < 1:
        total = _softmax(values, kept).cumsum(0)
        limit = torch.full_like(total[:1], choice.top_p)
        kept &= places <= torch.searchsorted(total, limit)
    if choice.min_p > 0:
        top = torch.where(kept, values, -math.inf).max()
        floor = (top + math.log(choice.min_p)).float()
        kept &= (values >= floor) | (values == top)
    total = _softmax(values, kept, choice.temperature).cumsum(0)
    target = torch.minimum(choice.uniform * total[-1:], torch.nextafter(total[-1:], total[:1] * 0))
    place = torch.searchsorted(total, target, right=True)
    return ids[place.clamp(max=len(ids) - 1)][0], kept.sum()


def _falling(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and values f64 of the k highest, of equal ones the lower place first."""
    bits = (x + 0.0).view(torch.int32)  # -0 is 0
    # floats as whole numbers of the same order, above what is left of the place
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    keys = ordered << 32 | (len(x) - torch.arange(len(x), device=x.device))
    ids = torch.topk(keys, min(k, len(x))).indices
    return ids, x[ids].double()


def _softmax(values: torch.Tensor, kept: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Probabilities f64 of what is kept, 0 elsewhere."""
    x = torch.where(kept, values, -math.inf)
    e = torch.exp((x - x.max()) / temperature)
    return e / e.sum()


def _typical(values: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Which values are nearest to the typical surprise, until they sum to more than p."""
    probs = _softmax(values, kept)
    surprise = -torch.log(probs)
    entropy = torch.where(probs > 0, probs * surprise, 0).sum()
    order = torch.argsort((surprise - entropy).abs(), stable=True)
    limit = torch.full_like(probs[:1], p)
    n = torch.searchsorted(probs[order].cumsum(0), limit, right=True) + 1
    near = torch.empty_like(kept)
    near[order] = torch.arange(len(values), device=values.device) < n
    return near
