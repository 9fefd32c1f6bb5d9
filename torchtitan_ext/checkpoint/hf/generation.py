"""``generate`` by the method's own decoder, with transformers' arguments and result.

Followed: max_new_tokens, max_length, do_sample, temperature, top_k, top_p, eos_token_id, pad_token_id,
bos_token_id, num_return_sequences, return_dict_in_generate, use_cache (which changes nothing), a
streamer for one row; from the call, the generation_config, or the model's own. As in transformers,
nothing given means 20 new tokens, greedy, and sampling draws from the 50 most probable tokens unless
``top_k`` says otherwise. Everything else that would change the result is refused.

``seed``: row r draws with seed + r, as tools/generate.py does; without it the seed comes from torch's
global generator (``set_seed``). ``strategy``: a decoder by name, such as "tidar:8" (decoding.strategies).
The method's own knobs are those of its ``decode``: policy, tau, window, block_size, q, ...
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.generic import ModelOutput

from torchtitan_ext.checkpoint.hf import positions
from torchtitan_ext.decoding.choice import chosen_decoder
from torchtitan_ext.decoding.interface import Decoder, Generation
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.decoding.strategies import parse
from torchtitan_ext.errors import UserError, nearest

DEFAULT_NEW_TOKENS, DEFAULT_TOP_K = 20, 50
"""transformers' defaults."""

_FOLLOWED = frozenset(
    {
        *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "use_cache"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "num_return_sequences", "return_dict_in_generate"),
        *("transformers_version", "disable_compile"),
    }
)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "repetition_penalty", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beam_groups", "remove_invalid_values"), 1),
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
"""Values, beside None, 0, False and nothing, with which an argument does nothing."""

_CALL = ("attention_mask", "streamer", "seed", "strategy")
_OWN = frozenset(
    {"model", "prompts", "max_new_tokens", "sampling", "stop_ids", "bos_id"}
    | {"on_token", "on_step", "max_len", "seeds", "kwargs", "session"}
)
"""Arguments of a decoder that are no knobs."""


@dataclass
class GenerateOutput(ModelOutput):
    """What ``return_dict_in_generate`` gives."""

    sequences: torch.Tensor | None = None
    """Prompts and new tokens, padded, [B, prompt + new]."""

    forwards: int | None = None
    """Forwards of the whole batch."""

    generation: Generation | None = None
    """The decoder's own report."""


def generate(
    model: Any, inputs: torch.Tensor | None, generation_config: GenerationConfig | None, **kwargs: Any
) -> torch.Tensor | GenerateOutput:
    """Prompts and new tokens, int64 [B, prompt + new]; a row that ended is filled up with padding.

    ``attention_mask``: prompts of several lengths are padded on the left.
    Errors: UserError for an argument that would have to be ignored, or prompts that do not fit.
    """
    if "input_ids" in kwargs:
        given = kwargs.pop("input_ids")
        inputs = given if inputs is None else inputs
    call = {name: kwargs.pop(name) for name in _CALL if name in kwargs}
    strategy = call.get("strategy")
    decode = chosen_decoder(parse(strategy) if strategy else None, model.model, method=model.method)
    names = set() if strategy else knobs_of(decode)
    knobs = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    config = _settled(model, generation_config, kwargs, knobs=names)
    if inputs is None:
        inputs = torch.zeros((1, 0), dtype=torch.long, device=model.device)
    if inputs.ndim != 2:
        raise UserError(f"generate takes input_ids [B, L], got shape {list(inputs.shape)}")
    real_BL = _real(inputs, call.get("attention_mask"), config)
    prompts = [row[real].tolist() for row, real in zip(inputs, real_BL, strict=True)]
    copies = config.num_return_sequences or 1
    streamer = _Streamer(call.get("streamer"), rows=len(prompts) * copies)
    streamer.begin(inputs)
    sampling = _sampling(config, seed=call.get("seed"))
    result = decode(
        model.model,
        [prompt for prompt in prompts for _ in range(copies)],
        max_new_tokens=_new_tokens(config, width=inputs.shape[1]),
        sampling=sampling,
        stop_ids=_ids(config.eos_token_id),
        bos_id=config.bos_token_id,
        on_token=streamer.on_token,
        seeds=[sampling.seed + row for row in range(len(prompts) * copies)],
        **knobs,
    )
    streamer.end()
    sequences = _assemble(inputs.repeat_interleave(copies, dim=0), result, config)
    if config.return_dict_in_generate:
        return GenerateOutput(sequences=sequences, forwards=result.forwards, generation=result)
    return sequences


def knobs_of(decode: Decoder) -> set[str]:
    """The names of what a method's decoder takes beside what all take."""
    return set(inspect.signature(decode).parameters) - _OWN


def _settled(
    model: Any, given: GenerationConfig | None, kwargs: dict[str, Any], *, knobs: set[str]
) -> GenerationConfig:
    """The generation config with the call's arguments in it; what is not followed is refused."""
    config = copy.deepcopy(model.generation_config if given is None else given)
    if given is not None:  # as transformers: what it leaves open is the model's
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(model.generation_config, name))
    for name, value in kwargs.items():
        if name in _FOLLOWED or hasattr(config, name):
            setattr(config, name, value)
        elif value is not None and value is not False and value != []:
            allowed = sorted({*knobs, *_FOLLOWED, *_CALL} - {"transformers_version", "disable_compile"})
            raise UserError(
                f"generate of a {model.method} model does not support {name}{nearest(name, allowed)} "
                f"(its decoder's knobs: {', '.join(sorted(knobs)) or 'none'})"
            )
    if "max_new_tokens" in kwargs:
        config.max_length = None
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in _FOLLOWED or not value or value == _NEUTRAL.get(name):
            continue
        raise UserError(f"generate of a {model.method} model does not support {name} = {value!r}")
    return config


def _real(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> torch.Tensor:
    """True at the tokens of the prompts, [B, L]; without a mask, padding at the left is known by its id."""
    pad, stops = config.pad_token_id, _ids(config.eos_token_id)
    if attention_mask is None and isinstance(pad, int) and pad not in stops:
        return (inputs != pad).int().cummax(dim=1).values.bool() if inputs.shape[1] else inputs.bool()
    real_BL = positions.padding_mask(attention_mask, inputs)
    rows = (~real_BL[:, -1:] & real_BL.any(dim=1, keepdim=True)).any(dim=1).nonzero()[:, 0].tolist()
    if rows:
        raise UserError(
            f"attention_mask of row {rows[0]} ends with padding; pad prompts on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return real_BL


def _new_tokens(config: GenerationConfig, *, width: int) -> int:
    """Most new tokens; ``max_length`` counts the prompts' width too."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        return DEFAULT_NEW_TOKENS
    if config.max_length <= width:
        raise UserError(f"max_length = {config.max_length} leaves no room behind prompts of {width} tokens")
    return config.max_length - width


def _sampling(config: GenerationConfig, *, seed: int | None) -> SamplingParams:
    if not config.do_sample:
        return SamplingParams(seed=seed or 0)
    if seed is None:
        seed = int(torch.randint(0, 2**62, ()))
    return SamplingParams(
        temperature=1.0 if config.temperature is None else float(config.temperature),
        top_k=DEFAULT_TOP_K if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else float(config.top_p),
        seed=seed,
    )


def _ids(value: Any) -> frozenset[int]:
    """A token id, several, a tensor of them, or none."""
    if value is None:
        return frozenset()
    values: Sequence[int] = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    return frozenset([values] if isinstance(values, int) else values)


def _assemble(inputs: torch.Tensor, result: Generation, config: GenerationConfig) -> torch.Tensor:
    """The inputs as they came, each row's new tokens, and padding up to the longest."""
    longest = max((len(row.new_tokens) for row in result), default=0)
    pad = config.pad_token_id
    if pad is None:
        pad = min(_ids(config.eos_token_id), default=0)
    new = [[*row.new_tokens, *([pad] * (longest - len(row.new_tokens)))] for row in result]
    new_BN = torch.tensor(new, dtype=torch.long, device=inputs.device).view(len(inputs), longest)
    return torch.cat([inputs, new_BN], dim=1)


class _Streamer:
    """transformers' streamer, which takes one row."""

    def __init__(self, streamer: Any, *, rows: int) -> None:
        if streamer is not None and rows != 1:
            raise UserError(f"a streamer takes one row, got {rows}")
        self.streamer = streamer

    def begin(self, inputs: torch.Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(inputs.cpu())

    def on_token(self, row: int, token: int) -> bool:
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        return False

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()
