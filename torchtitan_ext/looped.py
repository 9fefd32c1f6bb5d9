"""Prelude, recurrent core and coda over any backbone.

The blocks of the core live in one module whose forward contains the whole loop:
as one FSDP unit it is gathered once a step however often it runs, and since no
collective lies inside, each rank may leave the loop on its own. State dicts name
the blocks as the plain backbone does ("layers.7..."), so checkpoints and
Hugging Face folders are interchangeable with it.

Shape suffixes: B = batch, L = sequence length, D = model dimension.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.module import Module, ModuleDict

from torchtitan_ext.backbones import Backbone
from torchtitan_ext.errors import UserError

_CORE_BLOCK = re.compile(r"^(.*?)core\.(layers\.\d+\.)")


class RecurrentCore(Module):
    """The blocks that are run more than once. This base runs them once, as the plain backbone does."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        # Filled by LoopedBackbone, which hands over its own blocks.
        self.layers = ModuleDict()

    def run(self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None) -> torch.Tensor:
        """One pass through the blocks, [B, L, D] -> [B, L, D]."""
        for block in self.layers.values():
            h_BLD = block(h_BLD, attention_masks, positions)
        return h_BLD

    def forward(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        return self.run(h_BLD, attention_masks, positions)


class LoopedBackbone(Backbone):
    """A backbone whose blocks ``start`` to ``end - 1`` form a recurrent core."""

    @dataclass(kw_only=True, slots=True)
    class Config(Backbone.Config):
        start: int
        """First block of the core, zero-based."""

        end: int
        """Block after the last of the core."""

        core: RecurrentCore.Config
        """The loop."""

        core_sharding: str = "unit"
        """"unit": the core is one FSDP unit; "layer": each of its blocks is one."""

        def update_from_config(self, *, config, **kwargs) -> None:
            if config.parallelism.pipeline_parallel_degree > 1:
                raise UserError(
                    f"[parallelism] pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree} "
                    "does not work with a recurrent core (allowed: 1)"
                )
            Backbone.Config.update_from_config(self, config=config, **kwargs)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.start, self.end = config.start, config.end
        self.core_sharding = config.core_sharding
        self.core = config.core.build()
        for i in range(config.start, config.end):
            self.core.layers[str(i)] = self.layers.pop(str(i))
        self.register_state_dict_post_hook(_as_backbone_names)
        self.register_load_state_dict_pre_hook(_as_own_names)

    @property
    def containers(self) -> list[Any]:
        """Modules whose ``layers`` are blocks: what checkpointing and compile are applied to."""
        return [self, self.core]

    @staticmethod
    def initial_name(name: str) -> str:
        """The name under which a parameter's initial value is drawn: the plain backbone's."""
        return _CORE_BLOCK.sub(r"\1\2", name)

    def prelude(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any
    ) -> torch.Tensor:
        """Embedding and the blocks before the core, [B, L, D]."""
        h_BLD = self.tok_embeddings(tokens)
        for i in range(self.start):
            h_BLD = self.layers[str(i)](h_BLD, attention_masks, positions)
        return h_BLD

    def coda(self, h_BLD: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any) -> torch.Tensor:
        """The blocks after the core, and the norm, [B, L, D]."""
        for i in range(self.end, len(self.layers) + len(self.core.layers)):
            h_BLD = self.layers[str(i)](h_BLD, attention_masks, positions)
        return self.norm(h_BLD)

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any
    ) -> torch.Tensor:
        """Prelude, core and coda, [B, L, D]."""
        h_BLD = self.prelude(tokens, positions, attention_masks)
        h_BLD = self.core(h_BLD, attention_masks, positions)
        return self.coda(h_BLD, positions, attention_masks)


def _as_backbone_names(module: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """core.layers.7.x -> layers.7.x in a state dict that is being made."""
    own = f"{prefix}core.layers."
    for key in [key for key in state_dict if key.startswith(own)]:
        state_dict[f"{prefix}layers.{key[len(own) :]}"] = state_dict.pop(key)


def _as_own_names(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """layers.7.x -> core.layers.7.x in a state dict that is about to be loaded."""
    for i in range(module.start, module.end):
        theirs = f"{prefix}layers.{i}."
        for key in [key for key in state_dict if key.startswith(theirs)]:
            state_dict[f"{prefix}core.layers.{i}.{key[len(theirs) :]}"] = state_dict.pop(key)


def check_band(start: int, end: int, *, n_layers: int, section: str) -> tuple[int, int]:
    """A band of layers in the papers' notation (1-based, inclusive) as a zero-based half-open range.

    Raises:
        UserError: no band was given, or it is not within the backbone.
    """
    if not 1 <= start <= end <= n_layers:
        raise UserError(
            f"[{section}] start = {start}, end = {end} is not a band of layers "
            f"(1-based, inclusive; allowed: 1 <= start <= end <= {n_layers})"
        )
    return start - 1, end
