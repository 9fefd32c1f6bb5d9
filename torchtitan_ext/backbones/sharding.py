"""Tensor-parallel placements of a backbone, from torchtitan's own rules for decoders."""

import spmd_types as spmd
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig


def set_block_sharding(block: TransformerBlock.Config, *, enable_sp: bool) -> None:
    """Fill the placements of one block's config.

    ``enable_sp``: hidden states between blocks hold only this rank's part of the sequence.
    """
    attention = block.attention
    assert isinstance(attention, GQAttention.Config) and block.feed_forward is not None
    block.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
    block.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
    set_gqa_attention_sharding(attention, enable_sp=enable_sp)
    set_gqa_inner_attention_local_map(attention.inner_attention)
    if attention.qk_norm is not None:
        attention.qk_norm.sharding_config = _head_norm_config()
    hidden = dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    set_dense_ffn_sharding(block.feed_forward, attn_x_layout=hidden, enable_sp=enable_sp)


def set_backbone_sharding(config: Decoder.Config, *, enable_sp: bool) -> None:
    """Fill the placements of a whole decoder's config."""
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    for block in config.layers:
        set_block_sharding(block, enable_sp=enable_sp)


def set_whole(linear: Linear.Config, *, sum_gradients: bool) -> None:
    """Every rank of a tensor-parallel group holds a matrix that a method adds whole; FSDP shards it.

    ``sum_gradients``: whether a rank's own gradient is a part of the whole, which is so between blocks with
    sequence parallel (a part of the sequence), and always behind the last norm (a part of the vocabulary).
    The wrong choice trains on without an error and with a wrong gradient.
    """
    placement = dense_param_placement(tp=spmd.R if sum_gradients else spmd.I)
    names = ("weight", "bias") if linear.bias else ("weight",)
    linear.sharding_config = ShardingConfig(state_shardings=dict.fromkeys(names, placement))


def _head_norm_config() -> ShardingConfig:
    """A norm within each head: every rank normalises its own heads with the whole weight."""
    heads = dense_activation_placement(tp=spmd.S(2))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": heads},
        in_dst_shardings={"input": heads},
        out_src_shardings=heads,
        out_dst_shardings=heads,
    )
