"""The lm-eval model ``torchtitan_ext``: a checkpoint of any method, or a Hugging Face folder.

Importing this module registers it (lm-eval 0.4 finds models no other way; ``python -m
torchtitan_ext.evaluation.lm_eval`` imports it and then is ``lm_eval``). Under torchrun every rank
holds the whole model: lm-eval gives rank r every world-size-th document and gathers the results.
"""

from __future__ import annotations

import datetime
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from torchtitan.tools.logging import logger

from torchtitan_ext import progress
from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import CONFIG, LoadedModel, find_folder, load_model
from torchtitan_ext.data import chat
from torchtitan_ext.decoding import SamplingParams, TextStream, decoder_for
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.evaluation import likelihood
from torchtitan_ext.evaluation.decode_options import parse_options
from torchtitan_ext.evaluation.likelihood import Draws, Pair, Recurrence, Score
from torchtitan_ext.evaluation.sweep import method_of

NAME = "torchtitan_ext"

_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("early_stopping", "remove_invalid_values"), False),
    "use_cache": True,
}
"""Arguments of generation that change nothing with these values, which are transformers' defaults, or None.

lm-eval's own model hands whatever a task or --gen_kwargs says to ``generate`` of transformers. Its tasks
use none of these but num_beams.
"""


class Job(NamedTuple):
    """One request of generation."""

    prompt: list[int]
    seed: int


@register_model(NAME)
class ExtLM(TemplateLM):
    """An lm-eval model on top of the project's loader, decoders and likelihoods.

    ``checkpoint``: step-N, a folder of them, a dump folder, or a Hugging Face folder. ``method``:
    refuse a checkpoint of another one. ``add_bos``: whether texts start with BOS; None does as
    training did, and for a Hugging Face folder as its tokenizer does. ``max_length``: a context
    shorter than the model's. ``mc_samples``, ``mc_seed``, ``recurrence``: see
    :mod:`~torchtitan_ext.evaluation.likelihood`. ``seed``: of sampled generations. ``decode``:
    options of the method's decoder as ``key:value;key:value``.
    Errors: UserError for what does not fit together.
    """

    def __init__(
        self,
        checkpoint: str | Path | LoadedModel | None = None,
        *,
        step: int | None = None,
        method: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str = "float32",
        device: str | None = None,
        add_bos: bool | None = None,
        mc_samples: int = 32,
        mc_seed: int = 0,
        recurrence: Recurrence = "exact",
        seed: int = 0,
        decode: str = "",
        **others: Any,
    ) -> None:
        super().__init__()
        if others:
            known = [name for name in inspect.signature(type(self)).parameters if name != "others"]
            raise unknown("key in --model_args", next(iter(others)), known)
        if checkpoint is None:
            raise UserError("--model_args checkpoint=FOLDER is missing")
        if recurrence not in get_args(Recurrence):
            raise unknown("recurrence", recurrence, get_args(Recurrence))
        self.batch_size = _positive("batch_size", batch_size)
        self.draws = Draws(samples=_positive("mc_samples", mc_samples), seed=mc_seed)
        self.recurrence: Recurrence = recurrence
        self.seed = seed
        self.max_gen_toks = _positive("max_gen_toks", max_gen_toks)
        self._join()
        self.loaded = _load(
            checkpoint, step=step, method=method, dtype=dtype, device=self._device_name(device)
        )
        self._device = next(self.loaded.model.parameters()).device
        whole = likelihood.longest(self.loaded.model)
        self.max_length = whole if max_length is None else _positive("max_length", max_length)
        if self.max_length > whole:
            raise UserError(f"max_length is {max_length}, but the model's context has {whole} tokens")
        self.add_bos = self.loaded.add_bos if add_bos is None else add_bos
        self.decode = decoder_for(self.loaded.method)
        self.options = parse_options(decode.replace(";", ",").replace(":", "="), self.decode)
        self._told: set[str] = set()

    # --- ranks -------------------------------------------------------------------------

    def _join(self) -> None:
        """Become a rank of torchrun's world; gloo, since only results travel."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def _device_name(self, given: str | None) -> str:
        # lm-eval says "cuda:0" when its user says nothing.
        name = default_device() if given in (None, "cuda:0") else usable_device(given)
        if self.world_size > 1 and name == "cuda":
            name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return name

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, concatenated along a first dimension."""
        if self.world_size == 1:
            return tensor
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, tensor.cpu())
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])

    # pyrefly: ignore[bad-override] - lm-eval calls it with positional arguments alone
    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every rank's object on rank ``dst``, None elsewhere."""
        if self.world_size == 1:
            return [obj]
        parts: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    # --- text --------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:  # pyrefly: ignore[bad-override]
        """EOS."""
        if self.loaded.tokenizer.eos_id is None:
            raise UserError(f"{self.loaded.path}: the tokenizer has no EOS token, which is needed here")
        return self.loaded.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is conditioned on: BOS, else EOS."""
        bos = self.loaded.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; BOS in front as ``add_bos`` says, unless the text begins with it."""
        tokenizer = self.loaded.tokenizer
        add = self.add_bos if add_special_tokens is None else add_special_tokens and self.add_bos
        if tokenizer.bos_token and string.startswith(tokenizer.bos_token):
            add = False
        return tokenizer.encode(string, add_bos=add)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation.

        Without the assistant's beginning it ends within the last message, as lm-eval means it: with a
        task's gen_prefix, which the model is to go on with.
        Errors: UserError where the template refuses it.
        """
        if add_generation_prompt:
            return chat.render(self.loaded.tokenizer, chat_history, prompt=True)
        return chat.render_open(self.loaded.tokenizer, chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source; lm-eval gives the name that was asked for.

        Errors: UserError for another name than that of the template in use.
        """
        if isinstance(chat_template, str) and chat_template not in ("", "default"):
            raise UserError(f"--apply_chat_template {chat_template}: only the default template is used")
        return (self.loaded.tokenizer.core.chat_template or "") if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """What tells the requests of one tokenizer from those of another."""
        return f"{self.loaded.path}".replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the results say about the model."""
        return {
            "checkpoint": str(self.loaded.path),
            "method": self.loaded.method,
            "flavor": self.loaded.flavor,
            "likelihood": likelihood.kind_of(self.loaded.model),
            "mc_samples": self.draws.samples,
            "mc_seed": self.draws.seed,
        }

    # --- likelihood --------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding says so) of each request, in their order."""
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        found = self._scores(pairs, quiet=disable_tqdm)
        for (key, *_), score in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, tuple(score))
        return [tuple(score) for score in found]

    def _scores(self, pairs: Sequence[Pair], *, quiet: bool) -> list[Score]:
        estimated = likelihood.kind_of(self.loaded.model) != "causal"
        if estimated:
            self._once(
                f"{self.loaded.method}: likelihoods are Monte Carlo estimates of a bound "
                f"(mc_samples = {self.draws.samples}); whether greedy decoding agrees is reported as False"
            )
        rows = len(pairs) * (self.draws.samples if estimated else 1)
        with progress.bar("" if quiet else "likelihood", total=rows, unit="rows") as bar:
            return likelihood.scores(
                self.loaded.model,
                pairs,
                method=self.loaded.method,
                batch_size=self.batch_size,
                draws=self.draws,
                recurrence=self.recurrence,
                on_rows=bar.advance,
            )

    @property
    def _room(self) -> int:
        """Tokens of a pair: a causal forward does not need the last one."""
        return self.max_length + (likelihood.kind_of(self.loaded.model) == "causal")

    def _fitted(self, context: list[int], continuation: list[int]) -> Pair:
        """Without what does not fit on the left."""
        over = len(context) + len(continuation) - self._room
        if over <= 0:
            return Pair(context, continuation)
        if over >= len(context):
            raise UserError(
                f"a continuation of {len(continuation)} tokens leaves no room for its context in the "
                f"model's {self.max_length} tokens"
            )
        self._once(f"contexts longer than the model's {self.max_length} tokens are cut on the left")
        return Pair(context[over:], continuation)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows as lm-eval cuts them."""
        windows, counts = [], []
        for request in requests:
            (text,) = request.args
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._room - 1,
                context_len=1,
            )
            pairs = [Pair(*utils.make_disjoint_window(window)) for window in cut]
            windows += pairs
            counts.append(len(pairs))
        nats = iter([score.nats for score in self._scores(windows, quiet=disable_tqdm)])
        totals = [sum(next(nats) for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- generation --------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations by the method's decoder, up to a stop string or EOS, in the order of the requests."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        texts: list[str | None] = [None] * len(requests)
        drawn: dict[tuple[int, ...], int] = {}
        with progress.bar("" if disable_tqdm else "generate", total=len(requests), unit="requests") as bar:
            for members in groups.values():
                plan = self._plan(requests[members[0]].args[1])
                jobs = {i: self._job(requests[i].args[0], plan, drawn) for i in members}
                order = sorted(members, key=lambda i: -len(jobs[i].prompt))
                for begin in range(0, len(order), self.batch_size):
                    batch = order[begin : begin + self.batch_size]
                    said, tokens = self._generate([jobs[i] for i in batch], plan)
                    for i, text in zip(batch, said, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.advance(len(batch), tokens=tokens)
        return [text for text in texts if text is not None]

    def _plan(self, given: dict[str, Any]) -> _Plan:
        """What generation arguments mean.

        Errors: UserError for one that is not known, and for more new tokens than the context has.
        """
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        until, most = kwargs.pop("until", None) or [], kwargs.pop("max_gen_toks")
        if most >= self.max_length:
            raise UserError(f"max_gen_toks is {most}, but the model's context has {self.max_length} tokens")
        sampled = bool(kwargs.pop("do_sample", False))
        if sampled and kwargs.get("temperature") == 0:
            raise UserError(
                "generation arguments do_sample = True and temperature = 0 contradict each other "
                "(allowed: a temperature above 0, or do_sample = False)"
            )
        temperature = float(kwargs.pop("temperature", 0.0) or 0.0)
        sampling = SamplingParams(
            temperature=(temperature or 1.0) if sampled else 0.0,
            top_k=int(kwargs.pop("top_k", 0) or 0),
            top_p=float(kwargs.pop("top_p", 1.0) or 1.0),
            seed=self.seed,
        )
        for name, value in kwargs.items():
            if name not in _NEUTRAL or value not in (None, _NEUTRAL[name]):
                allowed = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
                raise UserError(f"generation argument {name} = {value!r} (allowed: {', '.join(allowed)})")
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        return _Plan(stop, most, sampling)

    def _job(self, context: str, plan: _Plan, drawn: dict[tuple[int, ...], int]) -> Job:
        """The prompt cut on the left, and a seed that depends on it and on how often it came before."""
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        room = self.max_length - plan.most
        if len(prompt) > room:
            self._once(f"prompts longer than {room} tokens are cut on the left")
            prompt = prompt[-room:]
        key = tuple(prompt)
        times = drawn[key] = drawn.get(key, -1) + 1
        generator = likelihood.generator_for((*key, times), seed=self.seed)
        return Job(prompt, int(torch.randint(2**62, (), generator=generator)))

    def _generate(self, jobs: Sequence[Job], plan: _Plan) -> tuple[list[str], int]:
        """The texts, and their number of tokens."""
        streams = [TextStream(self.loaded.tokenizer, plan.stop) for _ in jobs]

        def on_token(row: int, token: int) -> bool:
            streams[row].push(token)
            return streams[row].stopped

        generation = self.decode(
            self.loaded.model,
            [job.prompt for job in jobs],
            max_new_tokens=plan.most,
            sampling=plan.sampling,
            stop_ids=self.loaded.stop_ids,
            bos_id=self.loaded.tokenizer.bos_id,
            on_token=on_token,
            seeds=[job.seed for job in jobs],
            **self.options,
        )
        assert len(generation) == len(jobs)
        return [stream.text for stream in streams], generation.new_tokens

    def _once(self, message: str) -> None:
        """Warn, but not again."""
        if message not in self._told and self.rank == 0:
            logger.warning(message)
        self._told.add(message)


class _Plan(NamedTuple):
    """How a group of requests is generated."""

    stop: list[str]
    most: int
    sampling: SamplingParams


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number


def _load(
    checkpoint: str | Path | LoadedModel, *, step: int | None, method: str | None, dtype: str, device: str
) -> LoadedModel:
    """The model. Errors: UserError for one of another method than asked for, before its weights are read."""
    if isinstance(checkpoint, LoadedModel):
        found, loaded = checkpoint.method, checkpoint
        folder = checkpoint.path
    else:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        folder = find_folder(Path(checkpoint).expanduser(), step=step)
        found, loaded = (method_of(folder) if (folder / CONFIG).is_file() else None), None
    if loaded is None and (method is None or found in (None, method)):
        loaded = load_model(folder, dtype=DTYPES[dtype], device=device)
        found = loaded.method
    if method is not None and found != method:
        raise UserError(f"{folder} is a checkpoint of method {found!r}, not of {method!r}")
    assert loaded is not None
    return loaded
