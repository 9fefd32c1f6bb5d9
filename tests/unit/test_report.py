"""tools/compare.py report: what is read, what the page says, and that it is whole and safe."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tools import compare
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.report import charts, command, evaluations, events, measures, page
from torchtitan_ext.evaluation.report.runs import LOSS, TOKENS, read_runs, short_names

EVIL = '<script>alert("x")</script> | `a` & *b* $c$ http://example.org/'
VOID = {"meta", "img", "wbr", "link", "br", "hr", "input"}


def write_events(folder: Path, scalars: dict[str, dict[int, float]], *, start: float = 1000.0) -> Path:
    """One event file, as one start of a run writes it; a value is logged a second after the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    writer = EventFileWriter(str(folder), filename_suffix=f".{start:.0f}")
    for tag, values in scalars.items():
        for i, (step, value) in enumerate(values.items()):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=start + i, step=step, summary=summary))
    writer.close()
    (path,) = set(folder.iterdir()) - before
    return path


def png(width: int = 2) -> bytes:
    """A white picture of one line."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" + b"\xff" * width))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def write_image(folder: Path, tag: str, *, step: int) -> None:
    """An event file with two pictures of a tag, the later one last."""
    writer = EventFileWriter(str(folder))
    for width, time in ((2, 6000.0), (3, 6001.0)):
        image = Summary.Image(width=width, height=1, colorspace=3, encoded_image_string=png(width))
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        writer.add_event(Event(wall_time=time, step=step, summary=summary))
    writer.close()


def make_run(folder: Path, *, method: str = "ar", seed: int = 0, description: str = "tiny") -> Path:
    """A dump folder without curves."""
    folder.mkdir(parents=True)
    job = f"[job]\ndump_folder = {json.dumps(str(folder))}\ndescription = {json.dumps(description)}\n"
    model = f'[model]\nname = "{method}"\nflavor = "smollm2-debug"\n'
    rest = '[metrics]\nsave_tb_folder = "tb"\n[debug]\nseed = '
    (folder / "config.toml").write_text(f"{job}{model}{rest}{seed}\n")
    note = {"step": 40, "seconds": 75.25, "ranks": 2, "tokens_seen_by_rank_0": 100}
    (folder / "run.json").write_text(json.dumps(note))
    return folder


def lengths(folder: Path, *, accuracy: float, samples: int = 32) -> dict:
    """What tools/evaluate.py --task --json prints."""
    rows = [
        {"length": n, "samples": samples, "token_accuracy": accuracy, "exact_match": accuracy / n,
         "answer_accuracy": None, "trained": n < 3}
        for n in (2, 3)
    ]  # fmt: skip
    return {
        "checkpoint": str(folder / "checkpoint/step-40"), "method": "ar", "task": "chain_sum",
        "knobs": {"chains": 3}, "trained_maximum": 2, "seed": 0, "decode_options": {}, "results": rows,
    }  # fmt: skip


def benchmarks(folder: Path, *, value: float, stderr: float | None, samples: int) -> dict:
    """What tools/evaluate.py --tasks --json prints."""
    row = {"task": "piqa", "metric": "acc", "value": value, "stderr": stderr, "samples": samples, "shots": 0}
    about = {"checkpoint": str(folder / "checkpoint/step-40"), "method": "ar", "likelihood": "exact"}
    return {**about, "results": [row]}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """A run with everything, one that was resumed, one without curves; their report."""
    root = tmp_path_factory.mktemp("report")
    first = make_run(root / "first", description=EVIL)
    steps = range(1, 41)
    tokens = {step: 100.0 * step for step in steps}
    loss = {step: 5.0 / step + 1 for step in steps}
    write_events(first / "tb/0101", {LOSS: loss, TOKENS: tokens, "validation_metrics/loss": {40: 1.5}})
    (first / "eval.json").write_text(json.dumps(lengths(first, accuracy=0.875)))
    (first / "pictures").mkdir()
    (first / "pictures" / "mask <b>.png").write_bytes(png())
    (first / "broken.png").write_bytes(b"no picture")
    (first / "checkpoint/step-1").mkdir(parents=True)
    (first / "checkpoint/step-1/not_a_result.png").write_bytes(png())

    second = make_run(root / "second", method="t2mlr", seed=7)
    part = {LOSS: {s: 9.0 for s in range(1, 31)}, TOKENS: {s: 50.0 * s for s in range(1, 31)}}
    write_events(second / "tb/0101", part)
    rest = {LOSS: {s: 2.125 for s in range(21, 41)}, TOKENS: {s: 50.0 * s for s in range(21, 41)}}
    rest["t2mlr/gate"] = {21: 0.5, 40: math.nan}
    write_events(second / "tb/0102", rest, start=5000.0)

    write_events(second / "tb/evaluation", {"chain_sum/exact_match": {40: 0.5}}, start=9000.0)
    write_image(second / "tb/0103", "attention_mask", step=3)

    third = make_run(root / "third")
    outside = root / "outside.json"
    both = [lengths(third, accuracy=0.5), benchmarks(third, value=0.25, stderr=None, samples=100)]
    outside.write_text("\n".join(json.dumps(one) for one in both))
    mine = root / "piqa.json"
    mine.write_text(json.dumps(benchmarks(Path("/gone"), value=0.5, stderr=0.0625, samples=64)))
    out = root / "out"
    names = ["report", *map(str, (first, second, third)), "--out", str(out)]
    compare.main([*names, "--eval", str(outside), "--eval", f"{mine}=second"])
    return {"root": root, "out": out, "first": first, "second": second, "third": third}


# --- the page --------------------------------------------------------------------------


class Checker(HTMLParser):
    """Collects tags that are not closed in order, addresses, and what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.addresses: list[str] = []
        self.seen: list[str] = []
        self.ids: set[str] = set()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.add(value or "")
            if name.startswith("on"):
                self.wrong.append(name)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")

    def handle_data(self, data):
        self.seen.append(data)


def parsed(made) -> tuple[str, Checker]:
    text = (made["out"] / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    return text, checker


def test_page_is_balanced_and_needs_nothing_from_elsewhere(made):
    text, checker = parsed(made)
    assert not checker.wrong and not checker.open
    assert not {"script", "link", "iframe", "object", "b"} & set(checker.tags)
    anchors = {a for a in checker.addresses if a.startswith("#")}
    assert all(a.startswith("data:image/png;base64,") for a in set(checker.addresses) - anchors)
    assert {a[1:] for a in anchors} == checker.ids
    assert "url(" not in text and "@import" not in text
    assert 'name="viewport"' in text


def test_page_shows_what_came_from_files_as_text(made):
    text, checker = parsed(made)
    seen = "".join(checker.seen)
    assert EVIL in seen and "<script" not in text
    assert "pictures/mask <b>.png" in seen


def test_tables_scroll_in_a_box_of_their_own(made):
    text, _ = parsed(made)
    assert text.count("<table") == text.count('<div class="box" tabindex="0"><table') > 3


def cells(made, row: str) -> list[str]:
    """The cells of a row of the Markdown tables."""
    lines = [line.strip("| ") for line in (made["out"] / "report.md").read_text().splitlines()]
    found = [re.split(r" \| ", line) for line in lines]
    return next(line[1:] for line in found if line[0] == row)


def test_table_of_runs_holds_what_the_files_say(made):
    assert cells(made, "method") == ["ar", "t2mlr", "ar"]
    assert cells(made, "steps") == ["40", "40", "40"]
    assert cells(made, "tokens") == ["4,000", "2,000", "100 on rank 0"]
    assert cells(made, "last loss") == ["1.1250", "2.1250", r"\-"]
    assert cells(made, "last validation loss") == ["1.5000", r"\-", r"\-"]
    assert cells(made, "wall time") == ["1 min 15 s", "1 min 15 s (last start)", "1 min 15 s"]
    markdown = (made["out"] / "report.md").read_text()
    assert "| parameters" not in markdown and "| versions" not in markdown  # of no run


def test_config_table_has_the_keys_that_differ_only(made):
    markdown = (made["out"] / "report.md").read_text()
    section = markdown.split("## Config differences")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert rows == ['| model.name | "ar" | "t2mlr" | "ar" |', "| debug.seed | 0 | 7 | 0 |"]


def test_markdown_escapes_and_its_pictures_lie_beside_it(made):
    markdown = (made["out"] / "report.md").read_text()
    assert "<script" not in markdown.replace(r"\<", "") and r"\| \`a\` \& \*b\*" in markdown
    assert "http://" not in markdown
    named = re.findall(r"^!\[.*\]\(([^)]*)\)$", markdown, flags=re.M)
    assert set(named) == {p.name for p in made["out"].glob("*.png")}
    assert len(named) == len(set(named))
    assert "run1-pictures-mask-b.png" in named and "curve-training-loss.png" in named
    assert "curve-t2mlr-gate.png" in named
    assert not any("not_a_result" in name for name in named)
    assert (made["out"] / "run1-pictures-mask-b.png").read_bytes() == png()
    assert (made["out"] / "run2-logged-attention_mask.png").read_bytes() == png(3)
    assert (made["out"] / "curve-training-loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_missing_is_said(made):
    seen = " ".join("".join(parsed(made)[1].seen).split())
    assert "third: no curves, for there is no TensorBoard data ([metrics] enable_tensorboard = true)" in seen
    assert "first: broken.png is no PNG and is left out." in seen
    assert "second: t2mlr/gate is not finite at 1 steps (40)." in seen


def test_evaluations_side_by_side(made):
    markdown = (made["out"] / "report.md").read_text()
    heads = "| length | samples: of all runs | token accuracy: first | token accuracy: third "
    assert f"{heads}| exact match: first | exact match: third | range: of all runs |" in markdown
    assert cells(made, "3") == ["32", "87.50%", "50.00%", "29.17%", "16.67%", "beyond"]
    piqa = cells(made, "piqa")
    # Whose error is not recorded has none; the numbers of samples differ and so are told.
    assert sorted(piqa) == sorted(
        ["acc", "0", "they differ", "0.2500 (100 samples)", "0.5000 \N{PLUS-MINUS SIGN} 0.0625 (64 samples)"]
    )
    assert {p.name for p in made["out"].glob("lengths-*")} == {
        "lengths-1-token-accuracy.png",
        "lengths-1-exact-match.png",
    }


def test_again_into_the_same_folder_and_beside_the_runs(made, capsys):
    inside = made["third"] / "pages"
    runs = ["report", str(made["third"])]
    compare.main([*runs, "--out", str(inside), "--x", "steps", "--title", "<i>alone</i>"])
    assert capsys.readouterr().out.split() == [str(inside / "report.html"), str(inside / "report.md")]
    before = (inside / "report.html").read_bytes()
    compare.main([*runs, "--out", str(inside), "--x", "steps", "--title", "<i>alone</i>"])
    assert (inside / "report.html").read_bytes() == before
    assert b"<h1>&lt;i&gt;alone&lt;/i&gt;</h1>" in before
    assert not [p for p in inside.iterdir() if p.name.startswith(".")]
    # An earlier report's pictures are no results of the run.
    (inside / "curve.png").write_bytes(png())
    assert read_runs([made["third"]])[0].pictures == []


# --- what is read ----------------------------------------------------------------------


def test_a_resumed_run_has_one_value_a_step_and_the_later_one(made):
    run = read_runs([made["second"]])[0]
    points = run.curves[LOSS]
    assert [p.step for p in points] == list(range(1, 41))
    assert [p.value for p in points] == [9.0] * 20 + [2.125] * 20
    assert run.starts == 3
    assert "chain_sum/exact_match" not in run.curves  # an evaluation's, not the trainer's


def test_a_later_start_drops_steps_that_only_the_earlier_one_reached(tmp_path):
    late = write_events(tmp_path, {"a": {1: 3.0, 2: 4.0}}, start=5000.0)
    early = write_events(tmp_path, {"a": {s: 1.0 for s in range(1, 9)}, "b": {5: 2.0}}, start=1000.0)
    curves = events.read([late, early]).curves
    assert [(p.step, p.value) for p in curves["a"]] == [(1, 3.0), (2, 4.0)]
    assert [(p.step, p.value) for p in curves["b"]] == [(5, 2.0)]


def test_a_file_cut_short_gives_what_is_whole_and_a_damaged_one_is_named(tmp_path):
    path = write_events(tmp_path, {"a": {s: float(s) for s in range(1, 6)}})
    data = path.read_bytes()
    path.write_bytes(data[:-7])  # the run was killed
    assert [p.step for p in events.read([path]).curves["a"]] == [1, 2, 3, 4]
    middle = bytearray(data)
    middle[len(data) // 2] ^= 0xFF
    for broken in (bytes(middle), b"this is no event file at all, it is prose", data[:5]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=re.escape(str(path))):
            events.read([path])


def test_ranks_with_folders_of_their_own_count_once(tmp_path):
    for rank in (1, 0):
        write_events(tmp_path / f"0101/rank_{rank}", {"a": {1: float(rank)}})
    assert [p.value for p in events.read(events.event_files(tmp_path)).curves["a"]] == [0.0]


def test_smoothing_starts_at_the_first_value_and_passes_over_gaps():
    assert events.smoothed([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0] * 3)
    assert events.smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.5 * 0.5 * 1 + 0.5 * 3) / 0.75])
    assert events.smoothed([1.0, 5.0], 0.0) == [1.0, 5.0]
    gap = events.smoothed([2.0, math.nan, 2.0], 0.6)
    assert math.isnan(gap[1]) and gap[2] == pytest.approx(2.0)


def test_tokens_of_steps_lie_on_lines_between_those_logged():
    seen = [events.Point(10, 100.0, 0.0), events.Point(20, 400.0, 1.0)]
    assert events.tokens_at([0, 5, 10, 15, 22], seen) == pytest.approx([0, 50, 100, 250, 460])
    with pytest.raises(ValueError, match="no numbers"):
        events.tokens_at([1], [])


def test_names_are_the_shortest_ends_that_differ():
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/out"), Path("/b/out"), Path("/b/z")]) == ["a/out", "b/out", "b/z"]


def test_evaluations_have_labels_of_their_own():
    """Else the curve of one would hide another's."""

    def one(run: str, **told) -> evaluations.Evaluation:
        told = {"checkpoint": "a/step-1", **told}
        return evaluations.Evaluation(run=run, file=Path("e.jsonl"), kind="lengths", told=told)

    group = [one("a", seed=0), one("a", seed=1), one("a", seed=1), one("b", seed=0)]
    head = "a (step-1) (e.jsonl) (seed"
    assert measures.labels(group) == [f"{head} 0)", f"{head} 1) 1", f"{head} 1) 2", "b"]


def test_parameters_come_from_a_checkpoint_and_a_tied_matrix_counts_once(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    run = make_run(tmp_path / "run")
    matrix = torch.zeros(7, 3)
    state = {"tok_embeddings.weight": matrix, "norm.weight": torch.zeros(3), "lm_head.weight": matrix}
    dcp.save(state, checkpoint_id=run / "checkpoint/step-1", no_dist=True)
    assert read_runs([run])[0].parameters is None  # no telling whether one matrix or two
    state["optimizer.state.tok_embeddings.weight.exp_avg"] = torch.zeros(7, 3)
    dcp.save(state, checkpoint_id=run / "checkpoint/step-2", no_dist=True)
    assert read_runs([run])[0].parameters == 7 * 3 + 3
    state["optimizer.state.lm_head.weight.exp_avg"] = torch.zeros(7, 3)
    dcp.save(state, checkpoint_id=run / "checkpoint/step-3", no_dist=True)
    assert read_runs([run])[0].parameters == 2 * 7 * 3 + 3


def test_curves_of_many_runs_with_names_that_mean_something_to_matplotlib(tmp_path):
    files = [write_events(tmp_path, {LOSS: {1: 2.0, 2: 1.0}, TOKENS: {1: 8.0, 2: 16.0}})]
    logged = events.read(files)
    folder = make_run(tmp_path / "run")
    runs = [
        replace(read_runs([folder])[0], name=f"_${i}^{'x' * (i * 8)}$", curves=logged.curves)
        for i in range(12)
    ]
    drawn = {
        axis: charts.curve(runs, LOSS, look=charts.look_of(runs, axis=axis, smoothing=0.5), title="loss")
        for axis in ("tokens", "steps")
    }
    assert all(png and png.startswith(events.PNG) for png in drawn.values())
    assert drawn["tokens"] != drawn["steps"]
    assert len(set(charts.look_of(runs, axis="steps", smoothing=0).style.values())) == 12
    assert (
        charts.curve(runs, "absent", look=charts.look_of(runs, axis="steps", smoothing=0), title="") is None
    )


def test_without_counts_of_tokens_the_axis_is_steps_and_the_page_says_so(tmp_path):
    folder = make_run(tmp_path / "run")
    write_events(folder / "tb/0101", {LOSS: {1: 2.0, 2: 1.0}})
    report = command.build(read_runs([folder]), given=[], axis="tokens", smoothing=0.0)
    assert "Against steps: run did not log how many tokens were seen." in page.markdown(report)


def test_kinds_of_evaluations():
    head = {"checkpoint": "c", "method": "ar"}
    swept = {**head, "task": "chain_sum", "results": [{"tau": 0.1, "samples": 4, "accuracy": 0.5}]}
    assert evaluations.kind_of(swept) == "sweep"
    depths = {**head, "task": "t", "results": [{"kind": "digit", "tokens": 3, "pass_1": 1.0}]}
    assert evaluations.kind_of(depths) == "depths"
    assert evaluations.kind_of({**head, "results": [{"strategy": "ar"}]}) == "decode"
    rows = {"ar": [{"length": 1, "samples": 4}]}
    assert evaluations.kind_of({**head, "task": "t", "results": rows}) == "strategies"
    assert evaluations.kind_of({**swept, "sweep": [1]}) is None
    for other in ([], {}, {"step": 3}, head, {**head, "results": []}, {**head, "results": [1]}, None):
        assert evaluations.kind_of(other) is None


def test_a_sweep_shows_its_errors_where_recorded_and_marks_the_frontier():
    rows = [
        {"tau": 0.5, "samples": 4, "accuracy": 0.5, "standard_error": 0.25, "seconds": 1.5, "frontier": True},
        {"tau": 1.0, "samples": 4, "accuracy": 0.25, "seconds": 2, "frontier": False},
    ]
    told = {"checkpoint": "c", "method": "ar", "task": "t", "sweep": {"tau": [0.5, 1.0]}, "results": rows}
    one = evaluations.Evaluation(run="r", file=Path("f.json"), kind="sweep", told=told)
    (table,) = measures.tables([one])
    assert table.head == ["tau", "samples", "accuracy", "seconds", "frontier"]
    assert table.rows[0] == ["0.5", "4", "50.00% \N{PLUS-MINUS SIGN} 25.00%", "1.50", "*"]
    assert table.rows[1] == ["1", "4", "25.00%", "2", ""]


def test_markdown_escape_keeps_a_cell_in_its_cell():
    assert page.escaped("a|b\nc") == r"a\|b c"
    assert page.escaped("# no heading") == r"\# no heading"
    assert page.escaped("0.5") == "0.5"


# --- what is refused -------------------------------------------------------------------


def refused(arguments: list[str], *words: str) -> None:
    """The command ends in one line that has all the words."""
    with pytest.raises(UserError) as caught:
        compare.main(["report", *arguments])
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_bad_runs_and_flags_are_refused_in_one_line(made, tmp_path):
    first, out = str(made["first"]), ["--out", str(tmp_path / "out")]
    refused([str(made["root"] / "frist"), *out], "frist is not there", "did you mean 'first'")
    refused([str(made["root"]), *out], "has no config.toml", "first, second, third have one")
    refused([str(made["first"] / "config.toml"), *out], "is a file")
    refused([first, f"{first}/../first/", *out], "given twice")
    refused([first, "--out", first], "is a run's own folder")
    refused([first, "--out", str(made["first"] / "run.json" / "x")], "is a file")
    refused([first, *out, "--x", "token"], "unknown --x 'token'", "did you mean 'tokens'")
    refused([first, *out, "--smoothing", "1"], "below 1")
    refused([first, *out, "--names", "a,b"], "2 names for 1 runs")
    refused([first, str(made["second"]), *out, "--names", "a,a"], "'a' comes twice")
    refused([first, *out, "--names", "a,"], "empty name")
    assert not (tmp_path / "out").exists()


def test_bad_evaluations_are_refused_in_one_line(made, tmp_path):
    runs = [str(made["first"]), str(made["second"]), "--out", str(tmp_path / "out")]
    bad, other, foreign = tmp_path / "bad.json", tmp_path / "other.json", tmp_path / "foreign.json"
    bad.write_text('{"results": [')
    other.write_text('{"step": 3}')
    foreign.write_text(json.dumps(lengths(Path("/gone"), accuracy=1.0)))
    refused([*runs, "--eval", str(bad)], "bad.json cannot be read as JSON")
    refused([*runs, "--eval", str(other)], "other.json", "tools/evaluate.py --json")
    refused([*runs, "--eval", str(foreign)], "none of the runs' folders", f"--eval {foreign}=first")
    refused([*runs, "--eval", f"{foreign}=frist"], "no run 'frist'", "did you mean 'first'")
    refused([*runs, "--eval", str(tmp_path / "othre.json")], "is not there", "other.json")
    refused([*runs, "--eval", str(tmp_path)], "is a folder")
    assert not (tmp_path / "out").exists()


def test_broken_files_of_a_run_are_named(tmp_path):
    for name, text in (("config.toml", "[model"), ("run.json", "{"), ("eval.json", "["), ("run.json", "[]")):
        run = make_run(tmp_path / f"{name}-{len(text)}")
        (run / name).write_text(text)
        refused([str(run), "--out", str(tmp_path / "out")], str(run / name))
    run = make_run(tmp_path / "events")
    (run / "tb").mkdir()
    (run / "tb" / "events.out.tfevents.1.x").write_bytes(b"no events " * 9)
    refused([str(run), "--out", str(tmp_path / "out")], "tfevents.1.x cannot be read")
