"""Parameters and FLOPs of a model by part.

FLOPs are those that the trainer divides by for MFU: of each data token, in forward and backward,
without recomputation, and without a discount for causal masks. Their sum is what the model config's
``get_nparams_and_flops`` says; here each is written down on its own, so that the two check each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

BLOCKS, CORE, CODA, NORM = "blocks", "core", "coda", "last norm"
EMBEDDING, HEAD, ADDED, ATTENTION = "embedding", "head", "added by the method", "attention"

Flops = dict[str, int]
"""Part -> FLOPs of a data token."""


# --- parameters ------------------------------------------------------------------------


def part_of(name: str, *, start: int = 0, end: int = -1) -> str:
    """The part that a parameter belongs to. ``start``, ``end``: first block of a core, and the one after."""
    words = name.split(".")
    if words[0] == "tok_embeddings":
        return EMBEDDING
    if words[0] in ("lm_head", "norm"):
        return HEAD if words[0] == "lm_head" else NORM
    if "layers" not in words or "temporal" in words:
        return BLOCKS if words[0] == "rnn" else ADDED
    index = int(words[words.index("layers") + 1])
    if end < 0 or index < start:
        return BLOCKS
    return CORE if index < end else CODA


def parameters(model: Any) -> dict[str, int]:
    """Parameters by part; a head that is tied to the embedding counts as the head alone."""
    band = {"start": model.start, "end": model.end} if hasattr(model, "core") else {}
    tied = getattr(model, "enable_weight_tying", False)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        # A tied weight is listed once, under the name it has first.
        part = HEAD if tied and name == "tok_embeddings.weight" else part_of(name, **band)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def trainable(model: nn.Module) -> int:
    """Parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- FLOPs -----------------------------------------------------------------------------


def flops(method: str, model_config: Any, model: nn.Module, *, seq_len: int) -> Flops:
    """FLOPs of a data token by part."""
    known = _METHODS.get(method)
    if known is None or not hasattr(model_config, "size"):
        if method == "looped":  # the LSTM has no size table
            return _lstm(model_config, model)
        return _of_others(model_config, model, seq_len=seq_len)
    return known(model_config, parameters(model), seq_len, model)


def _pair(config: Any) -> int:
    """FLOPs of one forward and backward of one query and one key in one block, all heads together."""
    return 12 * config.size.n_heads * config.size.head_dim


def _plain(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    blocks = sum(counts.get(part, 0) for part in (BLOCKS, CORE, CODA))
    return {
        BLOCKS: 6 * blocks,
        ATTENTION: _pair(config) * config.size.n_layers * seq_len,
        HEAD: 6 * (counts[HEAD] + counts[NORM]),
    }


def _doubled(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    """Two positions, both of which see at most the clean sequence, the masked one its block besides."""
    parts = {part: 2 * count for part, count in _plain(config, counts, seq_len, model).items()}
    parts[ATTENTION] += _pair(config) * config.size.n_layers * min(config.block_size, seq_len)
    return parts


def _looped(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    if hasattr(config, "pause_tokens"):
        width = 1 + config.pause_tokens
        return {part: width * n for part, n in _plain(config, counts, width * seq_len, model).items()}
    parts = _plain(config, counts, seq_len, model)
    again = config.core.loops - 1
    parts[BLOCKS] += 6 * again * counts[CORE]
    parts[ATTENTION] += _pair(config) * again * (config.end - config.start) * seq_len
    return parts


def _t2mlr(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    """The seed, D_f - 1 iterates and the last pass; D_b of the iterates (the seed is one) have gradient."""
    depth, kept = config.core.forward_depth, config.core.backward_depth
    core = (depth + 1) + 2 * (kept + 1)
    # Every pass but the seed is fused.
    fusion = depth + 2 * (kept + (kept < depth))
    outer = counts.get(BLOCKS, 0) + counts.get(CODA, 0)
    looped = config.end - config.start
    matrices = sum(m.weight.numel() for m in model.core.fusion.modules() if isinstance(m, nn.Linear))
    layers = 3 * (config.size.n_layers - looped) + core * looped
    return {
        BLOCKS: 6 * outer + 2 * core * counts[CORE],
        ATTENTION: _pair(config) // 3 * layers * seq_len,
        HEAD: 6 * (counts[HEAD] + counts[NORM]),
        ADDED: 2 * fusion * matrices + 6 * (counts[ADDED] - matrices),
    }


def _alodlm(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    """Two positions; core, coda, head and gate in each of the K passes."""
    looped, passes = len(model.core.layers), config.passes
    core = counts.get(CORE, 0) + counts.get(CODA, 0)
    layers = config.start + passes * looped
    return {
        BLOCKS: 12 * (counts.get(BLOCKS, 0) + passes * core),
        ATTENTION: _pair(config) * layers * (2 * seq_len + min(config.block_size, seq_len)),
        HEAD: 12 * (counts[NORM] + passes * counts[HEAD]),
        ADDED: 12 * (counts[ADDED] + (passes - 1) * config.size.dim),
    }


def _tdlm(config: Any, counts: dict[str, int], seq_len: int, model: Any) -> Flops:
    """K states; the frozen backbone passes gradients to its inputs alone, above the first module."""
    size, states = config.size, config.states
    feed_forward = 3 * size.dim * size.ffn_dim
    block = 2 * size.dim * size.head_dim * (size.n_heads + size.n_kv_heads) + feed_forward
    above = size.n_layers - 1 - config.temporal[0]
    width = config.heads * config.head_dim
    modules = len(config.temporal) * (24 * size.dim * width + 12 * states * width)
    return {
        BLOCKS: 2 * states * (block * (size.n_layers + above) + feed_forward),
        ATTENTION: states * _pair(config) // 3 * (size.n_layers + 2 * above) * seq_len,
        HEAD: 4 * size.dim * size.vocab_size,
        ADDED: states * (modules - 6 * size.dim * width),
    }


def _lstm(config: Any, model: Any) -> Flops:
    """Matrices alone."""
    return {
        BLOCKS: 6 * sum(p.numel() for p in model.rnn.parameters() if p.ndim == 2),
        HEAD: 6 * model.lm_head.weight.numel(),
    }


def _of_others(config: Any, model: nn.Module, *, seq_len: int) -> Flops:
    """From the config's own total, whose attention alone depends on the sequence length."""
    whole, without = (config.get_nparams_and_flops(model, n)[1] for n in (seq_len, 0))
    counts = parameters(model)
    head = 6 * (counts.get(HEAD, 0) + counts.get(NORM, 0))
    return {BLOCKS: int(without) - head, ATTENTION: int(whole) - int(without), HEAD: head}


_METHODS: dict[str, Callable[[Any, dict[str, int], int, Any], Flops]] = {
    "ar": _plain,
    "mdlm": _plain,
    "tidar": _doubled,
    "block_diffusion": _doubled,
    "wedlm": _doubled,
    "looped": _looped,
    "t2mlr": _t2mlr,
    "alodlm": _alodlm,
    "tdlm": _tdlm,
}
"""Method -> its formula; any other is split with :func:`_of_others`."""
