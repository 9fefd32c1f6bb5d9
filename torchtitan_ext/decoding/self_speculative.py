"""One model drafts and verifies in the same forward (TiDAR, sections 3.2 and 3.3).

A row has n tokens in the cache and J drafts for positions n .. n+J-1. Draft 0 was chosen
by the verifier and is certain; the others were guessed in mask slots. One forward runs
over J + J*J tokens:

- the J drafts, causal: the verifier's view of every draft;
- for j = 1 .. J a block of J masks at positions n+j .. n+j+J-1, which sees the prefix, the
  first j drafts and itself in both directions: the next guesses, should j drafts stay.

With a of the drafts accepted, 1 <= a <= J, the verifier also knows the token after them,
so a forward emits exactly a tokens. Like in plain decoding the last token emitted is not
in the cache yet: it is draft 0 of the next forward. Rows of a batch are independent, each
accepts its own number, and a finished row leaves the batch.

Shape suffixes: B = batch rows, J = drafts of a row, I = drafts that are uncertain (J - 1),
Q = tokens of a forward, K = slots of the cache, C = columns of the pattern, D = model
dimension, V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext.decoding import autoregressive
from torchtitan_ext.decoding.autoregressive import checked_model, checked_prompts, context_length, headless
from torchtitan_ext.decoding.interface import (
    Generation,
    OnStep,
    OnToken,
    check_mask_id,
    row_seeds,
)
from torchtitan_ext.decoding.kv_cache import KVCache
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.rows import Row
from torchtitan_ext.decoding.sampling import (
    GREEDY,
    SamplingParams,
    draw,
    greedy,
    probabilities,
    row_generators,
    sample,
    uniforms,
)
from torchtitan_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """How tokens are drafted and verified."""

    mask_id: int
    """Token that stands in the slots to be guessed."""

    draft_length: int
    """Drafts of a forward, J; 1 is plain autoregressive decoding."""

    beta: float = 1.0
    """Weight of the autoregressive logits in the verifier; the rest is on the mask slots'."""

    sampling: SamplingParams = GREEDY
    """Applied to the verifier and to the drafts alike."""

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise UserError(f"draft_length must be at least 1, got {self.draft_length}")
        if not (math.isfinite(self.beta) and 0 <= self.beta <= 1):
            raise UserError(f"beta must be between 0 (trust the drafts) and 1 (trust AR), got {self.beta}")


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    mask_id: int,
    draft_length: int,
    beta: float = 1.0,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    on_step: OnStep | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt by drafts; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    With ``beta`` = 1 greedy output is that of plain autoregressive decoding, and sampled
    output follows the same distribution (not the same draws).

    ``extra`` of the result: ``accepted``, for every row the drafts accepted in each forward
    after the prompt's (counted before a stop token or the length cuts them); ``histogram``
    of those; ``draft_length`` and ``beta``.

    Errors: :class:`UserError` before the first forward for what is out of range or does not fit.
    """
    drafting = Drafting(mask_id=mask_id, draft_length=draft_length, beta=beta, sampling=sampling)
    decoder = checked_model(model)
    context = context_length(decoder)
    vocab_size = decoder.config.vocab_size
    check_mask_id(mask_id, vocab_size=vocab_size)
    starts = checked_prompts(
        prompts,
        vocab_size=vocab_size,
        context=context if max_len is None else min(context, max_len),
        max_new_tokens=max_new_tokens,
        bos_id=bos_id,
    )
    seeds = row_seeds(seeds, rows=len(starts), sampling=sampling)
    rows = [_Row(index=i, prompt=prompt) for i, prompt in enumerate(starts)]
    run = _Run(decoder, drafting, max_new_tokens, frozenset(stop_ids), on_token, on_step)
    begin = time.perf_counter()
    with torch.inference_mode(), headless(decoder), step_rotary(decoder):
        forwards = run(rows, row_generators(seeds)) if rows else 0
    seconds = time.perf_counter() - begin
    accepted = [row.accepted for row in rows]
    histogram = Counter(count for counts in accepted for count in counts)
    return Generation(
        results=[row.result(forwards=row.forwards) for row in rows],
        forwards=forwards,
        seconds=seconds,
        extra={
            "accepted": accepted,
            "histogram": dict(sorted(histogram.items())),
            "draft_length": draft_length,
            "beta": beta,
        },
    )


@dataclass(kw_only=True, slots=True)
class _Row(Row):
    """A row while it is being generated."""

    accepted: list[int] = field(default_factory=list)
    forwards: int = 0


@dataclass(slots=True)
class _Run:
    """One call of :func:`generate`."""

    model: TitanDecoder
    drafting: Drafting
    max_new_tokens: int
    stop_ids: frozenset[int]
    on_token: OnToken | None
    on_step: OnStep | None

    def __call__(self, rows: list[_Row], generators: Sequence[torch.Generator]) -> int:
        """Generate all rows; the number of forwards, the prompts being one."""
        longest = max(len(row.prompt) for row in rows)
        session = Session(self.model, self.drafting, generators, longest=longest + self.max_new_tokens)
        verified = session.prefill([row.prompt for row in rows])
        forwards = 1
        while True:
            for row, tokens in zip(rows, verified, strict=True):
                self._take(row, tokens)
            kept = [i for i, row in enumerate(rows) if row.finish is None]
            if not kept:
                return forwards
            if len(kept) < len(rows):
                session.select(kept)
                rows = [rows[i] for i in kept]
            verified = session.step()
            forwards += 1
            for row, tokens in zip(rows, verified, strict=True):
                row.accepted.append(len(tokens))

    def _take(self, row: _Row, tokens: list[int]) -> None:
        """Emit what one forward verified, up to where the row ends."""
        row.forwards += 1
        if self.on_step is not None:
            self.on_step(row.index, len(tokens))
        row.give(tokens, on_token=self.on_token, stop_ids=self.stop_ids, limit=self.max_new_tokens)


class Session:
    """A batch of rows that are being decoded: their cache and their drafts.

    Use it inside ``torch.inference_mode()`` and :func:`~.autoregressive.headless`.
    ``longest``: no row will hold more tokens than this.
    """

    def __init__(
        self,
        model: TitanDecoder,
        drafting: Drafting,
        generators: Sequence[torch.Generator],
        *,
        longest: int,
    ) -> None:
        length = drafting.draft_length
        device = next(model.parameters()).device
        self.model = model
        self.drafting = drafting
        self.generators = list(generators)
        self.layout = StepLayout(length, longest=longest, context=context_length(model), device=device)
        self.cache = KVCache(len(self.generators), capacity=longest + self.layout.queries, device=device)
        self._masks_M = torch.full((length * length,), drafting.mask_id, device=device)
        self.drafts_BJ: torch.Tensor
        self._draft_probs_BIV: torch.Tensor | None = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Take in prompts of any lengths; the first token of each row, drafts for what follows."""
        last_BD, block_BJD = self._prompt_hidden(prompts)
        tokens_B = sample(self.model.lm_head(last_BD), self.drafting.sampling, self.generators)
        self._draft(tokens_B, block_BJD)
        return tokens_B[:, None].tolist()

    def step(self) -> list[list[int]]:
        """One forward: verify the drafts, keep those that hold, draft again.

        Returns the tokens of each row that are now certain and were not before: at least one,
        at most J. The cache then holds all of the row but the last of them.
        """
        length = self.drafting.draft_length
        hidden_BQD = self._step_hidden()
        blocks_BJJD = hidden_BQD[:, length:].unflatten(1, (length, length))
        verifier_BJV = self._verifier(hidden_BQD[:, :length], blocks_BJJD[:, :, 0])
        count_B, next_B = self._accept(verifier_BJV)
        last_B = count_B - 1
        # Drafts 1 .. a-1, then the token after them; what lies behind is cut off below.
        settled_BJ = self.drafts_BJ.roll(-1, dims=1).scatter(1, last_B[:, None], next_B[:, None])
        self._draft(next_B, _pick(blocks_BJJD, last_B))
        # The step's only wait for the device.
        outcome = torch.cat((count_B[:, None], settled_BJ), dim=1).tolist()
        self.cache.advance([count for count, *_ in outcome])
        return [tokens[:count] for count, *tokens in outcome]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.select(rows)
        index = torch.tensor(rows, device=self.cache.device)
        self.generators = [self.generators[row] for row in rows]
        self.drafts_BJ = self.drafts_BJ[index]
        if self._draft_probs_BIV is not None:
            self._draft_probs_BIV = self._draft_probs_BIV[index]

    def _prompt_hidden(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states at each prompt's last token [B, D] and in the mask block behind it [B, J, D].

        A prompt longer than a chunk takes several forwards; the masks go with the last.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest, chunk = max(lengths), autoregressive.PREFILL_CHUNK
        tokens_BL = autoregressive.padded(prompts, device=self.cache.device)
        last: dict[int, torch.Tensor] = {}

        def seen(hidden_BLD: torch.Tensor, begin: int, end: int) -> None:
            self.cache.advance(end - begin)
            for row, length in enumerate(lengths):
                if begin < length <= end:
                    last[row] = hidden_BLD[row, length - 1 - begin]

        final = (longest - 1) // chunk * chunk
        for begin in range(0, final, chunk):
            chunk_BL = tokens_BL[:, begin : begin + chunk]
            seen(autoregressive.forward(self.model, self.cache, chunk_BL), begin, begin + chunk)
        hidden_BQD = self._prompt_end(tokens_BL[:, final:], lengths)
        seen(hidden_BQD, final, longest)
        self.cache.truncate(lengths)
        last_BD = torch.stack([last[row] for row in range(len(prompts))])
        return last_BD, hidden_BQD[:, longest - final :]

    def _prompt_end(self, chunk_BL: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The forward over the last chunk of the prompts and one block of masks."""
        begin, batch, masks = self.cache.lengths[0], len(lengths), self.drafting.draft_length
        tokens_BQ = torch.cat((chunk_BL, self._masks_M[:masks].expand(batch, -1)), dim=1)
        if lengths.count(lengths[0]) == batch:
            lengths = lengths[:1]
        slots_Q, positions_BQ, mask_BQK = prompt_layout(
            torch.tensor(lengths, device=self.cache.device),
            begin=begin,
            end=begin + chunk_BL.shape[1],
            masks=masks,
            context=self.layout.context,
        )
        plan = self.cache.attend_at(slots_Q[None], mask_BQK)
        return self.model(tokens_BQ, positions=positions_BQ, attention_masks=plan)

    def _step_hidden(self) -> torch.Tensor:
        """The forward over drafts and mask blocks, [B, Q, D]; the cache is not advanced."""
        cache = self.cache
        if cache.common_length is not None:
            slots_BQ, positions_BQ, mask_BQK = self.layout.sliced(cache.common_length)
        else:
            lengths_B = torch.tensor(cache.lengths, device=cache.device)
            slots_BQ, positions_BQ, mask_BQK = self.layout.gathered(lengths_B, max(cache.lengths))
        tokens_BQ = torch.cat((self.drafts_BJ, self._masks_M.expand(cache.batch, -1)), dim=1)
        plan = cache.attend_at(slots_BQ, mask_BQK)
        return self.model(tokens_BQ, positions=positions_BQ, attention_masks=plan)

    def _verifier(self, drafts_BJD: torch.Tensor, first_BJD: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each draft, [B, J, V] (TiDAR section 4.4.3).

        Draft j-1 and the first mask of block j both predict it. A head whose weight is 0 is not run.
        """
        beta, head = self.drafting.beta, self.model.lm_head
        if beta == 1:
            return head(drafts_BJD)
        if beta == 0:
            return head(first_BJD)
        return beta * head(drafts_BJD).float() + (1 - beta) * head(first_BJD).float()

    def _accept(self, verifier_BJV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Number of accepted drafts and the token after them, [B] each."""
        sampling = self.drafting.sampling
        if sampling.is_greedy:
            return accept_greedy(self.drafts_BJ, greedy(verifier_BJV))
        verifier_BJV = probabilities(verifier_BJV, sampling)
        batch, length = self.drafts_BJ.shape
        if length == 1:
            return torch.ones_like(self.drafts_BJ[:, 0]), draw(verifier_BJV[:, 0], self.generators)
        assert self._draft_probs_BIV is not None
        levels = uniforms(self._each_draft(), device=verifier_BJV.device)
        count_B, next_BV = accept_sampled(
            self.drafts_BJ, verifier_BJV, self._draft_probs_BIV, levels.view(batch, length - 1)
        )
        return count_B, draw(next_BV, self.generators)

    def _draft(self, certain_B: torch.Tensor, block_BJD: torch.Tensor) -> None:
        """New drafts: the certain token, then what the block's slots after the first propose."""
        sampling, batch = self.drafting.sampling, certain_B.shape[0]
        if self.drafting.draft_length == 1:
            self.drafts_BJ = certain_B[:, None]
            return
        logits_BIV = self.model.lm_head(block_BJD[:, 1:])
        if sampling.is_greedy:
            guesses_BI = greedy(logits_BIV)
        else:
            self._draft_probs_BIV = probabilities(logits_BIV, sampling)
            guesses_BI = draw(self._draft_probs_BIV.flatten(0, 1), self._each_draft()).view(batch, -1)
        self.drafts_BJ = torch.cat((certain_B[:, None], guesses_BI), dim=1)

    def _each_draft(self) -> list[torch.Generator]:
        """The row's generator for each of its uncertain drafts, row after row."""
        return [g for g in self.generators for _ in range(self.drafting.draft_length - 1)]


def accept_greedy(drafts_BJ: torch.Tensor, targets_BJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts as long as they are what the verifier chose; (count, next token), [B] each.

    ``targets_BJ[:, i]`` is the verifier's token after draft i. Draft 0 is always accepted, so
    1 <= count <= J. Source: TiDAR section 3.2.
    """
    count_B = _run_length(drafts_BJ[:, 1:] == targets_BJ[:, :-1])
    return count_B, _pick(targets_BJ, count_B - 1)


def accept_sampled(
    drafts_BJ: torch.Tensor,
    verifier_BJV: torch.Tensor,
    draft_BIV: torch.Tensor,
    levels_BI: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative rejection sampling: (count [B], what to draw the next token from [B, V]).

    ``verifier_BJV[:, i]``: probabilities p of the token after draft i; ``draft_BIV[:, i]``: the
    distribution q that draft i + 1 was drawn from; ``levels_BI``: uniform in [0, 1). A draft d is
    accepted with probability min(1, p(d) / q(d)). After the first rejection the next token comes
    from max(p - q, 0), else from the last p; the rows returned need not sum to 1. Tokens then
    follow p whatever q is.
    Source: Leviathan et al. 2023, algorithm 1 and appendix A.1.
    """
    drafted_BI1 = drafts_BJ[:, 1:, None]
    p_BI = verifier_BJV[:, :-1].gather(2, drafted_BI1)[..., 0].double()
    q_BI = draft_BIV.gather(2, drafted_BI1)[..., 0].double()
    count_B = _run_length(levels_BI * q_BI < p_BI)
    p_BV = _pick(verifier_BJV, count_B - 1)
    uncertain = draft_BIV.shape[1]
    if uncertain == 0:
        return count_B, p_BV
    rejected_B1 = (count_B <= uncertain)[:, None]
    q_BV = _pick(draft_BIV, (count_B - 1).clamp(max=uncertain - 1)) * rejected_B1
    residual_BV = (p_BV - q_BV).clamp(min=0)
    # p and q that differ by rounding alone can leave nothing to draw from.
    return count_B, torch.where(residual_BV.sum(dim=-1, keepdim=True) > 0, residual_BV, p_BV)


def _run_length(holds_BI: torch.Tensor) -> torch.Tensor:
    """Accepted drafts [B]: the certain one and those before the first that does not hold."""
    return 1 + holds_BI.long().cumprod(dim=1).sum(dim=1)


def _pick(x_BJ: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """``x_BJ[b, index_B[b]]`` for every row, [B, ...]."""
    return x_BJ[torch.arange(x_BJ.shape[0], device=x_BJ.device), index_B]


def decode_pattern(draft_length: int, *, prefix: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What the Q tokens of a forward may attend to, boolean [Q, prefix + Q + 1].

    Columns: ``prefix`` that everything sees, one for each of the Q tokens, one that nothing sees.
    """
    index_Q = torch.arange(draft_length + draft_length**2, device=device)
    # The drafts themselves are number 0 of the J + 1 groups of J tokens.
    block_Q, offset_Q = index_Q // draft_length, index_Q % draft_length
    seen_Q = torch.where(block_Q == 0, offset_Q + 1, block_Q)
    drafts_QQ = (block_Q == 0) & (index_Q < seen_Q[:, None])
    own_block_QQ = (block_Q > 0) & (block_Q == block_Q[:, None])
    everything_QC = drafts_QQ.new_ones(len(index_Q), prefix)
    return torch.cat((everything_QC, drafts_QQ | own_block_QQ, torch.zeros_like(drafts_QQ[:, :1])), dim=1)


class StepLayout:
    """Slots, positions and mask of a step, from one pattern that is built once.

    ``longest``: most tokens a row can hold; ``context``: rotary positions of the model.
    """

    def __init__(
        self, draft_length: int, *, longest: int, context: int, device: torch.device | str = "cpu"
    ) -> None:
        self.length, self.prefix, self.context = draft_length, longest, context
        self.queries = draft_length + draft_length**2
        self._pattern_QC = decode_pattern(draft_length, prefix=longest, device=device)
        self._index_Q = torch.arange(self.queries, device=device)
        self._ahead_Q = self._index_Q // draft_length + self._index_Q % draft_length
        self._slots_K = torch.arange(longest + self.queries, device=device)

    def sliced(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots [1, Q], positions [1, Q] and mask [1, Q, K] when all rows hold ``length`` tokens."""
        mask_QK = self._pattern_QC[:, self.prefix - length : self.prefix + self.queries]
        return length + self._index_Q[None], self._positions(length)[None], mask_QK[None]

    def gathered(
        self, lengths_B: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with a row for each of ``lengths_B``, of which ``longest`` is the largest.

        A row's drafts follow its own tokens, since those accepted stay. The mask blocks of all
        rows lie behind the drafts of the longest.
        """
        own_B1 = lengths_B[:, None]
        slots_BQ = torch.where(self._index_Q < self.length, own_B1, longest) + self._index_Q
        slots_K = self._slots_K[: longest + self.queries]
        draft_BK = slots_K - own_B1
        columns_BK = torch.where(draft_BK < self.length, self.prefix + draft_BK, self.prefix + self.queries)
        columns_BK = torch.where(draft_BK < 0, 0, columns_BK)
        scratch_K = slots_K >= longest + self.length
        columns_BK = torch.where(scratch_K, self.prefix + slots_K - longest, columns_BK)
        mask_BQK = self._pattern_QC[self._index_Q[:, None], columns_BK[:, None]]
        return slots_BQ, self._positions(own_B1), mask_BQK

    def _positions(self, length: int | torch.Tensor) -> torch.Tensor:
        # Drafts past the context are never emitted; they only need some row of the rotary table.
        return (length + self._ahead_Q).clamp(max=self.context - 1)


def prompt_layout(
    lengths_B: torch.Tensor, *, begin: int, end: int, masks: int, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots [Q], positions [B, Q] and mask [B, Q, K] of the prompts' tokens begin .. end - 1 and a block.

    The masks of all rows lie in the slots from ``end`` on; a row's block sees its own
    ``lengths_B`` tokens and itself, at the positions that follow them.
    """
    slots_K = torch.arange(end + masks, device=lengths_B.device)
    slots_Q = slots_K[begin:]
    own_B1 = lengths_B[:, None]
    positions_BQ = torch.where(slots_Q < end, slots_Q, own_B1 + slots_Q - end).clamp(max=context - 1)
    causal_QK = slots_K <= slots_Q[:, None]
    block_BK = (slots_K < own_B1) | (slots_K >= end)
    mask_BQK = torch.where((slots_Q < end)[:, None], causal_QK, block_BK[:, None])
    return slots_Q, positions_BQ, mask_BQK
