"""T2MLR: a backbone whose middle layers see the previous token's output of themselves.

Shape suffixes: B = batch, L = sequence length, D = model dimension.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_ext import backbones
from torchtitan_ext.looped import LoopedBackbone, RecurrentCore, check_band
from torchtitan_ext.methods.t2mlr import recurrence
from torchtitan_ext.methods.t2mlr.config import Section
from torchtitan_ext.methods.t2mlr.state_dict_adapter import T2MLRAdapter
from torchtitan_ext.parallelize import parallelize_decoder


class Fusion(Module):
    """Phi of Eq. 2.3 with its parameters. Both gates start at 0, so it starts as the identity."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        f_current: Linear.Config
        """Gate of the current stream: 2D -> D with bias."""

        f_recurrent: Linear.Config
        """Gate of the recurrent stream: 2D -> D with bias."""

        w_recurrent: Linear.Config
        """W_rec: D -> D without bias."""

        gate_features: str
        """"raw" or "projected"."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_features = config.gate_features
        self.f_current = config.f_current.build()
        self.f_recurrent = config.f_recurrent.build()
        self.w_recurrent = config.w_recurrent.build()
        # One element, not a scalar: FSDP2 does not shard 0-dimensional parameters.
        self.g_current = nn.Parameter(torch.empty(1))
        self.g_recurrent = nn.Parameter(torch.empty(1))

    def forward(self, h_BLD: torch.Tensor, recurrent_BLD: torch.Tensor) -> torch.Tensor:
        """Phi(h, R), [B, L, D]."""
        projected_BLD = self.w_recurrent(recurrent_BLD)
        seen_BLD = recurrent_BLD if self.gate_features == "raw" else projected_BLD
        features = torch.cat([h_BLD, seen_BLD], dim=-1)
        return recurrence.fuse(
            h_BLD,
            gate_current=self.g_current,
            gate_recurrent=self.g_recurrent,
            current_logits_BLD=self.f_current(features),
            recurrent_logits_BLD=self.f_recurrent(features),
            projected_BLD=projected_BLD,
        )


class T2MLRCore(RecurrentCore):
    """The recurrent band, trained by truncated Jacobi iteration (Algorithm 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RecurrentCore.Config):
        fusion: Fusion.Config
        forward_depth: int
        backward_depth: int
        cache_norm: str
        temporal_residual: bool
        convergence_tol: float
        sequence_parallel: bool = False
        """Whether hidden states between blocks hold only this rank's part of the sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.fusion = config.fusion.build()
        self.statistics: dict[str, torch.Tensor] = {}
        self.depth = config.forward_depth

    def cache(self, h_end_BLD: torch.Tensor, previous_BLD: torch.Tensor) -> torch.Tensor:
        """The token's own recurrent cache, Eq. 2.4."""
        return recurrence.cache(
            h_end_BLD,
            previous_BLD,
            norm=self.config.cache_norm,
            temporal_residual=self.config.temporal_residual,
        )

    def forward(
        self, h_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Seed pass, iterates, and the last pass, whose output goes on through the coda."""
        assert positions is not None, "document starts are read from positions"
        starts_BL = self._local_starts(positions, h_BLD.shape[1])
        recurrent_BLD = self.iterate(h_BLD, attention_masks, positions, starts_BL)
        return self.run(self.fusion(h_BLD, recurrent_BLD), attention_masks, positions)

    def iterate(
        self,
        h_BLD: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor,
        starts_BL: torch.Tensor,
        *,
        forward_depth: int | None = None,
    ) -> torch.Tensor:
        """R_{D_f} of Algorithm 1: position t holds token t - 1's cache."""
        config = self.config
        depth = self.depth if forward_depth is None else forward_depth
        wanted = torch.is_grad_enabled()
        carries = partial(
            recurrence.carries_gradient,
            forward_depth=depth,
            backward_depth=min(config.backward_depth, depth),
        )
        with torch.set_grad_enabled(wanted and carries(1)):
            # No residual and no norm in the seed.
            seed_BLD = self.run(h_BLD, attention_masks, positions)
            recurrent_BLD = self._shift(seed_BLD, starts_BL)
        used, change = 1, torch.zeros((), device=h_BLD.device)
        first_with_gradient = next((k for k in range(1, depth + 1) if carries(k)), depth + 1)
        k = 2
        while k <= depth:
            with torch.set_grad_enabled(wanted and carries(k)):
                h_end_BLD = self.run(self.fusion(h_BLD, recurrent_BLD), attention_masks, positions)
                new_BLD = self._shift(self.cache(h_end_BLD, recurrent_BLD), starts_BL)
            if config.convergence_tol > 0 or k == depth:  # else nobody asks for it
                change = recurrence.relative_change(new_BLD.detach(), recurrent_BLD.detach())
            recurrent_BLD, used, k = new_BLD, used + 1, k + 1
            if config.convergence_tol > 0 and k < first_with_gradient and self._converged(change):
                k = first_with_gradient
        self._record(used, change)
        return recurrent_BLD

    def _converged(self, change: torch.Tensor) -> bool:
        """Whether the iterates have settled; the ranks of a tensor-parallel group decide together."""
        if spmd_mesh_size("tp") > 1:
            mesh = current_spmd_mesh()
            assert mesh is not None
            dist.all_reduce(change, op=dist.ReduceOp.MAX, group=mesh.get_group("tp"))
        return bool(change < self.config.convergence_tol)

    def _record(self, used: int, change: torch.Tensor) -> None:
        self.statistics = {
            "t2mlr/gate_current/mean": torch.tanh(self.fusion.g_current.detach().float()).squeeze(),
            "t2mlr/gate_recurrent/mean": torch.tanh(self.fusion.g_recurrent.detach().float()).squeeze(),
            "t2mlr/residual/max": change.detach(),
            "t2mlr/iterates/mean": torch.tensor(float(used), device=change.device),
        }

    def _shift(self, x_BLD: torch.Tensor, starts_BL: torch.Tensor) -> torch.Tensor:
        return recurrence.shift_right(x_BLD, starts_BL, before_B1D=self._before(x_BLD))

    def _sharded_over(self) -> Any:
        """The tensor-parallel group that the sequence is sharded over, or None."""
        if not self.config.sequence_parallel or spmd_mesh_size("tp") == 1:
            return None
        mesh = current_spmd_mesh()
        assert mesh is not None
        return mesh.get_group("tp")

    def _before(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The last token of the sequence shard before this rank's, or zeros."""
        group = self._sharded_over()
        if group is None:
            return torch.zeros_like(x_BLD[:, :1])
        rank = dist.get_rank(group)
        lasts_BSD = spmd.redistribute(x_BLD[:, -1:].contiguous(), group, src=spmd.S(1), dst=spmd.R)
        # Rank 0 multiplies by 0 instead of leaving the tensor out: every rank must take part in the
        # backward collective.
        return lasts_BSD[:, rank - 1 : rank if rank else None] * float(rank > 0)

    def _local_starts(self, positions: torch.Tensor, local_length: int) -> torch.Tensor:
        """Document starts of this rank's part of the sequence, [B, L]."""
        starts_BL = positions == 0
        group = self._sharded_over()
        if group is None:
            return starts_BL
        first = dist.get_rank(group) * local_length
        return starts_BL[:, first : first + local_length]


class T2MLR(LoopedBackbone):
    """A backbone with a T2MLR core."""

    @contextlib.contextmanager
    def exact(self, length: int) -> Generator[None]:
        """Iterate deep enough that sequences of ``length`` are the exact recurrence, as in decoding."""
        trained, self.core.depth = self.core.depth, max(length, self.core.depth)
        try:
            yield
        finally:
            self.core.depth = trained

    @dataclass(kw_only=True, slots=True)
    class Config(LoopedBackbone.Config):
        core: T2MLRCore.Config

        def update_from_config(self, *, config, **kwargs) -> None:
            LoopedBackbone.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            sequence_parallel = parallelism.enable_sequence_parallel
            self.core.sequence_parallel = sequence_parallel and parallelism.tensor_parallel_degree > 1
            set_fusion_sharding(self.core.fusion, enable_sp=sequence_parallel)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs a token of the passes that are really run."""
            nparams, baseline = backbones.Backbone.Config.get_nparams_and_flops(self, model, seq_len)
            core: Any = model.core
            layers = sum(p.numel() for p in core.layers.parameters())
            fusion = sum(m.weight.numel() for m in core.fusion.modules() if isinstance(m, nn.Linear))
            # Scores and values of one pass, as torchtitan counts them (no discount for causality).
            scores = 2 * seq_len * self.size.n_heads * self.size.head_dim
            passes = passes_of(self.core.forward_depth, self.core.backward_depth)
            once = 2 * layers + 2 * scores * (self.end - self.start)
            core_flops = once * (passes.core_forward + 2 * passes.core_backward)
            fusion_flops = 2 * fusion * (passes.fusion_forward + 2 * passes.fusion_backward)
            in_baseline = 6 * fusion + 3 * once  # counted there as one forward and one backward
            return nparams, int(baseline - in_baseline + core_flops + fusion_flops)


@dataclass(frozen=True)
class Passes:
    """How often a training step runs the core and the fusion."""

    core_forward: int
    core_backward: int
    fusion_forward: int
    fusion_backward: int


def passes_of(forward_depth: int, backward_depth: int) -> Passes:
    """Passes of Algorithm 1: the seed, D_f - 1 iterates and the last pass, which has gradient."""
    with_gradient = [
        k
        for k in range(1, forward_depth + 1)
        if recurrence.carries_gradient(k, forward_depth=forward_depth, backward_depth=backward_depth)
    ]
    return Passes(
        core_forward=forward_depth + 1,
        core_backward=len(with_gradient) + 1,
        fusion_forward=forward_depth,
        fusion_backward=len([k for k in with_gradient if k > 1]) + 1,  # the seed is not fused
    )


def set_fusion_sharding(fusion: Fusion.Config, *, enable_sp: bool) -> None:
    """Every rank of a tensor-parallel group holds the fusion whole.

    R where each rank sees its part of the sequence (its gradient is then summed
    over the group), I where all see the same tokens: the other choice trains on
    without an error and with a wrong gradient.
    """
    placement = dense_param_placement(tp=spmd.R if enable_sp else spmd.I)
    for linear in (fusion.f_current, fusion.f_recurrent, fusion.w_recurrent):
        states = {"weight": placement, **({"bias": placement} if linear.bias else {})}
        linear.sharding_config = ShardingConfig(state_shardings=states)
    fusion.sharding_config = ShardingConfig(
        state_shardings={"g_current": placement, "g_recurrent": placement}
    )


def fusion_config(dim: int, *, gate_features: str) -> Fusion.Config:
    """Phi for a model dimension: Xavier-normal matrices, zero biases, gates at 0."""
    weight = {"weight": nn.init.xavier_normal_}

    def gate() -> Linear.Config:
        init = {**weight, "bias": nn.init.zeros_}
        return Linear.Config(in_features=2 * dim, out_features=dim, bias=True, param_init=init)

    return Fusion.Config(
        f_current=gate(),
        f_recurrent=gate(),
        w_recurrent=Linear.Config(in_features=dim, out_features=dim, param_init=weight),
        gate_features=gate_features,
        param_init={"g_current": nn.init.zeros_, "g_recurrent": nn.init.zeros_},
    )


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a backbone with its band made recurrent.

    Raises:
        UserError: no band in the section, or a backbone that is not causal.
    """
    section = section or Section()
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="t2mlr")
    start, end = check_band(section.start, section.end, n_layers=size.n_layers, section="t2mlr")
    core = T2MLRCore.Config(
        fusion=fusion_config(size.dim, gate_features=section.gate_features),
        forward_depth=section.forward_depth,
        backward_depth=section.backward_depth,
        cache_norm=section.cache_norm,
        temporal_residual=section.temporal_residual,
        convergence_tol=section.convergence_tol,
    )
    return ModelSpec(
        name="t2mlr",
        flavor=flavor,
        model=T2MLR.Config(
            **backbones.config_fields(size, attention=attention),
            start=start,
            end=end,
            core=core,
            core_sharding=section.core_sharding,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=T2MLRAdapter,
    )
