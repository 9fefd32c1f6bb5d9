"""The decoder that all families share, and its config.

Shape suffixes: B = batch, L = sequence length, D = model dimension, V = vocabulary.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.utils import get_dense_model_nparams_and_flops

from torchtitan_ext import masks
from torchtitan_ext.attention import build_mask, inner_attention_config
from torchtitan_ext.backbones.sharding import set_backbone_sharding
from torchtitan_ext.backbones.sizes import BackboneSize
from torchtitan_ext.errors import UserError

AttentionBackend = Literal["dense", "flex", "varlen"]


class BackboneBlock(TransformerBlock):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()
        assert config.feed_forward is not None
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One block; ``attention_masks`` reaches the inner attention unchanged. [B, L, D] -> [B, L, D]."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), attention_masks, positions)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Backbone(Decoder):
    """A decoder of any of the families.

    ``forward(tokens, positions, attention_masks)`` gives logits [B, L, V], or [1, M, V] of
    the positions in ``readout_M`` alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        size: BackboneSize
        """What the sub-configs were built from; conversions read the family and the mask kind here."""

        attention: AttentionBackend
        """Kernel of every block, resolved (never ``auto``)."""

        def update_from_config(self, *, config, **kwargs) -> None:
            """Take over the run's sequence length and parallelism.

            Errors: a sequence longer than the backbone's context, a tensor-parallel degree that
            does not divide the heads, context parallelism with packed attention.
            """
            # slots=True replaces the class, so the zero-argument super() cannot be used here.
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            if parallelism.context_parallel_degree > 1 and self.attention == "varlen":
                raise UserError(
                    f"[parallelism] context_parallel_degree = {parallelism.context_parallel_degree} "
                    "does not work with [model] attention = 'varlen'; use 'flex', or a degree of 1"
                )
            set_backbone_sharding(self, enable_sp=parallelism.enable_sequence_parallel)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs a token of one training pass over ``seq_len`` tokens."""
            return get_dense_model_nparams_and_flops(
                model,
                self.size.n_layers,
                self.size.n_heads,
                2 * self.size.head_dim,
                seq_len,
                enable_weight_tying=self.enable_weight_tying,
            )

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any
    ) -> torch.Tensor:
        """Everything before the LM head, the norm included, [B, L, D]."""
        h_BLD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, attention_masks, positions)
        return self.norm(h_BLD) if self.norm is not None else h_BLD

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
        readout_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, L, V] (hidden states [B, L, D] when the loss applies the head by chunks).

        ``readout_M``: indices into the flattened [B * L] positions; only those pass the LM
        head, and the result is [1, M, V] (or [1, M, D]).
        """
        h_BLD = self.hidden(tokens, positions, attention_masks)
        if readout_M is not None:
            h_BLD = h_BLD.flatten(0, 1)[readout_M][None]
        return h_BLD if self._skip_lm_head or self.lm_head is None else self.lm_head(h_BLD)

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """The family's mask for a packed batch, in the form the kernel takes.

        ``positions``: [B, L], restarting at 0 at each document.
        """
        config = self.config
        assert isinstance(config, Backbone.Config)
        return build_mask(masks.DOCUMENT_MASKS[config.size.attention](positions), config.attention)


def build_block(size: BackboneSize, *, layer_id: int, attention: str, context: int) -> BackboneBlock.Config:
    """Config of one block.

    ``layer_id`` is what a KV cache files the block under; ``context`` bounds the rotary table.
    """
    q_dim, kv_dim = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    std = size.init_std
    residual_std = std / (2 * size.n_layers) ** 0.5
    return BackboneBlock.Config(
        attention_norm=_norm(size.dim, size),
        ffn_norm=_norm(size.dim, size),
        attention=GQAttention.Config(
            dim=size.dim,
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            head_dim=size.head_dim,
            qkv_linear=QKVLinear.Config(
                head_dim=size.head_dim,
                wq=_linear(size.dim, q_dim, std=std, bias=size.qkv_bias),
                wkv=_linear(size.dim, kv_dim, std=std, bias=size.qkv_bias),
            ),
            wo=_linear(q_dim, size.dim, std=residual_std),
            qk_norm=_norm(size.head_dim, size) if size.qk_norm else None,
            inner_attention=inner_attention_config(attention, layer_id),
            rope=CosSinRoPE.Config(dim=size.head_dim, max_seq_len=context, theta=size.rope_theta),
        ),
        feed_forward=FeedForward.Config(
            w1=_linear(size.dim, size.ffn_dim, std=std),
            w2=_linear(size.ffn_dim, size.dim, std=residual_std),
            w3=_linear(size.dim, size.ffn_dim, std=std),
        ),
    )


def root_fields(size: BackboneSize) -> dict[str, Any]:
    """Keyword arguments of ``Decoder.Config`` for everything outside the blocks."""
    init = {"weight": skip_param_init if size.tied else partial(nn.init.normal_, std=size.init_std)}
    return {
        "dim": size.dim,
        "vocab_size": size.vocab_size,
        "tok_embeddings": Embedding.Config(
            num_embeddings=size.vocab_size, embedding_dim=size.dim, param_init=init
        ),
        "norm": _norm(size.dim, size),
        "lm_head": _linear(size.dim, size.vocab_size, std=size.init_std),
        "enable_weight_tying": size.tied,
    }


def build_config(size: BackboneSize, *, attention: str, max_seq_len: int | None = None) -> Backbone.Config:
    """Config of a backbone.

    ``attention``: a resolved backend, ``dense``, ``flex`` or ``varlen``.
    ``max_seq_len``: length of the rotary tables in tokens, the context if None; each block holds
    one, which for 128k tokens and 28 blocks is 3.7 GB, so decoding wants the length it needs.
    """
    context = size.context if max_seq_len is None else max_seq_len
    if context > size.context:
        raise UserError(
            f"max_seq_len {context} is longer than the {size.context} tokens of context of this backbone"
        )
    blocks = [
        build_block(size, layer_id=i, attention=attention, context=context) for i in range(size.n_layers)
    ]
    backend = cast(AttentionBackend, attention)  # build_block has refused any other
    return Backbone.Config(size=size, attention=backend, layers=blocks, **root_fields(size))


def config_fields(size: BackboneSize, *, attention: str) -> dict[str, Any]:
    """Keyword arguments of a backbone's config, for the config of a model that extends it."""
    plain = build_config(size, attention=attention)
    return {field.name: getattr(plain, field.name) for field in fields(plain)}


def _linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Linear.Config:
    init: dict[str, Any] = {"weight": partial(nn.init.normal_, std=std)}
    if bias:
        init["bias"] = nn.init.zeros_
    return Linear.Config(in_features=in_features, out_features=out_features, bias=bias, param_init=init)


def _norm(width: int, size: BackboneSize) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=size.norm_eps, param_init={"weight": nn.init.ones_})
