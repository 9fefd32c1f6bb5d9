"""The tokenizer of every method: bytes, a Hugging Face folder, or a tiktoken rank file.

``[tokenizer] kind = "auto"`` looks at ``model.hf_assets_path`` and says in the
log what it found.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan_ext.data import chat_templates
from torchtitan_ext.data.tokenizer_cores import ByteCore, Core, HFCore, TiktokenCore
from torchtitan_ext.errors import UserError

# Names of tokens that a vocabulary keeps for uses to come, or that already stand for a mask.
_FREE_TO_USE = re.compile(r"reserved|unused|placeholder|mask|extra_?\d+", re.IGNORECASE)
DEFAULT_MASK_TOKEN = "<|mask|>"
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


def find_tiktoken(path: Path) -> Path | None:
    """The rank file that ``path`` is or holds: ``*.tiktoken`` or Llama's ``tokenizer.model``."""
    if path.is_file():
        return path if path.suffix in (".tiktoken", ".model") else None
    candidates = [
        *sorted(path.glob("*.tiktoken")),
        path / "tokenizer.model",
        path / "original" / "tokenizer.model",
    ]
    return next((c for c in candidates if c.is_file()), None)


def find_hf(path: Path) -> Path | None:
    """The Hugging Face tokenizer folder that ``path`` is (or whose tokenizer.json it is), or None."""
    if path.is_file():
        return path.parent if path.name == "tokenizer.json" else None
    whole = (path / "tokenizer.json").is_file()
    pair = (path / "vocab.json").is_file() and (path / "merges.txt").is_file()
    return path if whole or pair else None


class Tokenizer(BaseTokenizer):
    """Text to ids and back, special ids, and the chat template.

    ``bos_id``, ``eos_id``, ``pad_id``, ``mask_id`` are ints or None;
    ``bos_token`` and the rest are their texts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        kind: Literal["auto", "byte", "hf", "tiktoken"] = "auto"
        """What to read at ``hf_assets_path``; ``auto`` takes what is there, and bytes when nothing is."""

        tiktoken_layout: Literal["auto", "qwen2_5", "qwen3", "llama3"] = "auto"
        """Special tokens after the ranks; ``auto``: ``tokenizer.model`` is Llama 3, other files are Qwen3."""

        mask_token: str | None = None
        """Text of the mask token; a text that the tokenizer lacks is added at ``mask_token_id``, or else
        at the first free id. Empty: the tokenizer's own mask token, if it has one."""

        mask_token_id: int | None = None
        """Id of the mask token; an id that stands for another token is refused."""

        allow_mask_collision: Literal["refuse", "allow"] = "refuse"
        """``allow``: ``mask_token_id`` may be an id that the tokenizer uses for another token."""

    def __init__(self, config: "Tokenizer.Config | None" = None, *, tokenizer_path: str | Path | None = ""):
        super().__init__()
        config = config if config is not None else Tokenizer.Config()
        self.config = config
        self.core = _load_core(config, str(tokenizer_path or ""))
        self.kind = self.core.name.partition(":")[0]
        for role in ("bos", "eos", "pad", "mask"):
            text = self.core.roles[role]
            setattr(self, f"{role}_token", text)
            setattr(self, f"{role}_id", None if text is None else self.core.token_to_id(text))
        self._set_mask()
        self.wants_bos = self.bos_id is not None and self.core.wants_bos is not False
        self.set_chat_template(self.core.chat_template or chat_templates.DEFAULT)

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    mask_token: str | None
    chat_template: str
    """The source of the template in use."""
    bos_id: int | None
    pad_id: int | None
    mask_id: int | None

    def _set_mask(self) -> None:
        """Settle ``mask_id`` from the config and the tokenizer.

        Errors: UserError when the id stands for another token, with the nearest free id.
        """
        text, token_id = self.config.mask_token or None, self.config.mask_token_id
        self._added: dict[str, int] = {}
        if token_id is not None and token_id < 0:
            raise UserError(f"tokenizer.mask_token_id is {token_id}; an id is 0 or more")
        if text is None and token_id is None:
            return
        if text is not None and (known := self.core.token_to_id(text)) is not None:
            if token_id not in (None, known):
                raise UserError(
                    f"tokenizer.mask_token {text!r} has id {known} in {self.core.name}, "
                    f"but tokenizer.mask_token_id is {token_id}"
                )
            self.mask_token, self.mask_id = text, known
            return
        if token_id is None:
            token_id = self._free_id(self.core.vocab_size)
        taken = self.core.id_to_token(token_id)
        if taken is not None and not self._may_be_mask(taken):
            if self.config.allow_mask_collision == "refuse":
                raise UserError(
                    f"tokenizer.mask_token_id {token_id} already stands for {taken!r} in {self.core.name}; "
                    f"the nearest free id is {self._free_id(token_id)}"
                    " (tokenizer.allow_mask_collision = 'allow' takes it anyway)"
                )
            logger.warning(f"Mask id {token_id} also stands for {taken!r} in {self.core.name}")
        self.mask_token, self.mask_id = taken or text or DEFAULT_MASK_TOKEN, token_id
        if taken is None:
            self._added[self.mask_token] = token_id

    def _may_be_mask(self, taken: str) -> bool:
        if taken == self.core.roles["mask"]:
            return True
        return taken in self.core.specials and _FREE_TO_USE.search(taken) is not None

    def _free_id(self, start: int) -> int:
        while self.core.id_to_token(start) is not None:
            start += 1
        return start

    def encode(
        self, text: str, add_bos: bool = False, add_eos: bool = False, *, parse_special: bool = True
    ) -> list[int]:
        """Ids of ``text``, with BOS and EOS where asked for and where the tokenizer has them."""
        ids = self.core.encode(text, parse_special=False) if not parse_special else self._encode_special(text)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def _encode_special(self, text: str) -> list[int]:
        # A mask token that was added here is unknown to the core.
        added = next((t for t in self._added if t in text), None)
        if added is None:
            return self.core.encode(text, parse_special=True)
        ids: list[int] = []
        for i, part in enumerate(text.split(added)):
            if i:
                ids.append(self._added[added])
            ids.extend(self.core.encode(part, parse_special=True))
        return ids

    def encode_documents(
        self, texts: Sequence[str], *, add_bos: bool = False, add_eos: bool = False
    ) -> list[np.ndarray]:
        """Ids of many plain texts (special tokens in them are read as text), int64 arrays."""
        arrays = self.core.encode_many(texts, parse_special=False)
        head = [self.bos_id] if add_bos and self.bos_id is not None else []
        tail = [self.eos_id] if add_eos and self.eos_id is not None else []
        if not head and not tail:
            return arrays
        return [np.concatenate([np.array(head, np.int64), a, np.array(tail, np.int64)]) for a in arrays]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` (a list, array or tensor); ids that the vocabulary lacks are left out."""
        plain = ids.tolist() if hasattr(ids, "tolist") else ids  # pyrefly: ignore
        values = [int(i) for i in plain]
        if not self._added:
            return self.core.decode(values, skip_special=skip_special_tokens)
        if skip_special_tokens:
            hidden = set(self._added.values())
            return self.core.decode([i for i in values if i not in hidden], skip_special=True)
        return self._decode_added(values)

    def _decode_added(self, values: list[int]) -> str:
        names = {i: text for text, i in self._added.items()}
        out, run = [], []
        for i in values:
            if i in names:
                out += [self.core.decode(run, skip_special=False), names[i]]
                run = []
            else:
                run.append(i)
        return "".join([*out, self.core.decode(run, skip_special=False)])

    def get_vocab_size(self) -> int:
        """Largest id plus one, an added mask token included."""
        return max([self.core.vocab_size, *(i + 1 for i in self._added.values())])

    @property
    def vocab_size(self) -> int:
        """The same as :meth:`get_vocab_size`."""
        return self.get_vocab_size()

    @property
    def special_ids(self) -> frozenset[int]:
        """Every id that ``decode`` leaves out."""
        return frozenset([*self.core.specials.values(), *self._added.values()])

    def id_to_token(self, token_id: int) -> str | None:
        """How a token is written; None for a free id."""
        added = {i: text for text, i in self._added.items()}
        return added.get(token_id) or self.core.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as it is written, or None."""
        return self._added.get(token, self.core.token_to_id(token))

    def set_chat_template(self, template: str) -> None:
        """Compile a Jinja template. A broken one is an error where it is used: plain text needs none."""
        # transformers' mark of what the assistant writes; the turns are found without it.
        plain = _GENERATION.sub(lambda tag: f"{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}", template)
        self.chat_template, self._template_fault = template, ""
        try:
            super().set_chat_template(plain)
        except jinja2.TemplateSyntaxError as error:
            self._template_fault = f"line {error.lineno}: {error.message}"

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        """Text of a conversation; ``add_generation_prompt=True`` ends where the assistant begins.

        Errors: UserError for a template that cannot be read.
        """
        if self._template_fault:
            raise UserError(f"{self.core.name}: the chat template cannot be read ({self._template_fault})")
        kwargs.setdefault("add_generation_prompt", False)
        for role in ("bos", "eos", "pad"):
            kwargs.setdefault(f"{role}_token", getattr(self, f"{role}_token") or "")
        for name in ("tools", "documents"):  # transformers says so, and templates ask for it
            kwargs.setdefault(name, None)
        return super().apply_chat_template(messages, **kwargs)


def _load_core(config: Tokenizer.Config, path_text: str) -> Core:
    """The core that the config and the path name; every choice of ``auto`` is logged."""
    path = Path(path_text) if path_text else None
    hf = find_hf(path) if path and path.exists() else None
    ranks = find_tiktoken(path) if path and path.exists() else None
    kind = config.kind
    if kind == "auto":
        kind = "hf" if hf else "tiktoken" if ranks else "byte"
        where = f" at {path_text!r}" if path_text else " (no tokenizer path given)"
        logger.info(f"Tokenizer: {kind}" + (where if kind != "byte" else f", nothing else found{where}"))
    if kind == "byte":
        return ByteCore()
    if path is None or not path.exists():
        raise UserError(
            f"tokenizer.kind = {kind!r} needs a tokenizer path, got {path_text!r} (model.hf_assets_path)"
        )
    if kind == "hf":
        if hf is None:
            raise UserError(f"{path_text!r} holds no tokenizer.json, nor vocab.json with merges.txt")
        return HFCore(hf)
    if ranks is None:
        raise UserError(f"{path_text!r} is or holds no tiktoken rank file (*.tiktoken or tokenizer.model)")
    return TiktokenCore(ranks, layout=config.tiktoken_layout)
