"""Policy losses over the tokens the model wrote, one function each, and the critic's loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpdateTokens:
    """Every sampled token of the update in canonical order (axis U), for losses that look beyond a micro-batch.

    ``logprobs_U`` are current, without gradient. ``uniforms_U`` are random numbers in [0, 1) keyed by seed, step, update
    and token, so that a random choice depends neither on packing nor on what ran before. ``kept_U`` is false for tokens of
    rejected sequences, which count in no mean and no share; None: all are kept.
    """

    logprobs_U: Tensor
    old_U: Tensor
    advantages_U: Tensor
    sequences_U: Tensor
    counts_S: Tensor
    uniforms_U: Tensor
    kept_U: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of a micro-batch. ``sequences_N`` is the index of each token's episode within the update.

    ``logprobs_N`` are current and carry the gradient; ``old_N`` are the learner's before the step's updates. ``places_N``
    says where the tokens stand in ``update``, which is complete as far as the loss's trait ``over`` asks: its tokens' own
    sequences (``sequence``) or everything (``update``); None for losses over single tokens.
    """

    logprobs_N: Tensor
    old_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor
    places_N: Tensor | None = None
    update: UpdateTokens | None = None


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token, before aggregation, and which tokens were clipped: their gradient is gone (cispo: it is bounded)."""

    loss_N: Tensor
    clipped_N: Tensor


LOG_RATIO_LIMIT = 20.0


def log_ratio(above_N: Tensor, below_N: Tensor) -> Tensor:
    """log(above / below) from log-probs, clamped to ±20 so that its exponential is finite; no gradient beyond."""
    return (above_N - below_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sums(values_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> Tensor:
    """The sum of each sequence's tokens; 0 where it has none."""
    zeros_S = torch.zeros(len(counts_S), dtype=torch.float64, device=values_N.device)
    return zeros_S.index_add(0, sequences_N, values_N.double())


def sequence_means(values_N: Tensor, sequences_N: Tensor, counts_S: Tensor) -> Tensor:
    """The mean of each sequence's tokens; 0 where it has none."""
    return sequence_sums(values_N, sequences_N, counts_S) / counts_S.clamp(min=1)


def covariances(update: UpdateTokens) -> Tensor:
    """(A - mean A)·(logp - mean logp) with means over all tokens of the update that are kept, in float64."""
    advantages_U, logprobs_U, kept_U = update.advantages_U.double(), update.logprobs_U.double(), _kept(update)
    return (advantages_U - advantages_U[kept_U].mean()) * (logprobs_U - logprobs_U[kept_U].mean())


def first_share(keys_U: Tensor, share: float, kept_U: Tensor | None = None) -> Tensor:
    """Marks the given share of the kept tokens, at least one, that has the smallest keys; of equal keys the earlier one."""
    chosen_U = torch.zeros_like(keys_U, dtype=torch.bool)
    kept_U = torch.ones_like(chosen_U) if kept_U is None else kept_U
    number = max(int(share * int(kept_U.sum())), 1)
    chosen_U[keys_U.masked_fill(~kept_U, torch.inf).argsort(stable=True)[:number]] = True
    return chosen_U & kept_U


def _kept(update: UpdateTokens) -> Tensor:
    return torch.ones_like(update.advantages_U, dtype=torch.bool) if update.kept_U is None else update.kept_U


# PPO's clip leaves one side open: a token with A < 0 that became likelier keeps the gradient -A·ratio, and a single
# ratio of e^19 drowns the whole update. The dual clip bounds it: past a ratio of c the token's loss is -c·A and its
# gradient is gone.


def clip(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 10.0) -> TokenLoss:
    """max(-A·ratio, -A·clip(ratio, 1-low, 1+high)); for A < 0 at most -c·A, c = ``dual_clip`` (None: no bound)."""
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    return surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)


def surrogate(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """The clipped loss for a ratio of any kind, a token's or a sequence's."""
    free_N = -advantages_N * ratio_N
    bound_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    out = TokenLoss(torch.maximum(free_N, bound_N), bound_N > free_N)
    if dual_clip is None:
        return out
    ceiling_N = -dual_clip * advantages_N
    over_N = (advantages_N < 0) & (out.loss_N > ceiling_N)
    return TokenLoss(torch.where(over_N, ceiling_N, out.loss_N), out.clipped_N | over_N)


def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = 10.0) -> TokenLoss:
    """max(-A·s, -A·clip(s, 1-low, 1+high)), s = exp(mean of the sequence's log-ratios); for A < 0 at most -c·A.

    At every token s has that value and the gradient of the token's own log-prob. So the mean over a sequence has the value
    and gradient of the sequence's loss, wherever its tokens are computed.
    """
    update = tokens.update
    assert update is not None, "gspo looks at whole sequences: Tokens.update is missing"
    means_S = sequence_means(log_ratio(update.logprobs_U, update.old_U), update.sequences_U, update.counts_S)
    means_N = means_S[tokens.sequences_N].to(tokens.logprobs_N.dtype)
    ratio_N = torch.exp(means_N + (tokens.logprobs_N - tokens.logprobs_N.detach()))
    return surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)


def cispo(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """-A·w·logp with w = clip(ratio, 1-low, 1+high), without gradient. Clipped are the tokens whose weight is."""
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N.detach(), tokens.old_N))
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-tokens.advantages_N * weight_N * tokens.logprobs_N, weight_N != ratio_N)


def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4, dual_clip: float | None = 10.0) -> TokenLoss:
    """-A·exp(mean over the sequence of c), c = s·min(s·d, s·clip(d, -low, high)), s = sign A, d the log-ratio.

    For A < 0 the exponential is bounded by ``dual_clip``, past which the gradient is gone. At every token the mean has the
    gradient of the token's own c. So the mean over a sequence with one advantage has the value and gradient of the
    sequence's loss; where advantages differ, each token follows its own.
    """
    update = tokens.update
    assert update is not None, "gmpo looks at whole sequences: Tokens.update is missing"
    bound_U, _ = _bound(update.logprobs_U, update.old_U, update.advantages_U, clip_low, clip_high)
    means_S = sequence_means(bound_U, update.sequences_U, update.counts_S)
    means_N = means_S[tokens.sequences_N].to(tokens.logprobs_N.dtype)
    bound_N, clipped_N = _bound(tokens.logprobs_N, tokens.old_N, tokens.advantages_N, clip_low, clip_high)
    ratio_N = torch.exp(means_N + (bound_N - bound_N.detach()))
    if dual_clip is not None:
        over_N = (tokens.advantages_N < 0) & (ratio_N > dual_clip)
        ratio_N, clipped_N = ratio_N.masked_fill(over_N, dual_clip), clipped_N | over_N
    return TokenLoss(-tokens.advantages_N * ratio_N, clipped_N)


def _bound(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Log-ratios bounded on the side that the advantage pulls to, and where they are; 0 where nothing pulls."""
    gap_N = log_ratio(logprobs_N, old_N)
    bound_N = gap_N.clamp(-low, high)
    sign_N = torch.sign(advantages_N)
    clipped_N = sign_N * bound_N < sign_N * gap_N
    return torch.where(sign_N == 0, 0, torch.where(clipped_N, bound_N, gap_N)), clipped_N


def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """-A·σ(τ·(ratio - 1))·4/τ, τ by the advantage's sign. Its slope at ratio 1 is -A; nothing is ever cut off."""
    advantages_N = tokens.advantages_N
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    tau_N = torch.full_like(ratio_N, tau_negative).masked_fill(advantages_N > 0, tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return TokenLoss(-advantages_N * gate_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def gpg(tokens: Tokens) -> TokenLoss:
    """-A·log p: nothing is clipped."""
    return TokenLoss(-tokens.advantages_N * tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))


def dppo(tokens: Tokens, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0) -> TokenLoss:
    """-A·min(ratio, cap)·logp, the weight without gradient, where p - p_old <= high (A > 0) or >= -low (A < 0); else 0."""
    advantages_N, logprobs_N = tokens.advantages_N, tokens.logprobs_N.detach()
    weight_N = torch.exp(log_ratio(logprobs_N, tokens.old_N)).clamp(max=ratio_cap)
    moved_N = torch.exp(logprobs_N) - torch.exp(tokens.old_N)
    far_N = torch.where(advantages_N > 0, moved_N > clip_high, (advantages_N < 0) & (moved_N < -clip_low))
    loss_N = -advantages_N * weight_N * tokens.logprobs_N
    return TokenLoss(loss_N.masked_fill(far_N, 0), far_N)


def clip_cov(
    tokens: Tokens,
    *,
    cov_share: float = 2e-4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 10.0,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """The clip loss, and 0 at a share of the update's tokens: drawn from those in (low, high) that are not clipped."""
    update, places_N = tokens.update, tokens.places_N
    assert update is not None, "clip_cov looks at the whole update: Tokens.update is missing"
    assert places_N is not None, "clip_cov needs to know where its tokens stand: Tokens.places_N is missing"
    ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.old_N))
    ratio_U = torch.exp(log_ratio(update.logprobs_U, update.old_U))
    out = surrogate(ratio_N, tokens.advantages_N, clip_low, clip_high, dual_clip)
    clipped_U = surrogate(ratio_U, update.advantages_U, clip_low, clip_high, dual_clip).clipped_N
    cov_U = covariances(update)
    candidates_U = (cov_U > cov_low) & (cov_U < cov_high) & ~clipped_U
    keys_U = update.uniforms_U.masked_fill(~candidates_U, math.inf)
    drawn_U = first_share(keys_U, cov_share, update.kept_U) & candidates_U
    drawn_N = drawn_U[places_N]
    return TokenLoss(out.loss_N.masked_fill(drawn_N, 0), out.clipped_N | drawn_N)


def kl_cov(tokens: Tokens, *, cov_share: float = 2e-4, cov_kl_coef: float = 1.0, ratio_cap: float = 20.0) -> TokenLoss:
    """-A·min(ratio, cap), and + coef·|log-ratio| at the share of the update's tokens with the highest covariance. No clip.

    A token without advantage can be among those, so this loss has a gradient even where no advantage is.
    """
    update, places_N = tokens.update, tokens.places_N
    assert update is not None, "kl_cov looks at the whole update: Tokens.update is missing"
    assert places_N is not None, "kl_cov needs to know where its tokens stand: Tokens.places_N is missing"
    gap_N = log_ratio(tokens.logprobs_N, tokens.old_N)
    held_N = first_share(-covariances(update), cov_share, update.kept_U)[places_N]
    ratio_N = torch.exp(gap_N)
    loss_N = -tokens.advantages_N * ratio_N.clamp(max=ratio_cap) + torch.where(held_N, cov_kl_coef * gap_N.abs(), 0)
    return TokenLoss(loss_N, (ratio_N > ratio_cap) & (tokens.advantages_N != 0))


def likelihood(tokens: Tokens) -> TokenLoss:
    """-log p of every token."""
    return TokenLoss(-tokens.logprobs_N, torch.zeros_like(tokens.logprobs_N, dtype=torch.bool))


def value_loss(values_P: Tensor, old_P: Tensor, targets_P: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """½·max((v - R)², (clip(v, old - c, old + c) - R)²) at every position, and where the clip took the gradient away.

    ``old_P`` are the critic's values before the step's updates; positions without a target are the caller's to leave out.
    """
    free_P = 0.5 * (values_P - targets_P).square()
    if clip is None:
        return free_P, torch.zeros_like(free_P, dtype=torch.bool)
    bound_P = 0.5 * (values_P.clamp(old_P - clip, old_P + clip) - targets_P).square()
    return torch.maximum(free_P, bound_P), bound_P > free_P


# The loss is experts · Σ_e chosen_e · probability_e, both as means over all tokens and layers of the update. It is no sum
# over tokens: what experts were chosen is counted over the whole update first, and every micro-batch then adds its share.
# Axes: T tokens, L layers, E experts.


@dataclass(frozen=True)
class RouterLoad:
    """What routers did with some tokens: how often each expert was chosen, its summed probabilities, how many rows.

    A row is a token in a layer. ``probabilities_E`` carries the gradient; the loads of parts add up to that of the whole.
    Where routes are replayed, ``replayed`` has how many tokens and choices were, and of each how many differ from what the
    router itself would choose: a token if it does in any layer.
    """

    chosen_LE: Tensor
    probabilities_E: Tensor
    rows: Tensor
    replayed: Tensor

    def __add__(self, other: "RouterLoad") -> "RouterLoad":
        return RouterLoad(*(mine + its for mine, its in zip(self._parts, other._parts, strict=True)))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.chosen_LE, self.probabilities_E, self.rows, self.replayed

    def over(self, summed: Callable[[Tensor], Tensor]) -> "RouterLoad":
        """With each part replaced by its sum over processes, say."""
        return RouterLoad(*map(summed, self._parts))

    def detach(self) -> "RouterLoad":
        """The same without gradient."""
        return self.over(Tensor.detach)


def router_load(
    logits: Sequence[Tensor],
    chosen: Sequence[Tensor],
    weights_T: Tensor | None = None,
    routes_TLK: Tensor | None = None,
) -> RouterLoad:
    """The load by the router logits [T, E] and the chosen experts [T, K] of each layer.

    ``weights_T``: how often a token counts (once if not said). ``routes_TLK``: what was replayed; of tokens where it is
    negative nothing was.
    """
    tokens, experts = logits[0].shape
    if weights_T is None:
        weights_T = torch.ones(tokens, device=logits[0].device)
    weights_T = weights_T.to(torch.float32)
    loads, probabilities = [], torch.zeros(experts, device=logits[0].device)
    differs_LT = torch.zeros(len(logits) if routes_TLK is not None else 0, tokens, device=weights_T.device)
    for i, (logits_TE, chosen_TK) in enumerate(zip(logits, chosen, strict=True)):
        probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        probabilities = probabilities + weights_T @ probabilities_TE
        picked_TE = torch.zeros_like(probabilities_TE).scatter_(1, chosen_TK, 1.0)
        loads.append(weights_T @ picked_TE)
        if routes_TLK is not None:
            own_TK = probabilities_TE.detach().topk(chosen_TK.shape[1], dim=-1).indices
            differs_LT[i] = chosen_TK.shape[1] - picked_TE.gather(1, own_TK).sum(1)
    replayed = torch.zeros(4, device=weights_T.device)
    if routes_TLK is not None:
        known_T = weights_T * (routes_TLK[:, 0, 0] >= 0)
        choices = known_T.sum() * routes_TLK[0].numel()
        changed = known_T @ (differs_LT > 0).any(0).float(), known_T @ differs_LT.sum(0)
        replayed = torch.stack([known_T.sum(), choices, *changed])
    return RouterLoad(torch.stack(loads), probabilities, weights_T.sum() * len(logits), replayed)


def balance_loss(part: RouterLoad, whole: RouterLoad) -> Tensor:
    """The share of ``part`` in the loss of the update ``whole``; the shares of its parts add up to it."""
    experts = whole.chosen_LE.shape[1]
    chosen_E = whole.chosen_LE.sum(0) / whole.rows
    return experts * (chosen_E * part.probabilities_E).sum() / whole.rows


def load_metrics(whole: RouterLoad) -> dict[str, float]:
    """How evenly experts are used: 1 is an even share. The busiest and the idlest of any layer, and how many are idle."""
    share_LE = whole.chosen_LE.double() * whole.chosen_LE.shape[1] / whole.chosen_LE.double().sum(1, keepdim=True)
    found = torch.stack(
        [share_LE.max(), share_LE.min(), (share_LE == 0).double().mean(), balance_loss(whole, whole).double()]
    )
    names = ("router/busiest_expert", "router/idlest_expert", "router/unused_experts", "router/balance_loss")
    row = dict(zip(names, found.tolist(), strict=True))
    tokens, choices, tokens_changed, choices_changed = whole.replayed.tolist()
    if tokens:
        row["router/replayed_tokens"] = tokens * len(whole.chosen_LE) / float(whole.rows)
        row["router/changed_tokens"], row["router/changed_experts"] = tokens_changed / tokens, choices_changed / choices
    return row


def sequence_weights(aggregation: str, counts_S: Tensor, *, constant: float = 1.0) -> Tensor:
    """The weight of each sequence's tokens, given how many tokens every sequence of the update has.

    The loss is the sum over tokens of weight[sequence] times their loss, so packing and ranks change nothing.

    With N tokens in S sequences (those without tokens do not count): token_mean 1/N; sequence_mean_token_mean 1/(S·n_s);
    sequence_mean_token_sum 1/S; constant 1/(S·constant), for a constant like the longest response (Dr.GRPO).
    """
    counts_S = counts_S.to(torch.float64)
    present_S = counts_S > 0
    sequences = present_S.sum().clamp(min=1)
    if aggregation == "token_mean":
        weights_S = torch.ones_like(counts_S) / counts_S.sum().clamp(min=1)
    elif aggregation == "sequence_mean_token_mean":
        weights_S = 1 / (sequences * counts_S.clamp(min=1))
    elif aggregation == "sequence_mean_token_sum":
        weights_S = torch.ones_like(counts_S) / sequences
    elif aggregation == "constant":
        weights_S = torch.ones_like(counts_S) / (sequences * constant)
    else:
        raise ValueError(f"unknown aggregation '{aggregation}'")
    return torch.where(present_S, weights_S, 0).to(torch.float32)
