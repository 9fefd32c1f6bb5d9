"""Training on a clean sequence followed by a masked copy of itself.

What TiDAR and block diffusion share: the doubled batch, its labels, the blocks, and the
backbone whose attention mask is that of :func:`masks.doubled_blocks`.

Shape suffixes: B = batch, S = data length, L = 2S, M = positions that are read out, T = 2
loss terms: next token on the clean half, own token on the masked half.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan_ext import backbones, masks
from torchtitan_ext.attention import build_mask
from torchtitan_ext.data.targets import own_token_targets
from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX, Generators, Objective, Prepared, rand
from torchtitan_ext.readout import labelled

# --- batch -----------------------------------------------------------------------------


class Corrupted(NamedTuple):
    """The masked half."""

    tokens_BS: torch.Tensor
    """Tokens, the mask token where they are hidden."""

    hidden_BS: torch.Tensor
    """Whether a position is hidden, bool."""

    noise_BS: torch.Tensor
    """Probability with which each position was hidden, the same within a block."""


def block_starts(positions_BS: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Index in the row of the first token of each token's block, [B, S].

    Blocks count from the start of the document; a row that starts inside a block begins one.
    """
    index_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    return (index_S - positions_BS % block_size).clamp(min=0)


def hide_all(tokens_BS: torch.Tensor, *, mask_id: int) -> Corrupted:
    """Every token masked (TiDAR section 3.1)."""
    hidden_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    return Corrupted(torch.full_like(tokens_BS, mask_id), hidden_BS, torch.ones(tokens_BS.shape))


def hide_randomly(
    tokens_BS: torch.Tensor,
    positions_BS: torch.Tensor,
    *,
    mask_id: int,
    block_size: int,
    generator: Generators,
    least: float = 1e-3,
) -> Corrupted:
    """Each block draws t ~ U(0, 1) and hides each of its tokens with that probability.

    ``least``: t = least + (1 - least) u, so that a weight of 1/t stays finite.
    Source: the linear schedule of masked diffusion in blocks (Arriola et al., 2025); TiDAR table 5.
    """
    level_BS = least + (1 - least) * rand(tokens_BS.shape, generator=generator)
    noise_BS = level_BS.gather(1, block_starts(positions_BS, block_size=block_size))
    hidden_BS = rand(tokens_BS.shape, generator=generator) < noise_BS
    return Corrupted(tokens_BS.masked_fill(hidden_BS, mask_id), hidden_BS, noise_BS)


class DoubledObjective(Objective):
    """Loss of a doubled sequence: two terms, each with its own global count.

    A subclass says how the copy is corrupted (:meth:`corrupt`), what a hidden token weighs
    (:meth:`weights`) and counts, and with which factors the terms add up.
    """

    terms = ("ar", "diffusion")
    loss_inputs = ("readout_M", "weights_1MT")
    name = ""
    """Prefix of the metrics."""

    def __init__(self, *, mask_id: int, block_size: int, factors: tuple[float, float], multiple: int) -> None:
        self.mask_id = mask_id
        self.block_size = block_size
        self.factors = factors
        """Factors of the next-token and of the diffusion term."""
        self.multiple = multiple
        """The number of positions read out is a multiple of this (chunks of the loss)."""

    def corrupt(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, *, generator: Generators
    ) -> Corrupted:
        """The masked half."""
        raise NotImplementedError

    def weights(self, corrupted: Corrupted) -> torch.Tensor:
        """Weight of each hidden token in the diffusion term, [B, S]."""
        return torch.ones(corrupted.hidden_BS.shape)

    def diffusion_count(self, own_BS: torch.Tensor, corrupted: Corrupted) -> float:
        """What the diffusion term of this batch is divided by: the supervised tokens that are hidden."""
        return float(((own_BS != IGNORE_INDEX) & corrupted.hidden_BS).sum())

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """Clean sequence ++ masked copy, the same positions twice, labels where there is a loss.

        Clean position i has the data's label (the next token), masked position i its own token
        where the data supervises it. A term with factor 0 has no labels, so nothing is computed
        for it.
        """
        tokens_BS, positions_BS = inputs["input"], inputs["positions"]
        corrupted = self.corrupt(tokens_BS, positions_BS, generator=generator)
        own_BS = own_token_targets(tokens_BS, labels, positions_BS)
        hidden_own_BS = own_BS.masked_fill(~corrupted.hidden_BS, IGNORE_INDEX)
        wanted = [
            half if factor > 0 else torch.full_like(half, IGNORE_INDEX)
            for half, factor in zip((labels, hidden_own_BS), self.factors, strict=True)
        ]
        labels_BL = torch.cat(wanted, dim=1)
        readout = labelled(labels_BL, multiple=self.multiple)
        zeros_BS, ones_BS = torch.zeros(tokens_BS.shape), torch.ones(tokens_BS.shape)
        weights_BLT = torch.stack(
            [torch.cat([ones_BS, zeros_BS], 1), torch.cat([zeros_BS, self.weights(corrupted)], 1)], dim=-1
        )
        doubled = {
            "input": torch.cat([tokens_BS, corrupted.tokens_BS], dim=1),
            "positions": positions_BS.repeat(1, 2),
            "readout_M": readout.index_M,
            "weights_1MT": weights_BLT.flatten(0, 1)[readout.index_M][None],
        }
        counts = {
            "ar": float((labels != IGNORE_INDEX).sum()),
            "diffusion": self.diffusion_count(own_BS, corrupted),
        }
        return Prepared(doubled, readout.labels_1M, counts)

    def loss(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        *,
        model_inputs: dict[str, Any],
        loss_inputs: dict[str, torch.Tensor],
        counts: dict[str, torch.Tensor],
        loss_fn: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Each term a weighted sum over its tokens divided by its own global count."""
        pred = model(tokens, **model_inputs, readout_M=loss_inputs["readout_M"])
        counts_T = torch.stack([counts[term].clamp(min=1) for term in self.terms])
        loss, metrics = loss_fn(
            pred,
            labels,
            None,
            loss_weights_BLT=loss_inputs["weights_1MT"] / counts_T,
            term_factors=list(self.factors),  # torchtitan cuts tuples into chunks
        )
        named = {f"{self.name}/{term}_loss": metrics[f"term_{t}_mean"] for t, term in enumerate(self.terms)}
        return loss, {k: v for k, v in named.items() if self.factors[self._index(k)] > 0}

    def _index(self, metric: str) -> int:
        return next(t for t, term in enumerate(self.terms) if metric.endswith(f"/{term}_loss"))


# --- model -----------------------------------------------------------------------------


class DoubledBackbone(backbones.Backbone):
    """A causal backbone that is trained on doubled sequences. It has no parameters of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(backbones.Backbone.Config):
        mask_token_id: int
        """Id of the mask token; decoders read it here."""

        block_size: int
        """Tokens of a block in training."""

        mask_layout: masks.MaskLayout = "block"
        """Which blocks of the masked half attend in both directions."""

        clean_attention: masks.CleanLayout = "causal"
        """How the clean half attends to itself."""

        def update_from_config(self, *, config, **kwargs) -> None:
            degree = config.parallelism.pipeline_parallel_degree
            if degree > 1:
                raise UserError(
                    f"[parallelism] pipeline_parallel_degree = {degree} does not work with a doubled "
                    f"sequence ([model] name = {config.model.name!r}; allowed: 1)"
                )
            backbones.Backbone.Config.update_from_config(self, config=config, **kwargs)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs for each data token: two positions, both of which see at most
            the clean sequence, the masked one its block besides."""
            nparams, plain = backbones.Backbone.Config.get_nparams_and_flops(self, model, seq_len)
            scores = 12 * self.size.n_layers * self.size.n_heads * self.size.head_dim
            return nparams, 2 * plain + scores * min(self.block_size, seq_len)

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """The mask of the doubled sequence, in the form the kernel takes; ``positions``: [B, 2S]."""
        config = self.config
        assert isinstance(config, DoubledBackbone.Config)
        mask = masks.doubled_blocks(
            positions,
            block_size=config.block_size,
            layout=config.mask_layout,
            clean=config.clean_attention,
        )
        return build_mask(mask, config.attention)


def check_kernel(attention: str, *, method: str) -> None:
    """Refuse a kernel that cannot hold the doubled mask.

    Errors: UserError for packed attention.
    """
    if attention == "varlen":
        raise UserError(
            f"[model] attention = 'varlen' does not work with [model] name = {method!r}, whose mask is not a "
            "plain document mask (allowed: flex, dense, auto)"
        )
