"""TDLM: a frozen masked diffusion backbone with attention over time in some of its layers.

Shape suffixes: B = trajectories (or batch rows), K = states of each, N = B * K rows, L = sequence
length, D = model dimension, M = heads, H = width of a head, U = H / 2; leading dimensions of
temporal tensors: X, Q, T as in ``temporal``.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_ext import backbones
from torchtitan_ext.decoding.masked_diffusion import Prediction
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.mdlm.config import bidirectional_size_for, resolve_prediction
from torchtitan_ext.methods.mdlm.model import MaskedBackbone
from torchtitan_ext.methods.tdlm import temporal
from torchtitan_ext.methods.tdlm.config import Section, temporal_layers
from torchtitan_ext.methods.tdlm.state_dict_adapter import TDLMAdapter, is_temporal
from torchtitan_ext.parallelize import parallelize_decoder


class History(Protocol):
    """Where a temporal module finds what was before: other states of the batch, or earlier forwards."""

    def take(self, h_BLD: torch.Tensor) -> torch.Tensor:
        """The hidden states that ask and are remembered, [..., D]: "as taken" below is this order."""
        ...

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated by each state's number of revealed tokens; as taken [..., M, H]."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As taken [..., M, H] to [X, Q, M, H]: the states of one position side by side."""
        ...

    def recall(
        self, layer_id: int, k_XQMH: torch.Tensor, v_XQMH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values to retrieve from, [X, T, M, H], and who may see which; the new ones are added."""
        ...

    def scatter(self, z_XQMH: torch.Tensor) -> torch.Tensor:
        """What was retrieved, as taken again [..., M, H], and 0 where nothing is corrected."""
        ...

    def put(self, correction: torch.Tensor, h_BLD: torch.Tensor) -> torch.Tensor:
        """The hidden states with the corrections, as taken [..., D], added, [B, L, D]."""
        ...


class ParallelHistory(NamedTuple):
    """All K states in one forward: each retrieves from those before it (TDLM section 2.3).

    States are taken as they lie, [B, K, L, D]; only what has the width of the heads changes places.
    """

    masked_BLK11: torch.Tensor
    allowed_BLKK: torch.Tensor
    cos_BK1U: torch.Tensor
    sin_BK1U: torch.Tensor

    @classmethod
    def of(
        cls,
        states: temporal.States,
        *,
        head_dim: int,
        window: temporal.Window,
        shift: temporal.Shift,
        part: slice,
    ) -> "ParallelHistory":
        """What every layer needs, for a ``part`` of the sequence."""
        masked_NL = temporal.corrected(states.masked_NL, shift=shift)[:, part]
        masked_BLK = masked_NL.unflatten(0, (-1, states.count)).transpose(1, 2)
        seen_KK = temporal.seen_states(states.count, window=window, device=masked_NL.device)
        cos_NU, sin_NU = temporal.rotation(states.revealed_N, head_dim)
        return cls(
            masked_BLK11=masked_BLK[..., None, None],
            allowed_BLKK=seen_KK & masked_BLK[:, :, None],
            cos_BK1U=cos_NU.unflatten(0, (-1, states.count))[:, :, None],
            sin_BK1U=sin_NU.unflatten(0, (-1, states.count))[:, :, None],
        )

    def take(self, h_BLD: torch.Tensor) -> torch.Tensor:
        return h_BLD.unflatten(0, (-1, self.allowed_BLKK.shape[-1]))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return temporal.rotate(x, self.cos_BK1U, self.sin_BK1U)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    def recall(
        self, layer_id: int, k_XQMH: torch.Tensor, v_XQMH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return k_XQMH, v_XQMH, self.allowed_BLKK

    def scatter(self, z_XQMH: torch.Tensor) -> torch.Tensor:
        # W_O has no bias: a zero here is no correction, at a fraction of the width.
        return torch.where(self.masked_BLK11, z_XQMH, 0).transpose(1, 2)

    def put(self, correction: torch.Tensor, h_BLD: torch.Tensor) -> torch.Tensor:
        return h_BLD + correction.flatten(0, 1)


class TemporalAttention(Module):
    """TempAttn of TDLM Eq. 2 and 7 to 10, for the masked positions of one layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        wq: Linear.Config
        """W_Q: D -> M H without bias."""

        wk: Linear.Config
        """W_K: D -> M H without bias."""

        wv: Linear.Config
        """W_V: D -> M H without bias."""

        wo: Linear.Config
        """W_O: M H -> D without bias; 0 at the start."""

        heads: int
        """M."""

        layer_id: int
        """Index of the layer, under which a memory stores its keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.layer_id = config.heads, config.layer_id
        self.wq, self.wk = config.wq.build(), config.wk.build()
        self.wv, self.wo = config.wv.build(), config.wo.build()
        # One element, not a scalar: FSDP2 does not shard 0-dimensional parameters.
        self.sink = nn.Parameter(torch.empty(1))

    def forward(self, h_BLD: torch.Tensor, history: History) -> torch.Tensor:
        """h + m * TempAttn(h, history), [B, L, D]; keys and values come from h before the correction."""
        taken = history.take(h_BLD)
        q, k, v = (w(taken).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = map(history.gather, (history.turn(q), history.turn(k), v))
        keys, values, allowed = history.recall(self.layer_id, k, v)
        z_XQMH = temporal.attend(q, keys, values, sink_1=self.sink, allowed_XQT=allowed)
        return history.put(self.wo(history.scatter(z_XQMH).flatten(-2)), h_BLD)


class TemporalBlock(backbones.BackboneBlock):
    """A block that consults its positions' history between attention and feed-forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(backbones.BackboneBlock.Config):
        temporal: TemporalAttention.Config
        """The temporal module."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.temporal = config.temporal.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor | None = None,
        history: History | None = None,
    ) -> torch.Tensor:
        """One block; without a history it is the backbone's. [B, L, D] -> [B, L, D]."""
        h_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), attention_masks, positions)
        if history is not None:
            h_BLD = self.temporal(h_BLD, history)
        return h_BLD + self.feed_forward(self.ffn_norm(h_BLD))


class TDLM(MaskedBackbone):
    """A masked diffusion backbone whose temporal modules alone are trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(MaskedBackbone.Config):
        temporal: tuple[int, ...]
        """Layers with a temporal module, ascending."""

        heads: int
        """Heads of a temporal module."""

        head_dim: int
        """Width of a temporal head."""

        window: temporal.Window
        """What is remembered, in training and by default in decoding."""

        shift: temporal.Shift
        """Which hidden states are corrected."""

        tau: float
        """Confidence above which decoding reveals, by default."""

        states: int
        """K, states of a trajectory in a training step."""

        sequence_parallel: bool = False
        """Whether hidden states between blocks hold only this rank's part of the sequence."""

        def update_from_config(self, *, config, **kwargs) -> None:
            MaskedBackbone.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            sequence_parallel = parallelism.enable_sequence_parallel
            self.sequence_parallel = sequence_parallel and parallelism.tensor_parallel_degree > 1
            for i in self.temporal:
                block: Any = self.layers[i]
                set_temporal_sharding(block.temporal, enable_sp=sequence_parallel)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs that a data token costs in all of its K states.

            The frozen backbone has a backward above the first temporal module alone, and there
            only for its inputs; each response token is read out once.
            """
            size, width = self.size, self.heads * self.head_dim
            attention = 2 * size.dim * size.head_dim * (size.n_heads + size.n_kv_heads)
            feed_forward = 3 * size.dim * size.ffn_dim
            scores = 4 * seq_len * size.n_heads * size.head_dim
            block = 2 * (attention + feed_forward) + scores
            above = size.n_layers - 1 - self.temporal[0]
            backward = above * (block + scores) + 2 * feed_forward
            module = 6 * 4 * size.dim * width + 12 * self.states * width
            # The first module's input needs no gradient.
            modules = len(self.temporal) * module - 2 * 3 * size.dim * width
            state = size.n_layers * block + backward + modules
            head = 4 * size.dim * size.vocab_size
            nparams = sum(parameter.numel() for parameter in model.parameters())
            return nparams, self.states * state + head

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.freeze()

    def freeze(self) -> None:
        """Let the temporal modules alone be trained."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_temporal(name))

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self.freeze()  # distributed parameters are new ones

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
        readout_M: torch.Tensor | None = None,
        temporal: "temporal.States | History | None" = None,
    ) -> torch.Tensor:
        """Logits, as :class:`~torchtitan_ext.backbones.Backbone`.

        ``temporal``: the states that the rows are, or a memory of earlier forwards; without it
        the model is its backbone.
        """
        h_BLD = self.hidden(tokens, positions, attention_masks, temporal)
        if readout_M is not None:
            h_BLD = h_BLD.flatten(0, 1)[readout_M][None]
        return h_BLD if self._skip_lm_head or self.lm_head is None else self.lm_head(h_BLD)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        attention_masks: Any,
        temporal: "temporal.States | History | None" = None,
    ) -> torch.Tensor:
        """Everything before the LM head, the norm included, [B, L, D]."""
        h_BLD = self.tok_embeddings(tokens)
        history = self._history(temporal, local_length=h_BLD.shape[1])
        config: Any = self.config
        for i, layer in enumerate(self.layers.values()):
            own = (history,) if i in config.temporal else ()
            h_BLD = layer(h_BLD, attention_masks, positions, *own)
        return self.norm(h_BLD)

    def _history(self, given: Any, *, local_length: int) -> History | None:
        """What the temporal modules are given: states are prepared once for all layers."""
        if not isinstance(given, temporal.States):
            return given
        first = self._rank_in_sequence() * local_length
        config: Any = self.config
        return ParallelHistory.of(
            given,
            head_dim=config.head_dim,
            window=config.window,
            shift=config.shift,
            part=slice(first, first + local_length),
        )

    def _rank_in_sequence(self) -> int:
        """Which part of the sequence this rank's hidden states are."""
        config: Any = self.config
        if not config.sequence_parallel or spmd_mesh_size("tp") == 1:
            return 0
        mesh = current_spmd_mesh()
        assert mesh is not None
        return dist.get_rank(mesh.get_group("tp"))


def set_temporal_sharding(module: TemporalAttention.Config, *, enable_sp: bool) -> None:
    """Every rank of a tensor-parallel group holds the temporal modules whole.

    R where each rank sees its part of the sequence (its gradient is then summed over the group),
    I where all see the same tokens.
    """
    placement = dense_param_placement(tp=spmd.R if enable_sp else spmd.I)
    for linear in (module.wq, module.wk, module.wv, module.wo):
        linear.sharding_config = ShardingConfig(state_shardings={"weight": placement})
    module.sharding_config = ShardingConfig(state_shardings={"sink": placement})


def temporal_config(
    size: backbones.BackboneSize, *, layer_id: int, heads: int, head_dim: int
) -> TemporalAttention.Config:
    """Config of one temporal module: projections as the backbone's, W_O and the sink logit at 0."""
    width = heads * head_dim

    def projection() -> Linear.Config:
        init = {"weight": partial(nn.init.normal_, std=size.init_std)}
        return Linear.Config(in_features=size.dim, out_features=width, param_init=init)

    return TemporalAttention.Config(
        wq=projection(),
        wk=projection(),
        wv=projection(),
        wo=Linear.Config(in_features=width, out_features=size.dim, param_init={"weight": nn.init.zeros_}),
        heads=heads,
        layer_id=layer_id,
        param_init={"sink": nn.init.zeros_},
    )


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a bidirectional backbone with temporal modules.

    Errors: UserError for a causal backbone, for layers that it does not have, or for a correction
    that is moved where nothing is; ValueError without a mask id.
    """
    section = section or Section()
    if section.mask_token_id is None:
        raise ValueError("tdlm.mask_token_id is not settled; models.build_spec does so")
    size = bidirectional_size_for(flavor, method="tdlm", hf_assets_path=hf_assets_path)
    prediction: Prediction = resolve_prediction(section.prediction, family=size.family)
    if section.shift == "moved" and prediction == "own":
        raise UserError(
            "[tdlm] shift = 'moved' needs a model that reads token i at i - 1, but its prediction is 'own' "
            "(allowed: shift = 'literal')"
        )
    chosen = temporal_layers(section, n_layers=size.n_layers)
    fields = backbones.config_fields(size, attention=attention)
    for i in chosen:
        block = fields["layers"][i]
        fields["layers"][i] = TemporalBlock.Config(
            **{field.name: getattr(block, field.name) for field in dataclasses.fields(block)},
            temporal=temporal_config(size, layer_id=i, heads=section.heads, head_dim=section.head_dim),
        )
    return ModelSpec(
        name="tdlm",
        flavor=flavor,
        model=TDLM.Config(
            **fields,
            mask_token_id=section.mask_token_id,
            prediction=prediction,
            block_size=section.block_size,
            temporal=tuple(chosen),
            heads=section.heads,
            head_dim=section.head_dim,
            window=section.window,
            shift=section.shift,
            tau=section.tau,
            states=section.states,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=TDLMAdapter,
    )
