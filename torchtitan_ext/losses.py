"""Loss terms shared by the methods.

Every term is a sum over its supervised tokens divided by its own global count
(over all microbatches and data-parallel ranks of the step), so that the
gradient is the same for one batch of N, N accumulated microbatches or N ranks.

Shape suffixes: B = batch, L = sequence length, V = vocabulary (or this rank's
part of it under tensor parallel).
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs, cross_entropy_loss
from torchtitan.config import CompileConfig, Configurable

from torchtitan_ext.errors import UserError


class TokenCrossEntropy(BaseLoss):
    """Cross-entropy summed over tokens and divided by a global count.

    ``loss_weights_BL``, if given, is the complete weight of each token (its
    term's factor divided by its term's global count) and replaces the count.
    ``loss_weights_BLT`` does so for T terms, which are then also metrics.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None
        """Full vocabulary size, needed for vocabulary-parallel cross-entropy."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.fn = cross_entropy_loss
        self._maybe_compile(compile_config)
        self.global_vocab_size = config.global_vocab_size

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        *,
        loss_weights_BL: torch.Tensor | None = None,
        loss_weights_BLT: torch.Tensor | None = None,
        term_factors: list[float] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of ``pred`` [B, L, V] against ``labels`` [B, L]; -100 is ignored.

        With ``loss_weights_BLT`` term t is the weighted sum over tokens, the metric
        "term_t_mean" (torchtitan sums such over chunks), and the loss the sum of
        ``term_factors[t]`` times it.
        """
        if loss_weights_BL is not None:
            return (_token_losses(pred, labels) * loss_weights_BL).sum(), {}
        if loss_weights_BLT is not None:
            terms_T = (_token_losses(pred, labels)[..., None] * loss_weights_BLT).sum(dim=(0, 1))
            pairs = list(zip(term_factors or (), terms_T.unbind(), strict=True))
            loss = torch.stack([factor * term for factor, term in pairs]).sum()
            return loss, {f"term_{t}_mean": term.detach() for t, (_, term) in enumerate(pairs)}
        loss = self.fn(pred, labels, global_vocab_size=self.global_vocab_size)
        if global_valid_tokens is not None:
            # No supervised token anywhere: a zero that is still connected to the graph.
            loss = loss / global_valid_tokens.clamp(min=1)
        return loss, {}


def _token_losses(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token, fp32 [B, L], 0 at label -100; vocabulary-parallel logits too."""
    logprobs_BL = compute_logprobs(logits_BLV, labels_BL)
    assert isinstance(logprobs_BL, torch.Tensor)
    return -logprobs_BL


class _KeptLosses(BaseLoss):
    """The weighted sum of token losses, which it keeps without their gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.kept: list[torch.Tensor] = []

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        *,
        loss_weights_BL: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses_BL = _token_losses(pred, labels)
        self.kept.append(losses_BL.detach())
        return (losses_BL * loss_weights_BL).sum(), {}


def weighted_token_losses(
    head: nn.Module,
    hidden_BLD: torch.Tensor,
    labels_BL: torch.Tensor,
    weights_BL: torch.Tensor,
    *,
    num_chunks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the tokens' cross-entropies from hidden states, and each of them.

    The second, fp32 [B, L], 0 at label -100, has no gradient. The logits of one of ``num_chunks``
    equal parts of the sequence exist at a time. Each part's backward follows its forward at once,
    so nothing is computed twice; as with the chunked loss of :class:`LossSection`, the gradient of
    ``head`` is then added already, and the sum may enter the loss with factor 1 alone.
    """
    kept = _KeptLosses.Config()
    chunked = ChunkedLossWrapper.Config(num_chunks=num_chunks, loss_fn=kept).build()
    chunked.set_lm_head(head)
    total, _ = chunked(hidden_BLD, labels_BL, loss_weights_BL=weights_BL)
    return total, torch.cat(chunked.loss_fn.kept, dim=1)


@dataclass(kw_only=True, slots=True)
class LossSection(Configurable.Config):
    """[loss]"""

    num_chunks: int = 1
    """Parts in which a sequence passes the LM head, so that not all logits exist at once."""

    global_vocab_size: Annotated[int | None, tyro.conf.Suppress] = None
    """Filled in from the model; not a knob."""

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ValueError(f"loss.num_chunks must be at least 1, got {self.num_chunks}")

    def check(self, *, seq_len: int) -> None:
        """Raise if the sequence does not divide into the chunks."""
        if seq_len % self.num_chunks:
            raise UserError(
                f"[loss] num_chunks = {self.num_chunks} must divide the sequence length, got {seq_len}"
            )

    def build(self, *, compile_config: CompileConfig | None = None, **kwargs: Any) -> BaseLoss:
        """The token loss, applied chunk by chunk if more than one is asked for."""
        token_loss = TokenCrossEntropy.Config(global_vocab_size=self.global_vocab_size)
        if self.num_chunks == 1:
            return token_loss.build(compile_config=compile_config)
        chunked = ChunkedLossWrapper.Config(num_chunks=self.num_chunks, loss_fn=token_loss)
        return chunked.build(compile_config=compile_config)
