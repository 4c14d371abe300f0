"""What the mock engine says: rules for the next token, and a plain sampler.

A rule is a function from all tokens so far to the probabilities of the next one; tokens it does not name are as good as
impossible. The sampler is the definition of `SamplingParams`, step after step, without a thought for speed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.api import SamplingParams

Rule = Callable[[Sequence[int]], Mapping[int, float]]


def successor(tokens: Sequence[int]) -> Mapping[int, float]:
    """The next byte value: after ``a`` comes ``b``."""
    return {(tokens[-1] + 1) % 256: 1.0}


def digest(tokens: Sequence[int]) -> Mapping[int, float]:
    """A lower-case letter that depends on every token and its place: the tokens as digits of base 31, modulo 1009."""
    value = 0
    for token in tokens:
        value = (value * 31 + token) % 1009
    return {97 + value % 26: 1.0}


@dataclasses.dataclass(frozen=True)
class Table:
    """Next-token probabilities that depend on the last token only; a token without a row is followed by
    ``otherwise``."""

    rows: Mapping[int, Mapping[int, float]]
    otherwise: Mapping[int, float] = dataclasses.field(default_factory=lambda: {257: 1.0})

    def __call__(self, tokens: Sequence[int]) -> Mapping[int, float]:
        return self.rows.get(tokens[-1], self.otherwise)


@dataclasses.dataclass(frozen=True)
class Script:
    """Continues each known prompt with its scripted tokens, then with ``end`` forever (EOS of the byte tokenizer)."""

    answers: Mapping[tuple[int, ...], Sequence[int]]
    end: int = 257

    def __call__(self, tokens: Sequence[int]) -> Mapping[int, float]:
        for prompt, answer in self.answers.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                place = len(tokens) - len(prompt)
                return {answer[place] if place < len(answer) else self.end: 1.0}
        return {self.end: 1.0}


def choose(
    logprobs: np.ndarray,
    context: Sequence[int],
    sampling: SamplingParams,
    generated: collections.Counter[int],
    count: int,
    mask: np.ndarray | None,
) -> int:
    """Chooses a token as `SamplingParams` says, one plain step after the other.

    Penalties are OpenAI's (presence, frequency) and of CTRL (repetition: arXiv 1909.05858, section 4.1); min-p keeps
    what is at least ``min_p`` times as probable as the best (arXiv 2407.01082), top-n-sigma what is within so many standard
    deviations of the largest logit (arXiv 2411.07641). The choice is a Gumbel-max draw.
    """
    logits = logprobs.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if count < sampling.min_tokens:
        logits[list(sampling.suppressed)] = -np.inf
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        logits[~allowed] = -np.inf
    for token in set(context):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in generated.items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    logits = logits / sampling.temperature
    if sampling.top_n_sigma > 0:
        possible = logits[np.isfinite(logits)]
        logits = np.where(logits >= possible.max() - sampling.top_n_sigma * possible.std(), logits, -np.inf)
    order = np.argsort(-logits, kind="stable")
    probabilities = np.exp(logits[order] - logits[order[0]])
    probabilities /= probabilities.sum()
    keep = np.ones(len(order), bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    probabilities = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    keep &= np.cumsum(probabilities) - probabilities < sampling.top_p
    keep &= probabilities >= sampling.min_p * probabilities[0]
    random = np.random.default_rng((sampling.seed, sampling.sample, len(context)))
    noisy = logits[order] + random.gumbel(size=len(order))
    return int(order[np.argmax(np.where(keep, noisy, -np.inf))])
