"""Continue prompts with a trained model.

    python tools/generate.py outputs/ --prompt "To be" --max-new-tokens 64
    python tools/generate.py HF_DIR --chat --prompt "What is a prime?" --temperature 0.7 --top-p 0.9
    cat prompts.txt | python tools/generate.py outputs/checkpoint/step-1000 --prompts-file - --json

One prompt is printed while it is generated; several run as a batch. The answer goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.decoding import Generation, SamplingParams, TextStream, decoder_for
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, run_cli, unknown


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "path",
        metavar="CKPT_OR_HF_DIR",
        help="step-N, a folder of them, a dump folder, or a Hugging Face folder",
    )
    add("--step", type=int, help="step to load instead of the newest")
    add("--prompt", action="append", default=[], help="a prompt (repeatable); - reads one from stdin")
    add("--prompts-file", help="a file with one prompt a line; - reads stdin")
    add("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    add("--temperature", type=float, default=0.0, help="0 takes the most probable token (default)")
    add("--top-k", type=int, default=0, help="draw from the k most probable tokens; 0 is off (default)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the smallest set of this probability; 1 is off (default)",
    )
    add("--seed", type=int, default=0, help="prompt i draws with seed + i (default: %(default)s)")
    add("--stop", action="append", default=[], help="text that ends an answer and is cut off (repeatable)")
    add("--chat", action="store_true", help="send the prompt as a user message through the chat template")
    add("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: %(default)s)")
    add("--device", help="default: the accelerator where there is one, else cpu")
    add("--batch-size", type=int, default=16, help="prompts that run together (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Generate as the command line says."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
    )
    if args.dtype not in DTYPES:
        raise unknown("--dtype", args.dtype, DTYPES)
    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")
    prompts = read_prompts(args.prompt, file=args.prompts_file)
    sampling = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    device = usable_device(args.device or default_device())
    loaded = load_model(args.path, dtype=DTYPES[args.dtype], device=device, step=args.step)
    answers: list[dict[str, Any]] = []
    for begin in range(0, len(prompts), args.batch_size):
        batch = prompts[begin : begin + args.batch_size]
        answers += answer(
            loaded, batch, args=args, sampling=sampling, first_row=begin, live=len(prompts) == 1
        )
    if args.json:
        print(json.dumps(answers[0] if len(answers) == 1 else {"results": answers}, ensure_ascii=False))


def read_prompts(given: Sequence[str], *, file: str | None) -> list[str]:
    """Prompts of the command line, then those of the file, one a line; blank lines are skipped."""
    prompts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in given]
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--prompts-file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompts-file {file} is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
        prompts += [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT, --prompts-file FILE, or - for stdin")
    return prompts


def encode(loaded: LoadedModel, prompt: str, *, chat: bool) -> list[int]:
    """Ids of a prompt, as the model saw text in training."""
    if not chat:
        return loaded.tokenizer.encode(prompt, add_bos=loaded.add_bos)
    messages = [{"role": "user", "content": prompt}]
    return loaded.tokenizer.encode(loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def answer(
    loaded: LoadedModel,
    prompts: list[str],
    *,
    args: argparse.Namespace,
    sampling: SamplingParams,
    first_row: int,
    live: bool,
) -> list[dict[str, Any]]:
    """Generate one batch and print it; ``live``: while it is generated."""
    streams = [TextStream(loaded.tokenizer, args.stop) for _ in prompts]
    show = not args.json
    if live and show:
        print(prompts[0], end="\n" if args.chat else "", flush=True)

    def on_token(row: int, token: int) -> bool:
        piece = streams[row].push(token)
        if live and show and piece:
            print(piece, end="", flush=True)
        return streams[row].stopped

    result = decoder_for(loaded.method)(
        loaded.model,
        [encode(loaded, prompt, chat=args.chat) for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop_ids=loaded.stop_ids,
        bos_id=loaded.tokenizer.bos_id,
        on_token=on_token,
        seeds=[sampling.seed + first_row + i for i in range(len(prompts))],
    )
    rests = [stream.flush() for stream in streams]
    if show:
        if live:
            print(rests[0], flush=True)
        else:
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                print(
                    f"--- {first_row + i + 1}\n{prompt}{chr(10) if args.chat else ''}{stream.text}",
                    flush=True,
                )
        print(costs(result), file=sys.stderr)
    return [
        record(prompt, stream.text, result, i)
        for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]


def record(prompt: str, text: str, result: Generation, row: int) -> dict[str, Any]:
    """One answer; seconds and rate are those of the batch it was part of."""
    one = result[row]
    return {
        "prompt": prompt,
        "text": text,
        "new_tokens": len(one.new_tokens),
        "finish_reason": one.finish_reason,
        "forwards": one.forwards,
        "seconds": round(result.seconds, 6),
        "tokens_per_second": round(result.tokens_per_second, 3),
    }


def costs(result: Generation) -> str:
    """What a batch cost, in one line."""
    return (
        f"{result.new_tokens} tokens in {result.seconds:.2f} s "
        f"({result.tokens_per_second:.1f} tokens/s, {result.forwards} forwards)"
    )


if __name__ == "__main__":
    run_cli(main)
