"""ALoDLM: a backbone whose core is run up to K times, with a gate that lets tokens exit before.

Shape suffixes: B = batch, L = length of both streams, D = model dimension, K = passes,
M = masked tokens, A = clean positions with a label, N = M + A.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_ext import backbones, masks
from torchtitan_ext.attention import build_mask
from torchtitan_ext.doubled import check_kernel
from torchtitan_ext.errors import UserError
from torchtitan_ext.looped import LoopedBackbone, RecurrentCore
from torchtitan_ext.methods.alodlm import stick
from torchtitan_ext.methods.alodlm.config import Section
from torchtitan_ext.methods.alodlm.state_dict_adapter import ALoDLMAdapter
from torchtitan_ext.parallelize import parallelize_decoder

Norm = Callable[[torch.Tensor], torch.Tensor]


class Exits(NamedTuple):
    """What the rollout of a training batch needs beside its tokens."""

    gold_BL: torch.Tensor
    """The tokens without masks: what a token that exits is replaced by."""

    index_M: torch.Tensor
    """Masked slots in the flattened [B * L] positions; position 0, which never is one, fills it up."""

    valid_M: torch.Tensor
    """False where it was filled up."""

    noise_MK: torch.Tensor
    """Uniform numbers that decide the exits."""

    index_A: torch.Tensor
    """Clean positions that are read out."""


class Rollout(NamedTuple):
    """The passes of a training batch."""

    hidden_KND: torch.Tensor
    """Readouts behind the norm, the masked slots first."""

    gate_logits_MK: torch.Tensor
    """The gate's logits, after the exit too, fp32; the last pass's decides nothing."""

    exit_M: torch.Tensor
    """Sampled exit depths, 1 to K."""


class ExitGate(Module):
    """Linear D -> 1 and a bias for each depth. The weight starts at 0: every depth is equally likely."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        passes: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.dim))
        self.depth_bias = nn.Parameter(torch.empty(config.passes))

    def forward(self, readout_MD: torch.Tensor, depth: int) -> torch.Tensor:
        """Logit of leaving at ``depth`` (from 1), fp32 without the last dimension (ALoDLM Eq. 2)."""
        logits_M1 = F.linear(readout_MD.float(), self.weight.float())
        return logits_M1[..., 0] + self.depth_bias[depth - 1].float()


class ALoDLMCore(RecurrentCore):
    """Core and coda. Both run once a pass, so the blocks of both lie in one FSDP unit."""

    @dataclass(kw_only=True, slots=True)
    class Config(RecurrentCore.Config):
        gate: ExitGate.Config
        end: int
        """Block after the last of the core; the coda's follow."""

        passes: int
        feedback: str
        carry_norm: bool
        checkpoint_core: int
        sequence_parallel: bool = False
        """Whether hidden states between blocks hold only this rank's part of the sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.gate = config.gate.build()

    def run(self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None) -> torch.Tensor:
        """One pass through the core's blocks, [B, L, D] -> [B, L, D]."""
        return self._blocks(h_BLD, attention_masks, positions, coda=False)

    def finish(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """The coda's blocks, without the norm, [B, L, D] -> [B, L, D]."""
        return self._blocks(h_BLD, attention_masks, positions, coda=True)

    def _blocks(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None, *, coda: bool
    ) -> torch.Tensor:
        for name, block in self.layers.items():
            if (int(name) >= self.config.end) == coda:
                h_BLD = block(h_BLD, attention_masks, positions)
        return h_BLD

    def carry(self, core_BLD: torch.Tensor, norm: Norm) -> torch.Tensor:
        """What the next pass starts from where nothing was committed."""
        if not self.config.carry_norm:
            return core_BLD
        normed_BLD = norm(core_BLD)
        if spmd_mesh_size("tp") == 1:
            return normed_BLD
        # The norm gathers the sequence for the LM head; between blocks it is as it was before.
        before = spmd.S(1) if self.config.sequence_parallel else spmd.I
        return spmd.redistribute(normed_BLD, _tensor_group(), src=spmd.R, dst=before)

    def forward(  # pyrefly: ignore[bad-override] - a rollout has more inputs and outputs
        self,
        h_BLD: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor | None,
        *,
        norm: Norm,
        gold_BLD: torch.Tensor | None = None,
        exits: Exits | None = None,
    ) -> Rollout | torch.Tensor:
        """All K passes. Without ``exits`` nothing is committed: the last readout, [B, L, D]."""
        if exits is None:
            return self._uncommitted(h_BLD, attention_masks, positions, norm=norm)
        config = self.config
        length = positions.shape[1] if positions is not None else h_BLD.shape[1]
        count = len(exits.index_M)
        index_N = torch.cat([exits.index_M, exits.index_A])
        exit_M = torch.full_like(exits.index_M, config.passes)
        hidden, logits = [], []
        for depth in range(1, config.passes + 1):
            core_BLD = self._pass(h_BLD, attention_masks, positions, depth=depth)
            readout_BLD = norm(self.finish(core_BLD, attention_masks, positions))
            hidden_ND = readout_BLD.flatten(0, 1)[index_N]
            # The gate reads the backbone and does not train it.
            logits_M = self.gate(hidden_ND[:count].detach(), depth)
            hidden.append(hidden_ND)
            logits.append(logits_M)
            if depth == config.passes:
                break
            exit_M = self._sample(exit_M, logits_M.detach(), exits, depth=depth)
            replaced_BL = self._replaced(exit_M, exits, length=length, depth=depth + 1)
            replaced_BL1 = self._local(replaced_BL, h_BLD.shape[1])[..., None]
            assert gold_BLD is not None
            h_BLD = torch.where(replaced_BL1, gold_BLD, self.carry(core_BLD, norm))
        return Rollout(torch.stack(hidden), torch.stack(logits, dim=1), exit_M)

    def _uncommitted(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None, *, norm: Norm
    ) -> torch.Tensor:
        core_BLD = self._pass(h_BLD, attention_masks, positions, depth=1)
        for depth in range(2, self.config.passes + 1):
            core_BLD = self._pass(self.carry(core_BLD, norm), attention_masks, positions, depth=depth)
        return norm(self.finish(core_BLD, attention_masks, positions))

    def _pass(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """The core; every ``checkpoint_core``-th pass is computed again in the backward."""
        every = self.config.checkpoint_core
        if every == 0 or depth % every or not torch.is_grad_enabled():
            return self.run(h_BLD, attention_masks, positions)
        return checkpoint(self.run, h_BLD, attention_masks, positions, use_reentrant=False)

    def _sample(
        self, exit_M: torch.Tensor, logits_M: torch.Tensor, exits: Exits, *, depth: int
    ) -> torch.Tensor:
        """Tokens that have not exited leave with probability lambda."""
        passes = self.config.passes
        leaves_M = exits.noise_MK[:, depth - 1] < stick.hazard(logits_M, depth=depth, passes=passes)
        return torch.where(leaves_M & exits.valid_M & (exit_M == passes), depth, exit_M)

    def _replaced(self, exit_M: torch.Tensor, exits: Exits, *, length: int, depth: int) -> torch.Tensor:
        """Where the input of pass ``depth`` is the gold token's embedding, bool [B, L]."""
        gone_M = exit_M < depth if self.config.feedback == "cumulative" else exit_M == depth - 1
        flat_N = torch.zeros(exits.gold_BL.numel(), dtype=torch.bool, device=exit_M.device)
        return flat_N.index_put((exits.index_M,), gone_M & exits.valid_M).view(-1, length)

    def _local(self, replaced_BL: torch.Tensor, local_length: int) -> torch.Tensor:
        """This rank's part of the sequence."""
        if not self.config.sequence_parallel or spmd_mesh_size("tp") == 1:
            return replaced_BL
        first = dist.get_rank(_tensor_group()) * local_length
        return replaced_BL[:, first : first + local_length]


def _tensor_group() -> dist.ProcessGroup:
    """The tensor-parallel group."""
    mesh = current_spmd_mesh()
    assert mesh is not None
    return mesh.get_group("tp")


class ALoDLM(LoopedBackbone):
    """A causal backbone with a recurrent core, an exit gate and an LM head of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopedBackbone.Config):
        core: ALoDLMCore.Config

        mask_token_id: int
        """Id of the mask token; decoders read it here."""

        block_size: int
        """Tokens of a block in training."""

        passes: int
        """Most passes of the core, K."""

        window: int
        """Decoding, as the knobs below: see the section."""

        tau: float
        q: float
        position_penalty: float
        left1: bool

        def update_from_config(self, *, config, **kwargs) -> None:
            LoopedBackbone.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            sequence_parallel = parallelism.enable_sequence_parallel
            self.core.sequence_parallel = sequence_parallel and parallelism.tensor_parallel_degree > 1
            set_gate_sharding(self.core.gate)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs for each data token: two positions; core, coda and readouts in every
            pass. What checkpointing and the chunks of the loss compute again is not counted."""
            nparams, plain = backbones.Backbone.Config.get_nparams_and_flops(self, model, seq_len)
            core: Any = model.core
            scores = 12 * self.size.n_heads * self.size.head_dim
            looped = len(core.layers)
            once = 6 * sum(p.numel() for p in core.layers.parameters())
            head = 6 * self.size.dim * (self.size.vocab_size + 1)
            again = (self.passes - 1) * (once + looped * scores * seq_len + head)
            blocks = scores * (self.start + self.passes * looped) * min(self.block_size, seq_len)
            return nparams, 2 * (plain + again) + blocks

    def __init__(self, config: Config) -> None:
        if config.enable_weight_tying:
            raise UserError(
                "[model] name = 'alodlm' needs an LM head of its own; this config ties it to the embedding"
            )
        super().__init__(config)
        for i in range(config.end, len(config.layers)):
            self.core.layers[str(i)] = self.layers.pop(str(i))
        self.register_load_state_dict_pre_hook(_coda_as_own_names)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
        readout_M: torch.Tensor | None = None,
        exits: Exits | None = None,
    ) -> Any:
        """With ``exits`` the rollout of a training batch; else logits after K passes, as the backbone's."""
        if exits is None:
            return super().forward(tokens, positions, attention_masks, readout_M)
        h_BLD = self.prelude(tokens, positions, attention_masks)
        gold_BLD = self.tok_embeddings(exits.gold_BL) if self.core.config.passes > 1 else None
        return self.core(h_BLD, attention_masks, positions, norm=self.norm, gold_BLD=gold_BLD, exits=exits)

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any
    ) -> torch.Tensor:
        """The readout of pass K where nothing is committed between the passes, [B, L, D]."""
        h_BLD = self.prelude(tokens, positions, attention_masks)
        return self.core(h_BLD, attention_masks, positions, norm=self.norm)

    def coda(self, h_BLD: torch.Tensor, positions: torch.Tensor | None, attention_masks: Any) -> torch.Tensor:
        """The blocks after the core, and the norm, [B, L, D]."""
        return self.norm(self.core.finish(h_BLD, attention_masks, positions))

    def hazard(self, readout_MD: torch.Tensor, depth: int) -> torch.Tensor:
        """Probability of halting at ``depth`` (from 1), fp32; 1 at the last pass."""
        logits_M = self.core.gate(readout_MD, depth)
        return stick.hazard(logits_M, depth=depth, passes=self.core.config.passes)

    def carry(self, core_BLD: torch.Tensor) -> torch.Tensor:
        """What the next pass starts from at positions that are not committed."""
        return self.core.carry(core_BLD, self.norm)

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """The mask of a dual stream, in the form the kernel takes; ``positions``: [B, 2S]."""
        config = self.config
        assert isinstance(config, ALoDLM.Config)
        return build_mask(masks.dual_stream(positions, block_size=config.block_size), config.attention)


def _coda_as_own_names(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """layers.9.x -> core.layers.9.x for the coda's blocks, as the base does for the core's."""
    for i in range(module.end, len(module.config.layers)):
        theirs = f"{prefix}layers.{i}."
        for key in [key for key in state_dict if key.startswith(theirs)]:
            state_dict[f"{prefix}core.layers.{i}.{key[len(theirs) :]}"] = state_dict.pop(key)


def set_gate_sharding(gate: ExitGate.Config) -> None:
    """Every rank of a tensor-parallel group holds the gate whole.

    I, with sequence parallel too: the gate reads behind the last norm, where every rank has
    the whole sequence, so the ranks' gradients are equal and must not be summed.
    """
    placement = dense_param_placement(tp=spmd.I)
    gate.sharding_config = ShardingConfig(state_shardings={"weight": placement, "depth_bias": placement})


def gate_config(dim: int, *, passes: int) -> ExitGate.Config:
    """A gate with which every exit depth has the same probability."""
    # No function of this one: a model is pickled with its config.
    start = partial(_start_bias, passes=passes)
    return ExitGate.Config(dim=dim, passes=passes, param_init={"weight": nn.init.zeros_, "depth_bias": start})


@torch.no_grad()
def _start_bias(bias_K: torch.Tensor, *, passes: int) -> None:
    bias_K.copy_(stick.first_logits(passes))


def core_config(section: Section, *, dim: int, n_layers: int) -> ALoDLMCore.Config:
    """The core of a section.

    Errors: UserError for a core outside the layers.
    """
    if not 0 <= section.start < section.end <= n_layers:
        raise UserError(
            f"[alodlm] start = {section.start}, end = {section.end} is not a core of layers "
            f"(zero-based, end excluded; allowed: 0 <= start < end <= {n_layers})"
        )
    return ALoDLMCore.Config(
        gate=gate_config(dim, passes=section.passes),
        end=section.end,
        passes=section.passes,
        feedback=section.feedback,
        carry_norm=section.carry_norm,
        checkpoint_core=section.checkpoint_core,
    )


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a causal backbone by flavor, with a core and an LM head of its own.

    Errors: UserError for a core outside the layers, a bidirectional backbone, packed attention, or
    no mask id.
    """
    section = section or Section()
    if section.mask_token_id is None:
        raise UserError(
            "[alodlm] mask_token_id must be given here; only a training run takes it from the tokenizer"
        )
    check_kernel(attention, method="alodlm")
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="alodlm")
    size = dataclasses.replace(size, tied=False)
    core = core_config(section, dim=size.dim, n_layers=size.n_layers)
    knobs = ("start", "end", "core_sharding", "mask_token_id", "block_size", "passes")
    decoding = ("window", "tau", "q", "position_penalty", "left1")
    return ModelSpec(
        name="alodlm",
        flavor=flavor,
        model=ALoDLM.Config(
            **backbones.config_fields(size, attention=attention),
            core=core,
            **{name: getattr(section, name) for name in (*knobs, *decoding)},
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=ALoDLMAdapter,
    )
