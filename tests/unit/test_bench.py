"""The benchmark tool: its arithmetic, its table, and that both sides of each benchmark run."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace

import pytest
import torch

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.distributed import harness
from tools import compare
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import (
    bench,
    bench_cases,
    bench_decode,
    bench_memory,
    bench_methods,
    bench_reference,
    bench_system,
    bench_tdlm,
)


class Stopwatch:
    """A clock that the work itself moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = ""

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *, tokens: int, seconds: list[float]) -> bench.Work:
        turns = iter(seconds)

        def run() -> int:
            self.order += name
            self.now += next(turns)
            return tokens

        return run


def row(**changes) -> bench.Row:
    fields = {"what": "train", "ours": 3.0, "peer": 2.0, "unit": "tokens/s", "ratios": [1.5, 0.5, 4.0]}
    return bench.Row(**{**fields, **changes})


def report(*rows: bench.Row, **settings) -> bench.Report:
    return bench.Report(
        settings=bench.Settings(**settings),
        rows=list(rows),
        machine=[bench.Rates(10.0, 1.0), bench.Rates(30.0, 5.0), bench.Rates(20.0, 4.0)],
        device="cpu",
        load_average=(0.5, 0.25, 0.125),
    )


def test_rounds_alternate_and_the_warm_up_is_not_measured():
    clock = Stopwatch()
    # The first turn of each side is slow, and is not to count.
    ours = clock.work("A", tokens=10, seconds=[100, 1, 3, 1, 1])
    peer = clock.work("B", tokens=30, seconds=[100, 2, 4, 3, 3])
    rounds = bench.alternate(ours, peer, rounds=2, clock=clock)
    assert clock.order == "AB" + "ABBA" + "BAAB"
    # A round is the tokens of both turns over their time, not a mean of two rates.
    assert rounds == [bench.Round(20 / 4, 60 / 6), bench.Round(20 / 2, 60 / 6)]


def test_an_even_drift_cancels_within_a_round():
    clock = Stopwatch()
    # Equal sides on a machine that becomes slower by a second with each turn.
    ours = clock.work("A", tokens=1, seconds=[0, 1, 4])
    peer = clock.work("B", tokens=1, seconds=[0, 2, 3])
    assert bench.row_of("x", bench.alternate(ours, peer, rounds=1, clock=clock)).ratio == 1


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    rounds = [bench.Round(10, 10), bench.Round(3, 2), bench.Round(1, 4)]
    measured = bench.row_of("x", rounds)
    assert (measured.ours, measured.peer) == (3, 4)
    assert measured.ratios == [1, 1.5, 0.25]
    assert measured.ratio == 1  # and not 3 / 4
    assert bench.row_of("x", rounds[:2]).ratio == 1.25


def test_machine_rates_count_what_was_done(monkeypatch):
    monkeypatch.setattr(bench, "_median_seconds", lambda run, *, repeats: 0.5)
    rates = bench.machine_rates(size=100, copied_bytes=10**6)
    assert rates == bench.Rates(2 * 100**3 / 0.5 / 1e9, 2 * 10**6 / 0.5 / 1e9)


def test_the_machine_is_measured_around_every_benchmark(monkeypatch):
    calls = []
    rates = iter([bench.Rates(1, 10), bench.Rates(3, 20), bench.Rates(2, 60)])
    monkeypatch.setattr(bench, "machine_rates", lambda: calls.append("machine") or next(rates))
    for name in ("one", "two"):
        monkeypatch.setitem(
            bench.BENCHMARKS, name, lambda s, name=name: calls.append(name) or [row(what=name)]
        )
    told: list[str] = []
    result = bench.run(bench.Settings(threads=1), only=["two", "one"], progress=told.append)
    assert calls == ["machine", "two", "machine", "one", "machine"]
    assert [r.what for r in result.rows] == ["two", "one"]
    assert result.rates == bench.Rates(2, 20)
    assert len(told) == 2


def test_table_is_aligned_and_says_everything():
    lines = compare.table(report(row(), row(what="decode, long", ours=12345.67))).split("\n")
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["what", "ours", "peer", "ratio", "rounds", "goal", "state"]
    assert cells[2] == [
        "train",
        "3.0 tokens/s",
        "2.0 tokens/s",
        "1.500",
        "0.500 to 4.000",
        ">= 1.00",
        "reached",
    ]
    assert cells[3][:2] == ["decode, long", "12,345.7 tokens/s"]
    assert all(set(cell) <= {"-", ":"} and len(cell) > 2 for cell in cells[1])


def test_summary_names_the_machines_rates_and_the_settings():
    text = compare.summary(report(row(), threads=3, rounds=7))
    for part in (
        "20.0 GFLOP/s",
        "4.0 GB/s",
        "3 threads",
        "7 rounds",
        "load before 0.5",
        "torchtitan 0.3.0",
    ):
        assert part in text


def test_files_hold_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run", lambda settings, **kwargs: report(row(), rounds=settings.rounds))
    files = {"--json": tmp_path / "a.json", "--markdown": tmp_path / "a.md"}
    compare.main(["bench", "--rounds", "9", *(str(x) for pair in files.items() for x in pair)])
    shown = capsys.readouterr().out
    assert files["--markdown"].read_text() == shown
    data = json.loads(files["--json"].read_text())
    assert data["settings"]["rounds"] == 9
    assert data["machine"]["matmul_gflops"] == 20 and len(data["machine"]["samples"]) == 3
    assert data["machine"]["cores"] >= 1 and data["machine"]["threads"] == 2 and data["machine"]["torch"]
    assert data["rows"][0]["reached"] is True
    assert data["rows"][0]["ratio"] == 1.5 and data["rows"][0]["ratios"] == [1.5, 0.5, 4.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "trian"],
            r"unknown benchmark 'trian'; did you mean 'train'\? \(allowed: alodlm, block_diffusion, ",
        ),
        (["--rounds", "0"], r"--rounds must be at least 1, got 0"),
        (["--threads", "-1"], r"--threads must be at least 1, got -1"),
        (["--only", "decode", "--json", "{tmp}/no/a.json"], r"cannot write .*/no/a\.json: no such folder"),
        (["--only", "decode", "--markdown", "{tmp}"], r"cannot write .*: it is a folder"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        compare.main(["bench", *(a.format(tmp=tmp_path) for a in arguments)])


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--model-dir .* has no config\.json"):
        bench_decode.bench_decode(bench.Settings(model_dir=tmp_path, quick=True))


def test_different_decodings_are_refused():
    bench_decode.check_equal_tokens([[1, 2], [3]], [[1, 2], [3]])
    with pytest.raises(RuntimeError, match=r"row 1 from new token 2: \[5\] and \[6\]"):
        bench_decode.check_equal_tokens([[1], [3, 4, 5]], [[1], [3, 4, 6]])
    with pytest.raises(RuntimeError, match=r"row 0 from new token 1: \[\] and \[2\]"):
        bench_decode.check_equal_tokens([[1]], [[1, 2]])


def test_decode_runs_and_both_sides_agree():
    pytest.importorskip("transformers")
    rows = bench_decode.bench_decode(bench.Settings(rounds=1, threads=1, quick=True))
    assert len(rows) == 2 * len(bench_decode.DECODE_QUICK.batches)
    assert [row.what.rpartition("/ ")[2] for row in rows[:2]] == ["transformers", "byte floor"]
    assert all(r.ours > 0 and r.peer > 0 and len(r.ratios) == 1 for r in rows)


def test_decode_notices_another_model(monkeypatch):
    pytest.importorskip("transformers")
    honest = bench_decode.our_decoding

    def wrong(*args, **kwargs):
        run = honest(*args, **kwargs)
        return lambda: [[*tokens[:-1], tokens[-1] + 1] for tokens in run()]

    monkeypatch.setattr(bench_decode, "our_decoding", wrong)
    with pytest.raises(RuntimeError, match="decodings differ in row 0 from new token 7"):
        bench_decode.bench_decode(bench.Settings(rounds=1, threads=1, quick=True))


def test_train_runs_both_trainers():
    # In a process of its own: torchtitan changes the process it runs in.
    [rows] = harness.run(bench.bench_train, world=1, settings=bench.Settings(rounds=1, threads=1, quick=True))
    measured, floor = rows
    assert floor.unit == "GFLOP/s" and not floor.goal and floor.note
    assert measured.ours > 0 and measured.peer > 0 and len(measured.ratios) == 1


def test_train_notices_another_size(monkeypatch):
    [message] = harness.run(other_size, world=1)
    assert "do not have the same number of parameters" in message


def other_size() -> str:
    """The refusal when our backbone is one layer short."""
    bench.OURS = replace(bench.OURS, n_layers=bench.OURS.n_layers - 1)
    with pytest.raises(RuntimeError) as caught:
        bench.bench_train(bench.Settings(rounds=1, threads=1, quick=True))
    return str(caught.value)


@pytest.mark.parametrize("method", sorted(bench_methods.BENCHMARKS))
def test_a_method_is_measured_against_ar_the_floors_and_the_obvious_way(method):
    """Training, peak memory and decoding; the obvious way decodes the same tokens."""
    rows = bench_methods.BENCHMARKS[method](bench.Settings(rounds=1, threads=1, quick=True))
    shape = "6 x 256, batch 2 x 32"
    heads = [f"train {shape}: {method} / ar", f"train {shape}: {method} / FLOP floor"]
    heads += [f"peak memory of a step, {shape}: {method} / ar"]
    heads += [f"decode 3 x 64, 1 x 4+4: {method} / {peer}" for peer in ("ar", "byte floor")]
    assert [row.what for row in rows[:5]] == heads
    assert [row.unit for row in rows[:3]] == ["tokens/s", "GFLOP/s", "MiB"]
    assert all(row.ours > 0 and row.peer > 0 and row.ratios and row.values for row in rows)
    passes = {"mdlm": 1.0, "looped": 4 / 3, "t2mlr": 1.5}.get(method, 2.0)  # of the layers, at least
    assert 0 < rows[0].goal <= 1 / passes
    assert rows[2].ratio == rows[2].peer / rows[2].ours
    twins = [row for row in rows if row.what.endswith("the obvious way")]
    kinds = {"mdlm": ["decode"], "looped": ["decode"]}.get(method, ["loss", "decode"])
    assert [row.what.split()[0] for row in twins] == kinds
    assert twins[-1].note.startswith("both decode the same tokens")


def test_tidars_forward_is_measured_with_a_goal_and_its_step_without(monkeypatch):
    forward, step = bench_decode.tidar_forward(bench.Settings(rounds=1, threads=1, quick=True))
    assert forward.what == "decoding forward 3 x 64, 12 tokens after 8: tidar / ar"
    assert forward.goal == pytest.approx(1 / 1.15) and not step.goal


def test_more_passes_take_no_more_memory_at_a_large_vocabulary():
    [grown] = bench_memory.alodlm_growth(bench.Settings(rounds=1, threads=1, quick=True))
    assert grown.reached and grown.ours > 0 and "2 MiB more" in grown.note


def test_without_the_obvious_implementations_one_line_says_so(monkeypatch):
    with pytest.raises(UserError, match=r"needs tests/reference of a checkout"):
        bench_reference.reference("nothing_of_the_kind")


def test_tdlm_is_measured_against_its_backbone():
    """Both sides of every row do work, and the bytes are the formula's."""
    rows = bench_tdlm.bench_tdlm(bench.Settings(rounds=1, threads=1, quick=True))
    heads = ["decoding forward"] * 2 + ["decode"] + ["train"] * 2 + ["temporal cache"] * 2
    heads += ["decode", "train"]
    assert all(row.what.startswith(f"{head} 4 x 64") for row, head in zip(rows, heads, strict=True))
    assert all(row.ours > 0 and row.peer > 0 and len(row.ratios) == 1 for row in rows)
    held, buffers = rows[-4:-2]
    assert held.ratio == 1.0 and held.peer * 2**20 == 2 * 8 * 3 * 2 * 4 * 8 * 4
    assert buffers.ours >= held.ours and buffers.note
    assert rows[3].note in compare.notes(report(*rows)) and compare.notes(report(row())) == ""


def test_the_plain_training_step_reaches_as_deep_as_the_temporal_modules():
    """As many blocks run a backward on both sides, and the plain one leaves no gradients."""
    model = bench_tdlm.build(bench_tdlm.QUICK)
    step, plain_step, _ = bench_tdlm.training_works(model, bench_tdlm.QUICK)
    reached: list[str] = []
    for name, block in model.layers.items():
        block.feed_forward.register_full_backward_hook(lambda *_, name=name: reached.append(name))
    for work in (step, plain_step):
        reached.clear()
        assert work() == 9 and reached == ["3", "2", "1"]
    model.zero_grad()
    plain_step()
    assert all(parameter.grad is None for parameter in model.parameters())
    step()
    given = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert given and all(".temporal." in name for name in given)


def test_peak_bytes_counts_what_is_alive_at_once():
    counter = bench_memory.PeakBytes()
    kept = torch.zeros(100)
    counter.see(kept)
    with counter:
        for _ in range(3):
            a = torch.ones(1000)
            b = a + 1
            view = b.view(10, 100)
            del a, b, view
    assert counter.peak == 4 * (100 + 2000)
    assert counter.now == 4 * 100


def test_three_sides_go_there_and_back():
    clock = Stopwatch()
    sides = [clock.work(name, tokens=6, seconds=[9, 1, 2, 3, 3]) for name in "ABC"]
    rates = bench.interleave(sides, rounds=2, clock=clock)
    assert clock.order == "ABC" + "ABCCBA" + "CBAABC"
    assert rates == [[12 / 3, 12 / 6]] * 3


def test_a_goal_is_reached_by_the_median():
    assert row(goal=1.5).reached is True and row(goal=1.6).reached is False and row(goal=0.0).reached is None
    assert compare.goals(report(row(goal=1.0), row(goal=2.0), row(goal=0.0))) == "1 of 2 reached"
    less = bench.row_of_once("x", 2.0, 3.0, unit="s", goal=1.5)
    assert less.ratio == 1.5 and less.reached and less.values == [(2.0, 3.0)]
    floor = bench.floor_row("x", [2e9, 4e9], [4e9, 4e9], unit="GB/s", note="n")
    assert (floor.ours, floor.peer, floor.ratios) == (3.0, 4.0, [0.5, 1.0])


def test_work_of_the_machine_says_how_much_it_was():
    assert bench.product(quick=True)() == 2 * 128**3
    assert bench.copying(quick=True)() == 2 * 4 * 2**16


def test_bytes_of_a_decoding_count_what_passes_repeat():
    size = bench_reference.QUICK
    plain = bench_cases.build("ar", size)
    once = sum(p.nbytes for p in plain.parameters()) - plain.tok_embeddings.weight.nbytes
    assert bench_decode.weight_bytes(plain) == once
    model = bench_cases.build("looped", size, loops=3)
    run = bench_cases.decoding("looped", model, [[1, 2]], new_tokens=2)()
    core = sum(p.nbytes for p in model.core.layers.parameters())
    assert bench_decode.forward_bytes("looped", model, run) == run.forwards * (once + 2 * core)


def test_data_is_a_part_of_the_step():
    [waiting] = bench_system.bench_data(bench.Settings(rounds=1, threads=1, quick=True))
    assert waiting.goal == 50 and len(waiting.ratios) == 4
    assert all(0 < ours < peer for ours, peer in waiting.values)


def test_conversions_are_measured_with_their_memory():
    rows = bench_system.bench_convert(bench.Settings(rounds=1, threads=1, quick=True))
    assert [row.unit for row in rows[:2]] == ["MiB/s"] * 2
    assert all(row.ours > 0 and row.peer > 0 for row in rows[:2]) and {row.goal for row in rows[:2]} == {0.5}
    assert all(row.unit == "MiB" and row.peer == 0.5 for row in rows[2:])


def test_the_start_is_measured_to_the_first_steps_line():
    [started] = bench_system.bench_start(bench.Settings(quick=True))
    assert started.what == "start to first step of train_configs/ar/debug.toml: ours / 20 s"
    assert started.ours > 0
    script = "import time; print('step: 10'); print('\\x1b[31mstep:  1  loss'); time.sleep(60)"
    assert bench_system.seconds_to_first_step([sys.executable, "-c", script]) > 0
    with pytest.raises(RuntimeError, match="before its first step: bad input"):
        bench_system.seconds_to_first_step([sys.executable, "-c", "print('bad input')"])


def test_a_forward_for_each_block_is_the_doubled_forward():
    """The obvious way of the training comparisons: the same logits as the doubled mask."""
    doubled = bench_reference.reference("doubled")
    for method, layout in (
        ("tidar", {}),
        ("block_diffusion", {"clean": "block"}),
        ("wedlm", {"block": "causal"}),
    ):
        model = bench_cases.build(method, bench_reference.QUICK)
        tokens, positions = torch.randint(0, 500, (1, 40)), torch.arange(20).repeat(2)[None]
        want = model(tokens, positions, model.get_attention_masks(positions))
        got = doubled.logits(model, tokens, positions, block_size=bench_cases.BLOCK, **layout)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_rise_of_memory_does_not_hide_behind_what_was_freed():
    kept = [torch.ones(2**18) for _ in range(40)]
    del kept
    rises: list[int] = []
    with bench_system.rise_of_memory(rises):
        used = [torch.ones(2**18) for _ in range(20)]
        threading.Event().wait(0.2)
    assert not rises or 0.8 * 20 <= rises[0] / 2**20 < 40
    del used
