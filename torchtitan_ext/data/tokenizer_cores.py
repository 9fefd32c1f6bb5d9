"""What turns text into ids and back: bytes, a ``tokenizers`` file, or tiktoken ranks.

A core knows its vocabulary and special tokens. BOS and EOS policy, the mask
token and chat templates are the business of
:class:`torchtitan_ext.data.tokenizers.Tokenizer`.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_ext.data import chat_templates
from torchtitan_ext.errors import UserError, unknown

ROLES = ("bos", "eos", "pad", "mask")


class Core(ABC):
    """Ids of a text and text of ids.

    ``specials`` maps the text of every special token to its id; ``roles`` maps
    ``bos``, ``eos``, ``pad``, ``mask`` to such a text or None.
    """

    name: str
    specials: dict[str, int]
    roles: dict[str, str | None]
    chat_template: str | None = None
    wants_bos: bool | None = None
    """What the tokenizer's own config says about BOS before a document; None when it says nothing."""
    adds_bos: bool | None = None
    """Whether the tokenizer has BOS before every text; None when there is no telling."""

    @abstractmethod
    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of ``text``; with ``parse_special`` the text of a special token becomes its id."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ``ids``; ids that the vocabulary lacks are left out."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Largest id plus one."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """How the token is written, or None for a free id."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Id of a token as it is written in the vocabulary, or None."""

    def encode_many(self, texts: Sequence[str], *, parse_special: bool) -> list[np.ndarray]:
        """:meth:`encode` of each text, as int64 arrays."""
        return [np.asarray(self.encode(text, parse_special=parse_special), dtype=np.int64) for text in texts]


class ByteCore(Core):
    """UTF-8 bytes 0..255 and four special tokens."""

    BYTES = 256

    def __init__(self) -> None:
        self.name = "byte"
        self.roles = {role: f"<|{role}|>" for role in ROLES}
        self.specials = {f"<|{role}|>": self.BYTES + i for i, role in enumerate(ROLES)}
        self._special_names = {i: text for text, i in self.specials.items()}
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")

    def _array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        if not parse_special or "<|" not in text:
            return self._array(text).tolist()
        ids: list[int] = []
        for part in self._pattern.split(text):
            special = self.specials.get(part)
            ids.extend(self._array(part).tolist() if special is None else [special])
        return ids

    def encode_many(self, texts: Sequence[str], *, parse_special: bool) -> list[np.ndarray]:
        if parse_special:
            return super().encode_many(texts, parse_special=True)
        return [self._array(text).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        chunks = bytearray()
        for i in ids:
            if 0 <= i < self.BYTES:
                chunks.append(i)
            elif not skip_special and i in self._special_names:
                chunks.extend(self._special_names[i].encode())
        return chunks.decode("utf-8", errors="replace")

    @property
    def vocab_size(self) -> int:
        return self.BYTES + len(ROLES)

    def id_to_token(self, token_id: int) -> str | None:
        if 0 <= token_id < self.BYTES:
            return f"<0x{token_id:02X}>"
        return self._special_names.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.specials.get(token)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``, or None when there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


def _token_text(value: Any) -> str | None:
    """A token in any of the shapes that tokenizer_config.json uses: text, AddedToken dict, null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


class HFCore(Core):
    """A Hugging Face tokenizer folder, read with the ``tokenizers`` library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken

        self.folder = folder
        self.name = f"hf:{folder.name}"
        self._tokenizer = self._load()
        self._config: dict[str, Any] = read_json(folder / "tokenizer_config.json") or {}
        if not isinstance(self._config, dict):
            raise UserError(f"{folder / 'tokenizer_config.json'}: expected a JSON object")
        special_map = read_json(folder / "special_tokens_map.json") or {}
        self.roles = {
            role: _token_text(self._config.get(f"{role}_token"))
            or _token_text(special_map.get(f"{role}_token"))
            for role in ROLES
        }
        declared = [t for t in (*self.roles.values(), *self._extra_tokens()) if t is not None]
        missing = [t for t in dict.fromkeys(declared) if self._tokenizer.token_to_id(t) is None]
        self._tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])
        self._roles_from_ids()
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
        for text in self.roles.values():
            if text is not None and (token_id := self._tokenizer.token_to_id(text)) is not None:
                self.specials[text] = token_id
        self.chat_template = self._read_chat_template()
        says_bos = self._config.get("add_bos_token")
        self.wants_bos = says_bos if isinstance(says_bos, bool) else None
        self.adds_bos = self._puts_bos() if self.wants_bos is None else self.wants_bos
        self._special_ids = frozenset(self.specials.values())

    def _puts_bos(self) -> bool:
        """Whether the tokenizer's post-processor puts BOS in front."""
        bos = self.roles["bos"]
        first = self._tokenizer.encode("a", add_special_tokens=True).ids[:1]
        return bos is not None and first == [self._tokenizer.token_to_id(bos)]

    def _load(self):
        from tokenizers import Tokenizer, decoders, pre_tokenizers
        from tokenizers.models import BPE

        single = self.folder / "tokenizer.json"
        vocab, merges = self.folder / "vocab.json", self.folder / "merges.txt"
        try:
            if single.is_file():
                return Tokenizer.from_file(str(single))
            if vocab.is_file() and merges.is_file():
                tokenizer = Tokenizer(BPE.from_file(str(vocab), str(merges)))
                tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
                tokenizer.decoder = decoders.ByteLevel()
                return tokenizer
        except Exception as error:  # the library raises plain Exception for a bad file
            raise UserError(f"{self.folder}: the tokenizer files cannot be read ({error})") from error
        raise UserError(f"{self.folder}: no tokenizer.json, nor vocab.json with merges.txt")

    def _extra_tokens(self) -> Iterable[str]:
        decoder = self._config.get("added_tokens_decoder") or {}
        for token_id in sorted(decoder, key=int):
            entry = decoder[token_id]
            # Ordinary added tokens are in tokenizer.json already; adding them as special would change decode.
            if isinstance(entry, dict) and entry.get("special", True) and _token_text(entry):
                yield str(_token_text(entry))
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = self._config.get(key) or []
            for value in extra.values() if isinstance(extra, dict) else extra:
                if (text := _token_text(value)) is not None:
                    yield text

    def _roles_from_ids(self) -> None:
        """Fill roles that only the model's config names, by id (LLaDA's mask, for one)."""
        configs = [read_json(self.folder / name) or {} for name in ("generation_config.json", "config.json")]
        if "tokenizer_config.json" in {p.name for p in self.folder.iterdir()}:
            # The tokenizer's own word on BOS, EOS and PAD stands, even where it says "none".
            wanted: tuple[str, ...] = tuple(r for r in ROLES if f"{r}_token" not in self._config)
        else:
            wanted = ROLES
        for role in wanted:
            for config in configs:
                token_id = config.get(f"{role}_token_id")
                token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
                if self.roles[role] is None and isinstance(token_id, int):
                    self.roles[role] = self._tokenizer.id_to_token(token_id)

    def _read_chat_template(self) -> str | None:
        jinja = self.folder / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if template is None:
            template = (read_json(self.folder / "chat_template.json") or {}).get("chat_template")
        if isinstance(template, list):
            template = {entry.get("name"): entry.get("template") for entry in template}
        if isinstance(template, dict):
            if "default" not in template:
                raise unknown(f"chat template in {self.folder}", "default", template)
            template = template["default"]
        if template is not None and not isinstance(template, str):
            raise UserError(f"{self.folder}: chat_template has type {type(template).__name__}, expected text")
        return template

    @cached_property
    def _plain(self):
        """A twin that reads the text of special tokens as ordinary text."""
        from tokenizers import Tokenizer

        twin = Tokenizer.from_str(self._tokenizer.to_str())
        twin.encode_special_tokens = True
        return twin

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str], *, parse_special: bool) -> list[np.ndarray]:
        tokenizer = self._tokenizer if parse_special else self._plain
        # The fast variant leaves out character offsets, which nothing here needs.
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int64) for e in encodings]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size]
        if skip_special:
            # Roles may name ordinary vocabulary entries, which the library would not skip.
            known = [i for i in known if i not in self._special_ids]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special)

    @cached_property
    def vocab_size(self) -> int:
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(len(vocab), max(vocab.values(), default=-1) + 1)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


# One alternative per kind of piece: contractions, words, digits, punctuation, line ends, blanks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_5 = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
    *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    *("<tool_call>", "</tool_call>", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad"),
    *("repo_name", "file_sep"),
)
_QWEN3 = (*_QWEN2_5, "<tool_response>", "</tool_response>", "<think>", "</think>")
# Part of the layout, but ordinary text for decode.
_VISIBLE = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
)
_LLAMA3 = (
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"),
    *("finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id"),
    *("eom_id", "eot_id", "python_tag", *(f"reserved_special_token_{i}" for i in range(3, 248))),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen2_5": {
        "extra": _QWEN2_5,
        "digits": r"\p{N}",
        "roles": {"bos": None, "eos": "<|endoftext|>", "pad": "<|endoftext|>", "mask": None},
        "template": chat_templates.CHATML,
        "normal_form": "NFC",
    },
    "llama3": {
        "extra": _LLAMA3,
        "digits": r"\p{N}{1,3}",
        "roles": {
            "bos": "<|begin_of_text|>",
            "eos": "<|end_of_text|>",
            "pad": "<|finetune_right_pad_id|>",
            "mask": None,
        },
        "template": chat_templates.LLAMA3,
        "normal_form": None,
    },
}
LAYOUTS["qwen3"] = {**LAYOUTS["qwen2_5"], "extra": _QWEN3}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Mergeable ranks of a tiktoken file: lines of base64 token and rank, ranks 0..n-1.

    Errors: UserError naming the first broken line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: not a tiktoken rank file (expected 'base64 rank', got {line[:40]!r})"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise UserError(f"{path}: the ranks are not 0..n-1 ({len(ranks)} tokens read)")
    if any(bytes([b]) not in ranks for b in range(256)):
        raise UserError(f"{path}: not every single byte is a token, so some text could not be encoded")
    return ranks


class TiktokenCore(Core):
    """A tiktoken rank file in the layout of Qwen or of Llama 3; special ids follow the ranks."""

    def __init__(self, path: Path, *, layout: str) -> None:
        import tiktoken

        if layout == "auto":
            layout = "llama3" if path.name == "tokenizer.model" else "qwen3"
        if layout not in LAYOUTS:
            raise unknown("tiktoken layout", layout, LAYOUTS)
        chosen = LAYOUTS[layout]
        ranks = read_ranks(path)
        names = [n if n.startswith("<") else f"<|{n}|>" for n in chosen["extra"]]
        placed = {text: len(ranks) + i for i, text in enumerate(names)}
        self.name = f"tiktoken:{layout}"
        self.specials = {text: i for text, i in placed.items() if text not in _VISIBLE}
        self.roles = dict(chosen["roles"])
        self.chat_template = chosen["template"]
        self._normal_form = chosen["normal_form"]
        self._encoding = tiktoken.Encoding(
            layout, pat_str=_SPLIT % chosen["digits"], mergeable_ranks=ranks, special_tokens=placed
        )
        self._placed = placed
        self._placed_names = {i: text for text, i in placed.items()}
        self._special_ids = frozenset(self.specials.values())

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        if self._normal_form:
            text = unicodedata.normalize(self._normal_form, text)
        if parse_special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        skipped = self._special_ids if skip_special else frozenset()
        return self._encoding.decode([i for i in ids if 0 <= i < self.vocab_size and i not in skipped])

    @property
    def vocab_size(self) -> int:
        return self._encoding.n_vocab

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        special = self._placed_names.get(token_id)
        return special or self._encoding.decode_single_token_bytes(token_id).decode("utf-8", errors="replace")

    def token_to_id(self, token: str) -> int | None:
        if token in self._placed:
            return self._placed[token]
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None
