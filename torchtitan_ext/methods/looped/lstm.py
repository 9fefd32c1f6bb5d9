"""An LSTM language model: the recurrent baseline of the synthetic tasks.

Shape suffixes: B = batch, L = sequence length, D = width, M = all tokens of a batch,
K = layers, S = documents of a batch, P = slots of a row (2L), G = gates of all units, V = vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
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

CLOSED = -1e4
"""Added to a gate's argument it makes the gate zero."""

PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""Of a layer, in the order that the kernel takes them."""


class Steps(NamedTuple):
    """A packed batch as the steps of a recurrence that starts afresh at each document."""

    order_M: torch.Tensor
    """Tokens of the flattened batch by step; within a step, longer documents first."""

    batch_sizes: torch.Tensor
    """How many documents are still running at each step; on the CPU."""


def document_starts(positions_BL: torch.Tensor) -> torch.Tensor:
    """Where a document begins, [B, L]; a row that begins inside a document begins one here."""
    starts_BL = positions_BL == 0
    starts_BL[:, 0] = True
    return starts_BL


def document_steps(positions_BL: torch.Tensor) -> Steps:
    """Order the tokens of a packed batch by their place inside their document.

    Shapes depend on the batch's alone until the last line, whose copy is the only wait for the
    device: the kernel takes the batch sizes from the host.
    """
    starts_M = document_starts(positions_BL).flatten()
    ids_M = torch.cumsum(starts_M, dim=0) - 1
    index_M = torch.arange(ids_M.numel(), device=ids_M.device)
    place_M = index_M - torch.cummax(torch.where(starts_M, index_M, 0), dim=0).values
    ones_M = torch.ones_like(ids_M)
    # As many documents, or steps, as tokens at most; the places of those there are not hold zeros.
    lengths_M = torch.zeros_like(ids_M).scatter_add(0, ids_M, ones_M)
    running_M = torch.zeros_like(ids_M).scatter_add(0, place_M, ones_M)
    rank_M = torch.argsort(torch.argsort(lengths_M, descending=True, stable=True))
    order_M = torch.argsort(place_M * ids_M.numel() + rank_M[ids_M])
    batch_sizes = running_M.cpu()
    return Steps(order_M, batch_sizes[: int(batch_sizes.count_nonzero())])


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

    def forward(self, x_BLD: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
        """Outputs of the last layer, [B, L, D]."""
        if isinstance(x_BLD, FakeTensor):  # it has no numbers to take batch sizes from
            return self.by_rows(x_BLD, positions_BL)
        return self.by_documents(x_BLD, positions_BL)

    def by_documents(self, x_BLD: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
        """All documents side by side: as many steps as the longest has tokens; waits for the device once."""
        steps = document_steps(positions_BL)
        x_MD = x_BLD.flatten(0, 1)
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
        return stepped_MD[back_M].view_as(x_BLD)

    def by_rows(self, x_BLD: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
        """The same with shapes that depend on the batch's alone, in twice the steps of a row.

        A step of its own before each document closes the input, forget and output gates, which
        empties both states: what follows begins as from zeros.
        """
        batch, length, width = x_BLD.shape
        slots_BL = torch.arange(length, device=x_BLD.device) + torch.cumsum(document_starts(positions_BL), 1)
        # Slots that hold no token reset; those before a document are among them, the others come last.
        resets_BP = torch.ones(batch, 2 * length, dtype=x_BLD.dtype, device=x_BLD.device)
        resets_BP1 = resets_BP.scatter(1, slots_BL, 0.0)[..., None]
        slots_BLD = slots_BL[..., None].expand(-1, -1, width)
        h_BPD = x_BLD.new_zeros(batch, 2 * length, width).scatter(1, slots_BLD, x_BLD)
        zeros_1BD = x_BLD.new_zeros(1, batch, width)
        closed_G1 = x_BLD.new_tensor([CLOSED, CLOSED, 0.0, CLOSED]).repeat_interleave(width)[:, None]
        for k in range(self.layers):
            weight, *others = (getattr(self, f"{name}_l{k}") for name in PARAMETERS)
            h_BPD, _, _ = torch.lstm(
                torch.cat([h_BPD, resets_BP1], dim=-1),
                (zeros_1BD, zeros_1BD),
                [torch.cat([weight, closed_G1.to(weight)], dim=1), *others],
                True,  # biases
                1,  # layer
                0.0,  # dropout
                self.training,
                False,  # bidirectional
                True,  # batch first
            )
        return h_BPD.gather(1, slots_BLD)


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
        h_BLD = self.norm(self.rnn(h_BLD, positions))
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
