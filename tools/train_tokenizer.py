"""Train a byte-level BPE tokenizer on any data set and write it as a Hugging Face folder.

    python tools/train_tokenizer.py --vocab_size 4096 --out assets/tokenizer
    python tools/train_tokenizer.py --dataset text --dataset_path 'books/*.txt' --vocab_size 8192 --out out

The folder works as ``model.hf_assets_path``. The same data and settings give the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torchtitan_ext  # noqa: F401 - installs the CPU device before torchtitan is imported
from torchtitan_ext import progress
from torchtitan_ext.checkpoint.hf_folder import replaced_folder
from torchtitan_ext.data import chat_templates
from torchtitan_ext.data.config import SourceFields
from torchtitan_ext.data.encoders import text_of
from torchtitan_ext.data.processors import Completion, resolve_processor
from torchtitan_ext.data.registry import Context, build_feed, entry_of
from torchtitan_ext.data.sources import AnySource, Record, StreamedSource
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError, run_cli

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Trained

ROLES = {
    "bos": "<|begin_of_text|>",
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
    "mask": "<|mask|>",
}
SPECIALS = [*ROLES.values(), "<|im_start|>", "<|im_end|>"]
SMALLEST = 256 + len(SPECIALS)


def records_of(source: AnySource) -> Iterator[Record]:
    """Every readable record of a source, in its own order, once."""
    if isinstance(source, StreamedSource):
        reader = source.open(0, 1)
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            yield record
    if source.size is None:
        raise UserError(f"dataset {source.name!r} never ends; a tokenizer needs data with an end")
    for i in range(source.size):
        record = source.read(i)
        if record is not None:
            yield record


def texts_of(
    fields: SourceFields, *, max_documents: int | None, bar: progress.Bar | None = None
) -> Iterator[str]:
    """The plain texts of a data set; of a conversation, what each side says."""
    context = Context(
        tokenizer=Tokenizer.Config(kind="byte").build(tokenizer_path=""),
        seq_len=1,
        seed=0,
        add_bos="never",
        where=fields.dataset,
    )
    chat, source = entry_of(fields).keeps_whole, build_feed(fields, context).source
    bar = bar or progress.Bar(what="", unit="documents", total=None)
    known = [count for count in (source.size, max_documents) if count is not None]
    bar.total = min(known) if known else None
    for record in islice(records_of(source), max_documents):
        bar.advance()
        if not chat or isinstance(record, str):
            yield text_of(record, fields.text_field, where=fields.dataset)
            continue
        conversation = resolve_processor(fields.processor, set(record), where=fields.dataset)(record)
        if isinstance(conversation, Completion):
            yield from conversation
        else:
            yield from (message["content"] for message in conversation)
    bar.turn_to("merging pairs")


def train(texts: Iterator[str], *, vocab_size: int, min_frequency: int) -> Trained:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens, special tokens first.

    Errors: UserError when the vocabulary is too small or there is no text.
    """
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < SMALLEST:
        raise UserError(
            f"--vocab_size is {vocab_size}, expected {SMALLEST} (bytes and special tokens) or more"
        )
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = False

    def watched() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield text

    tokenizer.train_from_iterator(watched(), trainer=trainer)
    if not seen:
        raise UserError("the data set has no text to train on")
    # Of add_bos_token in tokenizer_config.json transformers takes no notice: this puts BOS in front there.
    bos = ROLES["bos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    config: dict[str, Any] = {f"{role}_token": text for role, text in ROLES.items()}
    return {
        **config,
        "additional_special_tokens": [t for t in SPECIALS if t not in ROLES.values()],
        "add_bos_token": True,
        "chat_template": chat_templates.CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_files(tokenizer: Trained, folder: Path) -> None:
    """What a Hugging Face folder has of a tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, sort_keys=True)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = SourceFields()
    parser.add_argument("--out", required=True, help="folder to write; must not exist")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens, special ones included")
    parser.add_argument("--min_frequency", type=int, default=2, help="how often a merged pair must occur")
    parser.add_argument("--max_documents", type=int, help="take only the first documents")
    parser.add_argument("--dataset", default=defaults.dataset, help="stdlib, text, chat, c4, fineweb_edu")
    parser.add_argument("--dataset_path", help="file, glob, folder or hub name")
    parser.add_argument("--subset", help="configuration of a hub data set")
    parser.add_argument("--split", default=defaults.split, choices=("train", "validation", "test"))
    parser.add_argument("--text_field", default=defaults.text_field)
    parser.add_argument("--txt_documents", default="file", choices=("file", "line", "paragraph"))
    parser.add_argument("--processor", default=defaults.processor, help="how a chat record becomes messages")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Train, write, and print the size."""
    args = vars(parser().parse_args(argv))
    out = Path(args.pop("out"))
    vocab_size, min_frequency = args.pop("vocab_size"), args.pop("min_frequency")
    max_documents = args.pop("max_documents")
    if out.exists():
        raise UserError(f"--out {str(out)!r} exists already")
    if min_frequency < 1 or (max_documents is not None and max_documents < 1):
        raise UserError("--min_frequency and --max_documents must be 1 or more")
    # The folder is begun before the work, which may be long.
    with replaced_folder(out, marker="tokenizer.json") as folder:
        with progress.bar("reading", total=None, unit="documents") as bar:
            texts = texts_of(SourceFields(**args), max_documents=max_documents, bar=bar)
            tokenizer = train(texts, vocab_size=vocab_size, min_frequency=min_frequency)
        write_files(tokenizer, folder)
    size = tokenizer.get_vocab_size()
    print(f"{out}: {size} tokens")
    if size < vocab_size:
        print(f"The data has pairs for {size} of the {vocab_size} tokens asked for.")
    return 0


if __name__ == "__main__":
    run_cli(main)
