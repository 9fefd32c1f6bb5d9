"""Loss terms shared by the methods.

Every term is a sum over its supervised tokens divided by its own global count
(over all microbatches and data-parallel ranks of the step), so that the
gradient is the same for one batch of N, N accumulated microbatches or N ranks.

Shape suffixes: B = batch, L = sequence length, V = vocabulary (or this rank's
part of it under tensor parallel).
"""

from dataclasses import dataclass
from typing import Annotated, Any

import spmd_types as spmd
import torch
import tyro
from torch import nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, compute_logprobs, cross_entropy_loss
from torchtitan.config import CompileConfig, Configurable
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX


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


def _whole(logits_BLV: torch.Tensor) -> torch.Tensor:
    """Logits of the whole vocabulary, on every rank of a tensor-parallel group."""
    if spmd_mesh_size("tp") == 1:
        return logits_BLV
    mesh = current_spmd_mesh()
    assert mesh is not None
    return spmd.redistribute(logits_BLV, mesh.get_group("tp"), src=spmd.S(-1), dst=spmd.I)


class _WeightedCrossEntropy(torch.autograd.Function):
    """Weighted sum of the tokens' cross-entropies, and each of them, fp32 [B, L], without gradient.

    The logits' gradient overwrites the log-probabilities, so that one tensor of the logits' size is
    held beside them and not three. The sum may enter the loss with factor 1 alone.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_BLV: torch.Tensor, labels_BL: torch.Tensor, weights_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        valid_BL = labels_BL != IGNORE_INDEX
        at_BL1 = labels_BL.masked_fill(~valid_BL, 0)[..., None]
        logprobs_BLV = logits_BLV.log_softmax(dim=-1)
        losses_BL = torch.where(valid_BL, -logprobs_BLV.gather(-1, at_BL1)[..., 0], 0.0)
        if ctx.needs_input_grad[0]:
            weights_BL1 = torch.where(valid_BL, weights_BL, 0.0)[..., None]
            gradient_BLV = logprobs_BLV.exp_().mul_(weights_BL1).scatter_add_(-1, at_BL1, -weights_BL1)
            ctx.save_for_backward(gradient_BLV)
        ctx.mark_non_differentiable(losses_BL)
        return (losses_BL * weights_BL).sum(), losses_BL

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return ctx.saved_tensors[0], None, None


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
        total, losses_BL = _WeightedCrossEntropy.apply(_whole(pred).float(), labels, loss_weights_BL)
        self.kept.append(losses_BL)
        return total, {}


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
