"""Decoder blocks, sizes, and Hugging Face names of the model families."""

from torchtitan_ext.backbones.adapter import HFAdapter
from torchtitan_ext.backbones.hf_config import (
    causal_size_for,
    hf_config,
    size_for,
    size_from_folder,
    size_from_hf,
)
from torchtitan_ext.backbones.model import (
    Backbone,
    BackboneBlock,
    build_block,
    build_config,
    config_fields,
    root_fields,
)
from torchtitan_ext.backbones.sharding import set_backbone_sharding, set_block_sharding, set_whole
from torchtitan_ext.backbones.sizes import SIZES, BackboneSize, lookup, same_arithmetic

__all__ = [
    "SIZES",
    "Backbone",
    "BackboneBlock",
    "BackboneSize",
    "HFAdapter",
    "build_block",
    "build_config",
    "causal_size_for",
    "config_fields",
    "hf_config",
    "lookup",
    "root_fields",
    "same_arithmetic",
    "set_backbone_sharding",
    "set_block_sharding",
    "set_whole",
    "size_for",
    "size_from_folder",
    "size_from_hf",
]
