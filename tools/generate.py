"""Continue prompts with a trained model.

    python tools/generate.py outputs/ --prompt "To be" --max-new-tokens 64
    python tools/generate.py HF_DIR --chat --prompt "What is a prime?" --temperature 0.7 --top-p 0.9
    cat prompts.txt | python tools/generate.py outputs/checkpoint/step-1000 --prompts-file - --json
    python tools/generate.py outputs/ --prompt "def " --decode tidar:8
    python tools/generate.py outputs/ --prompt "def " --decode threshold:0.7 --trace trace.png

One prompt is printed while it is generated; several run as a batch. On a terminal the text of
each forward has one colour, and the next forward's another. The answer goes to stdout,
everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext import metrics
from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.chat import render
from torchtitan_ext.decoding import Decoder, Generation, SamplingParams, TextStream, colour
from torchtitan_ext.decoding.choice import chosen_decoder, reports_steps
from torchtitan_ext.decoding.strategies import FORMS, parse
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.evaluation import plots, publish, traces
from torchtitan_ext.evaluation.prompts import read_lines

COUNTED = ("accepted", "revealed")
"""What decoders count in each forward: drafts that held, masks that were filled."""


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
    add("--decode", metavar="STRATEGY", help=f"{', '.join(FORMS)} (default: the method's own decoder)")
    add("--seed", type=int, default=0, help="prompt i draws with seed + i (default: %(default)s)")
    add("--stop", action="append", default=[], help="text that ends an answer and is cut off (repeatable)")
    add("--chat", action="store_true", help="send the prompt as a user message through the chat template")
    add("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: %(default)s)")
    add("--device", help="default: the accelerator where there is one, else cpu")
    add("--batch-size", type=int, default=16, help="prompts that run together (default: %(default)s)")
    add(
        "--colour",
        default="auto",
        help="of each forward's text: auto (default: on a terminal), always, never",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add(
        "--trace",
        type=Path,
        metavar="FILE.png",
        help="draw which forward filled each token, and how sure the model was, for decoders that fill masks "
        "(of mdlm, tdlm, block_diffusion, wedlm, alodlm); of several prompts FILE-1.png, FILE-2.png, ...",
    )
    add(
        "--tensorboard",
        nargs="?",
        const="",
        metavar="DIR",
        help="put the pictures of --trace there too, at the checkpoint's step "
        "(default: the run's own TensorBoard folder)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    """Generate as the command line says."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
    )
    if args.dtype not in DTYPES:
        raise unknown("--dtype", args.dtype, DTYPES)
    if args.colour not in get_args(colour.Colour):
        raise unknown("--colour", args.colour, get_args(colour.Colour))
    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")
    strategy = parse(args.decode) if args.decode is not None else None
    prompts = read_prompts(args.prompt, file=args.prompts_file)
    pictures = trace_files(args, prompts=len(prompts))
    sampling = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    device = usable_device(args.device or default_device())
    loaded = load_model(args.path, dtype=DTYPES[args.dtype], device=device, step=args.step)
    decode = chosen_decoder(strategy, loaded.model, method=loaded.method)
    if pictures:
        what = f"method {loaded.method!r}" if strategy is None else f"decoding strategy {strategy.name!r}"
        first = encode(loaded, prompts[0], chat=args.chat)
        traces.check_traced(decode, loaded.model, first, what=what, bos_id=loaded.tokenizer.bos_id)
        publish.settle(args, loaded)
    answers: list[dict[str, Any]] = []
    for begin in range(0, len(prompts), args.batch_size):
        rows = slice(begin, begin + args.batch_size)
        answers += answer(
            loaded,
            prompts[rows],
            decode=decode,
            args=args,
            sampling=sampling,
            first_row=begin,
            live=len(prompts) == 1,
            pictures=pictures[rows],
        )
    if args.tensorboard is not None:
        step, tags = metrics.step_of(loaded.path) or 0, {f"trace/{path.stem}": path for path in pictures}
        metrics.write_evaluation(args.tensorboard, step=step, scalars={}, pictures=tags)
    if args.json:
        print(json.dumps(answers[0] if len(answers) == 1 else {"results": answers}, ensure_ascii=False))


def read_prompts(given: Sequence[str], *, file: str | None) -> list[str]:
    """Prompts of the command line, then those of the file, one a line; blank lines are skipped."""
    prompts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in given]
    if file is not None:
        prompts += read_lines(file)
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT, --prompts-file FILE, or - for stdin")
    return prompts


def trace_files(args: argparse.Namespace, *, prompts: int) -> list[Path]:
    """The picture of each prompt that --trace asks for, or none.

    Errors: UserError where none can be drawn, before a model is loaded.
    """
    if args.trace is None:
        if args.tensorboard is not None:
            raise UserError("--tensorboard shows the pictures of --trace, which is not given")
        return []
    plots.check_can_draw()
    publish.check_given(args)
    if args.trace.is_dir():
        raise UserError(f"--trace {args.trace} is a folder, expected a file")
    if prompts == 1:
        return [args.trace]
    return [args.trace.with_stem(f"{args.trace.stem}-{i + 1}") for i in range(prompts)]


def encode(loaded: LoadedModel, prompt: str, *, chat: bool) -> list[int]:
    """Ids of a prompt, as the model saw text in training."""
    if not chat:
        return loaded.tokenizer.encode(prompt, add_bos=loaded.add_bos)
    messages = [{"role": "user", "content": prompt}]
    return loaded.tokenizer.encode(render(loaded.tokenizer, messages, prompt=True))


class Row:
    """Text of one prompt while it is generated."""

    def __init__(self, loaded: LoadedModel, stop: Sequence[str], *, coloured: bool) -> None:
        self.stream = TextStream(loaded.tokenizer, stop)
        self.painter = colour.StepPainter(enabled=coloured)
        self.shown = ""
        """What was to be printed so far."""

    def push(self, token: int) -> str:
        """Add a token; what is to be printed now. A character is of the forward that completes it."""
        return self._show(self.stream.push(token))

    def flush(self) -> str:
        """The rest."""
        return self._show(self.stream.flush())

    def _show(self, text: str) -> str:
        piece = self.painter.paint(text)
        self.shown += piece
        return piece


def answer(
    loaded: LoadedModel,
    prompts: list[str],
    *,
    decode: Decoder,
    args: argparse.Namespace,
    sampling: SamplingParams,
    first_row: int,
    live: bool,
    pictures: Sequence[Path],
) -> list[dict[str, Any]]:
    """Generate one batch and print it; ``live``: while it is generated. ``pictures``: of the traces."""
    show, live = not args.json, live and not args.json
    coloured = show and colour.wanted(args.colour, sys.stdout)
    rows = [Row(loaded, args.stop, coloured=coloured) for _ in prompts]
    ending = "\n" if args.chat else ""
    if live:
        print(prompts[0], end=ending, flush=True)
    result = run(
        loaded, prompts, rows, decode=decode, args=args, sampling=sampling, first_row=first_row, live=live
    )
    rests = [row.flush() for row in rows]
    if live:
        print(rests[0], flush=True)
    elif show:
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            print(f"--- {first_row + i + 1}\n{prompt}{ending}{row.shown}", flush=True)
    if show:
        print(costs(result), file=sys.stderr)
    for picture, trace in zip(pictures, result.extra["traces"] if pictures else (), strict=True):
        traces.draw_trace(picture, trace, texts=traces.texts_of(trace, loaded.tokenizer))
    return [record(prompt, rows[i].stream.text, result, i) for i, prompt in enumerate(prompts)]


def run(
    loaded: LoadedModel,
    prompts: list[str],
    rows: Sequence[Row],
    *,
    decode: Decoder,
    args: argparse.Namespace,
    sampling: SamplingParams,
    first_row: int,
    live: bool,
) -> Generation:
    """Decode one batch into its rows."""
    steps = reports_steps(decode, loaded.model)

    def on_step(row: int, count: int) -> None:
        rows[row].painter.step()

    def on_token(row: int, token: int) -> bool:
        if not steps:  # each token has a forward of its own
            rows[row].painter.step()
        piece = rows[row].push(token)
        if live and piece:
            print(piece, end="", flush=True)
        return rows[row].stream.stopped

    options: dict[str, Any] = {"on_step": on_step} if steps else {}
    return decode(
        loaded.model,
        [encode(loaded, prompt, chat=args.chat) for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop_ids=loaded.stop_ids,
        bos_id=loaded.tokenizer.bos_id,
        on_token=on_token,
        seeds=[sampling.seed + first_row + i for i in range(len(prompts))],
        **options,
    )


def record(prompt: str, text: str, result: Generation, row: int) -> dict[str, Any]:
    """One answer; seconds and rate are those of the batch it was part of."""
    one = result[row]
    told: dict[str, Any] = {
        "prompt": prompt,
        "text": text,
        "new_tokens": len(one.new_tokens),
        "finish_reason": one.finish_reason,
        "forwards": one.forwards,
        "tokens_per_forward": round(len(one.new_tokens) / one.forwards, 6),
        "seconds": round(result.seconds, 6),
        "tokens_per_second": round(result.tokens_per_second, 3),
    }
    for name in COUNTED:
        if name in result.extra:
            told[name] = result.extra[name][row]
    if told.get("accepted"):
        told["mean_accepted"] = round(sum(told["accepted"]) / len(told["accepted"]), 6)
    return told


def costs(result: Generation) -> str:
    """What a batch cost, and how many tokens its forwards settled, in one line."""
    text = (
        f"{result.new_tokens} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.1f} tokens/s, "
        f"{result.forwards} forwards, {result.tokens_per_forward:.2f} tokens/forward)"
    )
    for name in COUNTED:
        counts = Counter(count for row in result.extra.get(name, ()) for count in row)
        if counts:
            mean = sum(count * times for count, times in counts.items()) / counts.total()
            shown = ", ".join(f"{count}: {times}" for count, times in sorted(counts.items()))
            text += f"; {name} {mean:.2f} a forward (forwards by number: {shown})"
    return text


if __name__ == "__main__":
    run_cli(main)
