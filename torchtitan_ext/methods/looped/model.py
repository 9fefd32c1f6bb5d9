"""Looped and pause-token backbones, and the choice between all kinds.

Shape suffixes: B = batch, L = sequence length, D = model dimension, N = heads, H = head
dimension, T = slots of a KV cache.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones
from torchtitan_ext.attention import CachedAttention
from torchtitan_ext.attention.dense import LayerCache
from torchtitan_ext.backbones import Backbone, BackboneSize
from torchtitan_ext.errors import UserError
from torchtitan_ext.looped import LoopedBackbone, RecurrentCore, check_band
from torchtitan_ext.methods.looped.config import Section
from torchtitan_ext.methods.looped.lstm import lstm_config
from torchtitan_ext.methods.looped.pause import resolve_pause_id
from torchtitan_ext.parallelize import parallelize_decoder


@dataclass
class _PassCache:
    """A KV cache as one pass of the core sees it: keys and values of its own for every layer."""

    cache: LayerCache
    offset: int

    def update(
        self, layer_id: int, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(layer_id + self.offset, k_BLNH, v_BLNH)


class LoopedCore(RecurrentCore):
    """Blocks that run several times; the output of one pass is the input of the next."""

    @dataclass(kw_only=True, slots=True)
    class Config(RecurrentCore.Config):
        loops: int
        """Passes; all of them carry gradient."""

        n_layers: int
        """Layers of the whole backbone, so that a KV cache files each pass under layers of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loops, self.n_layers = config.loops, config.n_layers

    def forward(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """h <- F_start:end(h), ``loops`` times, [B, L, D]."""
        for index in range(self.loops):
            h_BLD = self.run(h_BLD, self._masks_of(index, attention_masks), positions)
        return h_BLD

    def _masks_of(self, index: int, attention_masks: Any) -> Any:
        if index == 0 or not isinstance(attention_masks, CachedAttention):
            return attention_masks
        own = _PassCache(attention_masks.cache, offset=index * self.n_layers)
        return CachedAttention(own, attention_masks.mask_BQK)


class Looped(LoopedBackbone):
    """A backbone with a band of layers, or all of them, looped."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopedBackbone.Config):
        core: LoopedCore.Config

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs a token with every pass of the core counted."""
            nparams, once = Backbone.Config.get_nparams_and_flops(self, model, seq_len)
            layers = sum(p.numel() for p in model.core.layers.parameters())  # pyrefly: ignore
            scores = 2 * seq_len * self.size.n_heads * self.size.head_dim * (self.end - self.start)
            core = 6 * layers + 6 * scores  # one forward and one backward, as torchtitan counts them
            return nparams, once + (self.core.loops - 1) * core


class PauseBackbone(Backbone):
    """A backbone that sees pause tokens after each token; the objective puts them there."""

    @dataclass(kw_only=True, slots=True)
    class Config(Backbone.Config):
        pause_tokens: int
        """Pause tokens after each token."""

        pause_token_id: int
        """Their id, resolved."""

        def update_from_config(self, *, config, **kwargs) -> None:
            """Take over the run's config; the rotary tables hold the expanded sequence.

            Errors: an expanded sequence longer than the backbone's context, pipeline parallel.
            """
            training = getattr(config, "training", None)
            width = 1 + self.pause_tokens
            if training is not None and training.seq_len * width > self.max_seq_len:
                raise UserError(
                    f"[looped] pause_tokens = {self.pause_tokens} makes [training] seq_len = "
                    f"{training.seq_len} a sequence of {training.seq_len * width} tokens, longer than the "
                    f"{self.max_seq_len} tokens of context of this backbone "
                    f"(allowed: seq_len up to {self.max_seq_len // width})"
                )
            degree = config.parallelism.pipeline_parallel_degree
            if degree > 1:
                raise UserError(
                    f"[parallelism] pipeline_parallel_degree = {degree} does not work with "
                    "pause tokens (allowed: 1)"
                )
            Backbone.Config.update_from_config(self, config=config, **kwargs)
            if training is not None:
                # torchtitan has cut the tables to the data's sequence length.
                for layer in self.layers:
                    layer.attention.rope = dataclasses.replace(
                        layer.attention.rope, max_seq_len=training.seq_len * width
                    )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs a data token: those of all the positions it becomes."""
            width = 1 + self.pause_tokens
            nparams, position = Backbone.Config.get_nparams_and_flops(self, model, seq_len * width)
            return nparams, position * width


def looped_config(section: Section, size: BackboneSize, *, attention: str) -> Looped.Config:
    """Config of the kinds "middle" and "full".

    Raises:
        UserError: no band in the section, or one outside the backbone.
    """
    given = (1, size.n_layers) if section.kind == "full" else (section.start, section.end)
    start, end = check_band(*given, n_layers=size.n_layers, section="looped")
    core = LoopedCore.Config(loops=section.loops, n_layers=size.n_layers)
    return Looped.Config(
        **backbones.config_fields(size, attention=attention),
        start=start,
        end=end,
        core=core,
        core_sharding=section.core_sharding,
    )


def pause_config(section: Section, size: BackboneSize, *, attention: str) -> PauseBackbone.Config:
    """Config of the kind "pause"."""
    return PauseBackbone.Config(
        **backbones.config_fields(size, attention=attention),
        pause_tokens=section.pause_tokens,
        pause_token_id=resolve_pause_id(section.pause_token_id, vocab_size=size.vocab_size),
    )


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of one of the baselines.

    Raises:
        UserError: no band for kind "middle", or a backbone that is not causal.
    """
    section = section or Section()
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="looped")
    model: BaseModel.Config
    if section.kind == "lstm":
        model = lstm_config(section, vocab_size=size.vocab_size)
    elif section.kind == "pause":
        model = pause_config(section, size, attention=attention)
    else:
        model = looped_config(section, size, attention=attention)
    return ModelSpec(
        name="looped",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None if section.kind == "lstm" else backbones.HFAdapter,
    )
