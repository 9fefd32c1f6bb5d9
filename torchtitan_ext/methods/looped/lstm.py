"""An LSTM language model: the recurrent baseline of the synthetic tasks.

Shape suffixes: B = batch, L = sequence length, D = width, M = all tokens of a batch,
K = layers, S = documents of a batch, V = vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped.config import Section

GATES = 4
"""Input, forget, cell and output gate, stacked in one matrix as in ``torch.nn.LSTM``."""


class Steps(NamedTuple):
    """A packed batch as the steps of a recurrence that starts afresh at each document."""

    order_M: torch.Tensor
    """Tokens of the flattened batch by step; within a step, longer documents first."""

    batch_sizes: torch.Tensor
    """How many documents are still running at each step; on the CPU."""


def document_steps(positions_BL: torch.Tensor) -> Steps:
    """Order the tokens of a packed batch by their place inside their document.

    A row that begins inside a document begins a document here.
    """
    starts_BL = positions_BL == 0
    starts_BL[:, 0] = True
    starts_M = starts_BL.flatten()
    ids_M = torch.cumsum(starts_M.int(), dim=0) - 1
    first_S = starts_M.nonzero()[:, 0]
    place_M = torch.arange(ids_M.numel(), device=ids_M.device) - first_S[ids_M]
    lengths_S = torch.bincount(ids_M)
    rank_S = torch.argsort(torch.argsort(lengths_S, descending=True, stable=True))
    order_M = torch.argsort(place_M * first_S.numel() + rank_S[ids_M])
    return Steps(order_M, torch.bincount(place_M).cpu())


class LSTMStack(Module):
    """Layers of an LSTM over packed documents; parameters are named and shaped as ``torch.nn.LSTM``'s."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        width: int
        """Of inputs, states and outputs."""

        layers: int
        """Number of layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers, self.width = config.layers, config.width
        for name, shape in parameter_shapes(config.layers, config.width).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x_MD: torch.Tensor, steps: Steps) -> torch.Tensor:
        """Outputs of the last layer for the tokens of a flattened batch, [M, D]."""
        documents = int(steps.batch_sizes[0])
        zeros_KSD = x_MD.new_zeros(self.layers, documents, self.width)
        weights = [getattr(self, name) for name in parameter_shapes(self.layers, self.width)]
        stepped_MD, _, _ = torch.lstm(
            x_MD[steps.order_M],
            steps.batch_sizes,
            (zeros_KSD, zeros_KSD),
            weights,
            True,  # biases
            self.layers,
            0.0,  # dropout
            self.training,
            False,  # bidirectional
        )
        back_M = torch.argsort(steps.order_M)
        return stepped_MD[back_M]


def parameter_shapes(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an LSTM's parameters, in the order that the kernel takes them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(layers):
        for side in ("ih", "hh"):
            shapes[f"weight_{side}_l{k}"] = (GATES * width, width)
        for side in ("ih", "hh"):
            shapes[f"bias_{side}_l{k}"] = (GATES * width,)
    return shapes


class Identity(Module):
    """Stands where a decoder has its norm before the head, which an LSTM does not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LSTMModel(BaseModel):
    """Embedding, LSTM and head; the state is reset at each document's first token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        vocab_size: int
        """Rows of the embedding and of the head, which are not tied."""

        tok_embeddings: Embedding.Config
        """Tokens to vectors."""

        rnn: LSTMStack.Config
        """The recurrence."""

        lm_head: Linear.Config
        """States to logits."""

        @property
        def first_attention(self) -> Any:
            """What the trainer asks for the kind of mask: an attention that needs none."""
            return SimpleNamespace(inner_attention=Module.Config())

        def update_from_config(self, *, config, **kwargs) -> None:
            """Refuse what a recurrence over all tokens does not allow; place every parameter.

            Errors: tensor, pipeline or context parallel.
            """
            for kind in ("tensor", "pipeline", "context"):
                degree = getattr(config.parallelism, f"{kind}_parallel_degree")
                if degree > 1:
                    raise UserError(
                        f"[parallelism] {kind}_parallel_degree = {degree} does not work with "
                        "[looped] kind = 'lstm' (allowed: 1; data parallel works)"
                    )
            whole = dense_param_placement(tp=spmd.R)
            for module in (self.tok_embeddings, self.lm_head):
                module.sharding_config = ShardingConfig(state_shardings={"weight": whole})
            names = parameter_shapes(self.rnn.layers, self.rnn.width)
            self.rnn.sharding_config = ShardingConfig(state_shardings=dict.fromkeys(names, whole))

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs a token of one forward and one backward through the matrices."""
            embedding = self.vocab_size * self.rnn.width
            nparams = sum(p.numel() for p in model.parameters())
            matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - embedding
            return nparams, 6 * matrices

    _skip_lm_head: bool = False
    """Set where the loss applies the head by chunks."""

    enable_weight_tying = False
    """What the shared parallelisation asks of every model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = config.tok_embeddings.build()
        self.rnn = config.rnn.build()
        # The shared parallelisation looks for blocks and a norm; here the recurrence is one unit.
        self.layers = ModuleDict()
        self.norm = Identity.Config().build()
        self.lm_head = config.lm_head.build()

    def get_attention_masks(self, positions: torch.Tensor) -> None:
        """Nothing: the recurrence reads document starts from the positions."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
    ) -> torch.Tensor:
        """Logits [B, L, V] (states [B, L, D] when the loss applies the head by chunks)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        h_BLD = self.tok_embeddings(tokens)
        h_MD = self.rnn(h_BLD.flatten(0, 1), document_steps(positions))
        h_BLD = self.norm(h_MD.view_as(h_BLD))
        return h_BLD if self._skip_lm_head else self.lm_head(h_BLD)


def lstm_config(section: Section, *, vocab_size: int) -> LSTMModel.Config:
    """Config of the kind "lstm"; everything starts as torch's own Embedding, LSTM and Linear do."""
    width, layers = section.lstm_hidden, section.lstm_layers
    uniform = partial(nn.init.uniform_, a=-(width**-0.5), b=width**-0.5)
    return LSTMModel.Config(
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=width, param_init={"weight": nn.init.normal_}
        ),
        rnn=LSTMStack.Config(
            width=width, layers=layers, param_init=dict.fromkeys(parameter_shapes(layers, width), uniform)
        ),
        lm_head=Linear.Config(in_features=width, out_features=vocab_size, param_init={"weight": uniform}),
    )
