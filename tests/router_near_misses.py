"""The smallest changes that make a router something else, with the words in which it is left."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.near_misses import E, K
from tests.router_forms import Route, Routed, kept_of


def _softmax_of(m: Routed, x: Tensor) -> Tensor:
    return m.logits(x).softmax(-1)


def softmax_over_tokens(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(m.logits(x).softmax(0).topk(K))


def smallest(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(_softmax_of(m, x).topk(K, largest=False))


def renorm_over_tokens(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w / w.sum(0, keepdim=True), idx


def renorm_over_all_experts(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = m.logits(x).sigmoid()
    w, idx = scores.topk(K)
    return w / scores.sum(-1, keepdim=True), idx


def renorm_by_the_largest(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w / w.amax(-1, keepdim=True), idx


def renorm_by_the_square(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w / (w * w).sum(-1, keepdim=True), idx


def bias_in_the_weights(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple((m.logits(x).sigmoid() + m.bias).topk(K))


def bias_in_the_gathered_weights(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    biased = m.logits(x).sigmoid() + m.bias
    idx = biased.topk(K)[1]
    return biased.gather(1, idx), idx


def bias_by_token(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = (p + x[:, :E]).topk(K)[1]
    return p.gather(1, idx), idx


def masked_scores(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return tuple(p.masked_fill(x[:, :E] > 1, 0.0).topk(K))


def masked_weights(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.masked_fill(x[:, :1] > 1, 0.0), idx


def dropout_between(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(F.dropout(_softmax_of(m, x), 0.1).topk(K))


def jitter_between(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return tuple((p * (1 + 0.01 * torch.rand_like(p))).topk(K))


def jitter_on_the_choice(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = (p + 0.01 * torch.rand_like(p)).topk(K)[1]
    return p.gather(1, idx), idx


def detached_weights(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.detach(), idx


def detached_sum(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w / w.sum(-1, keepdim=True).detach(), idx


def weights_of_another_choice(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return p.topk(K)[0], m.logits(x).topk(K)[1]


def gathered_by_other_experts(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.topk(K)[1]
    return p.gather(1, idx.flip(1)), idx


def gathered_other_scores(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    idx = logits.softmax(-1).topk(K)[1]
    return logits.sigmoid().gather(1, idx), idx


def raw_logits(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(m.logits(x).topk(K))


def rounded_twice(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.bfloat16().half().float(), idx


def worst_group(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.masked_fill(kept_of(m, p.view(-1, 2, E // 2).amax(-1)), -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def groups_by_their_sum(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.masked_fill(~kept_of(m, p.view(-1, 2, E // 2).mean(-1)), -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def groups_interleaved(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.masked_fill(~kept_of(m, p.view(-1, E // 2, 2).amax(1)), -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def groups_of_other_scores(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = m.logits(x).sigmoid()
    best = scores.view(-1, 2, E // 2).amax(-1)
    idx = (scores + m.bias).masked_fill(~kept_of(m, best), -math.inf).topk(K)[1]
    return scores.gather(1, idx), idx


def mask_inverted_as_a_number(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """``~1`` is true as well: no expert is left."""
    p = _softmax_of(m, x)
    best = p.view(-1, 2, E // 2).amax(-1)
    chosen = torch.zeros_like(best, dtype=torch.int32).scatter_(1, best.topk(1)[1], 1)
    mask = (~chosen).unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E).bool()
    idx = p.masked_fill(mask, -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def overwritten_through_an_alias(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    top = _softmax_of(m, x).topk(K)
    w = top.values.div_(2.0)
    top.values.mul_(x[:, :1])
    return w, top.indices


def choice_read_elsewhere(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    m.extra.append(w.sum())
    return w / w.sum(-1, keepdim=True), idx


def another_function(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.tanh(), idx


def flattened_weights(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.reshape(-1) * 2.0, idx


def chosen_by_a_sort(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.sort(dim=-1, descending=True)[1][:, :K]
    return p.gather(1, idx), idx


def three_axes(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = m.logits(x.view(2, -1, x.shape[1])).softmax(-1).topk(K)
    return w.reshape(-1, K) * 2.0, idx.reshape(-1, K)


def scaled_twice(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w / 3.0 * 2.5, idx


def sum_rounded_before_its_eps(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = m.logits(x).sigmoid().topk(K)
    return w / (w.sum(-1, keepdim=True).bfloat16().float() + 1e-6), idx


def rounded_before_the_softmax(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    top, idx = m.logits(x).topk(K)
    return top.bfloat16().softmax(-1).float(), idx


def rounded_to_eight_bits(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = _softmax_of(m, x).topk(K)
    return w.to(torch.float8_e4m3fn).float(), idx


def rounded_inside_the_softmax(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """No node holds the logits that the scores follow from."""
    w, idx = F.softmax(m.logits(x), -1, dtype=torch.bfloat16).topk(K)
    return w.float(), idx


def chosen_by_other_biased_scores(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    idx = (logits.softmax(-1) + m.bias).topk(K)[1]
    return logits.sigmoid().gather(1, idx), idx


def overwritten_and_restored(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    p = logits.softmax(-1)
    kept = logits.clone()
    logits.zero_()
    w, idx = p.topk(K)
    logits.copy_(kept)
    return w * 2.0, idx


def overwritten_before_the_choice_is_cast(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    top = _softmax_of(m, x).topk(K)
    w = top.values / 2.0
    w.mul_(x[:, :1])
    return w, top.indices.int()


def hook_after_the_choice(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """It sees the gradient of the weights too."""
    p = _softmax_of(m, x)
    w, idx = p.topk(K)
    p.register_hook(lambda grad: grad * 2)
    m.extra.append(p.sum())
    return w * 2.0, idx


def masked_with_a_number(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    idx = p.masked_fill(~kept_of(m, p.view(-1, 2, E // 2).amax(-1)), -1e9).topk(K)[1]
    return p.gather(1, idx), idx


def masked_logits(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    kept = kept_of(m, logits.view(-1, 2, E // 2).amax(-1))
    w, idx = logits.masked_fill(~kept, 0.0).topk(K)
    return w.softmax(-1), idx


def groups_of_one_rounding(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    biased = (p + m.bias).bfloat16().float()
    idx = biased.masked_fill(~kept_of(m, biased.view(-1, 2, E // 2).amax(-1)), -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def _by_groups(p: Tensor, chosen: Tensor, count: int, mark: int = 1) -> tuple[Tensor, Tensor]:
    """Weights and choice, of the ``chosen`` of ``count`` groups."""
    marks = torch.zeros(p.shape[0], count, device=p.device).scatter_(1, chosen, mark)
    mask = marks.unsqueeze(-1).expand(-1, count, E // count).reshape(-1, E).bool()
    idx = p.masked_fill(~mask, -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


def fewer_experts_than_chosen(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """The best of groups of one."""
    p = _softmax_of(m, x)
    single = p.view(-1, E, 1)
    dropped = torch.ones(x.shape[0], E, dtype=torch.bool, device=x.device)
    dropped.scatter_(1, single.amax(-1).topk(1)[1], False)
    idx = single.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1).topk(K)[1]
    return p.gather(1, idx), idx


def mark_that_marks_nothing(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return _by_groups(p, p.view(-1, 2, E // 2).amax(-1).topk(1)[1], 2, 0)


def group_by_argmax(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return _by_groups(p, p.view(-1, 2, E // 2).amax(-1).argmax(-1, keepdim=True), 2)


def group_over_tokens(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return _by_groups(p, p.view(-1, 2, E // 2).amax(-1)[:2].topk(1, dim=0)[1], 2)


def groups_by_their_best_three(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    return _by_groups(p, p.view(-1, 1, E).topk(3, dim=-1)[0].sum(-1).topk(1)[1], 1)


def experts_masked_one_by_one(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = _softmax_of(m, x)
    keep = torch.zeros_like(p).scatter_(1, p.topk(3)[1], 1)
    idx = p.masked_fill(~keep.bool(), -math.inf).topk(K)[1]
    return p.gather(1, idx), idx


#: Change -> words of its refusal.
NEAR_MISSES: dict[Route, str] = {
    softmax_over_tokens: "a softmax along axis 0",
    smallest: "the smallest are chosen",
    renorm_over_tokens: "something else than their sum over a token's experts",
    renorm_over_all_experts: "the weights are divided by another sum",
    renorm_by_the_largest: "something else than their sum over a token's experts: amax",
    renorm_by_the_square: "the weights are divided by another sum",
    bias_in_the_weights: "neither a softmax nor a sigmoid over the experts: add",
    bias_in_the_gathered_weights: "neither a softmax nor a sigmoid over the experts: add",
    bias_by_token: "no bias of the experts",
    masked_scores: "masked by something else than their group",
    masked_weights: "not the scores of the chosen experts: masked_fill",
    dropout_between: "neither a softmax nor a sigmoid over the experts: dropout",
    jitter_between: "neither a softmax nor a sigmoid over the experts: mul",
    jitter_on_the_choice: "no bias of the experts: mul",
    detached_weights: "gradients are switched off",
    detached_sum: "something else than their sum",
    weights_of_another_choice: "come from two choices",
    gathered_by_other_experts: "gathered by another index",
    gathered_other_scores: "chosen by something else than their scores",
    raw_logits: "neither a softmax nor a sigmoid over the experts: linear",
    rounded_twice: "rounded to torch.float16 and to torch.bfloat16",
    worst_group: "the best groups are masked",
    groups_by_their_sum: "ranked by something else than their best experts: mean",
    groups_interleaved: "ranked by something else than their best experts: amax",
    groups_of_other_scores: "ranked by something else than their best experts: amax",
    mask_inverted_as_a_number: "masked by something else than their group",
    overwritten_through_an_alias: "the choice is read elsewhere too",
    another_function: "the weights or the experts are no step of a router",
    flattened_weights: "the weights are not [T, K]",
    chosen_by_a_sort: "not the index of a top-k",
    three_axes: "the choice is not among [T, E]",
    scaled_twice: "divided by 3.0 after a scale",
    sum_rounded_before_its_eps: "a sum in torch.bfloat16 is bounded in torch.float32",
    rounded_before_the_softmax: "the chosen scores are rounded to torch.bfloat16",
    rounded_to_eight_bits: "torch.float8_e4m3fn, one of them not known",
    rounded_inside_the_softmax: "no node holds the logits",
    chosen_by_other_biased_scores: "chosen by something else than their scores: add",
    overwritten_and_restored: "the logits are overwritten",
    overwritten_before_the_choice_is_cast: "the weights or the experts are overwritten",
    hook_after_the_choice: "waits for the gradient of p, inside the router",
    masked_with_a_number: "experts are masked with -1000000000.0",
    masked_logits: "masked logits are the weights",
    groups_of_one_rounding: "groups are ranked in torch.float32, not torch.bfloat16",
    fewer_experts_than_chosen: "1 groups of 1 experts for 2",
    mark_that_marks_nothing: "does not tell the best from the others",
    group_by_argmax: "the groups are not the index of a top-k",
    group_over_tokens: "along axis 0",
    groups_by_their_best_three: "ranked by its best 3",
    experts_masked_one_by_one: "a group's mask does not reach its experts",
    choice_read_elsewhere: "the choice is read elsewhere too",
}
