"""Blocks of a mask against the dense form and torch's own block mask; its picture; tools/plan.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from torchtitan_ext import attention, masks, models, registry
from torchtitan_ext.attention import flex
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.planning import (
    BlockCounts,
    allowed_fraction,
    block_counts,
    block_grid,
    causal_counts,
    mask_blocks,
    relative_to_causal,
)

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)

documents = st.lists(st.integers(1, 13), min_size=1, max_size=5)
blocks = st.integers(1, 6)
kinds = st.sampled_from(["causal", "bidirectional", "doubled", "doubled, last block", "doubled, clean block"])


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def mask_of(kind: str, lengths: list[int], block_size: int = 4) -> masks.Mask:
    positions_BL = positions_of(lengths)
    if not kind.startswith("doubled"):
        return masks.DOCUMENT_MASKS[kind](positions_BL)
    return masks.doubled_blocks(
        positions_BL.repeat(1, 2),
        block_size=block_size,
        layout="last_block" if "last" in kind else "block",
        clean="block" if "clean" in kind else "causal",
    )


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import plan as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


# --- blocks ----------------------------------------------------------------------------


def brute_force(mask: masks.Mask, block: int, row: int = 0) -> BlockCounts:
    """Block by block from the whole dense matrix, padding written out."""
    dense = attention.evaluate_mask(mask)[row, 0].tolist()
    found = {"full": 0, "partial": 0, "empty": 0}
    for top in range(0, mask.q_len, block):
        for left in range(0, mask.kv_len, block):
            inside = [
                dense[q][k] if q < mask.q_len and k < mask.kv_len else q >= mask.q_len and k == 0
                for q in range(top, top + block)
                for k in range(left, left + block)
            ]
            found["full" if all(inside) else "partial" if any(inside) else "empty"] += 1
    return BlockCounts(total=sum(found.values()), block=block, **found)


@given(kind=kinds, lengths=documents, block_size=blocks, block=blocks)
@settings(deadline=None, max_examples=60)
def test_counts_equal_brute_force(kind, lengths, block_size, block):
    mask = mask_of(kind, lengths, block_size)
    counts = block_counts(mask, block=block)
    assert counts == brute_force(mask, block)
    assert counts.fraction_computed == (counts.full + counts.partial) / counts.total
    assert counts.pairs_computed == (counts.full + counts.partial) * block * block
    assert allowed_fraction(mask) == attention.evaluate_mask(mask).double().mean().item()


def torch_counts(mask: masks.Mask, row: int = 0) -> BlockCounts:
    block_mask = flex.build_block_mask(mask)
    assert block_mask.full_kv_num_blocks is not None
    partial = int(block_mask.kv_num_blocks[row].sum())
    full = int(block_mask.full_kv_num_blocks[row].sum())
    total = (block_mask.seq_lengths[0] // flex.BLOCK) * (block_mask.seq_lengths[1] // flex.BLOCK)
    return BlockCounts(
        total=total, full=full, partial=partial, empty=total - full - partial, block=flex.BLOCK
    )


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "doubled", "doubled, last block"])
@pytest.mark.parametrize("lengths", [[5], [128], [130, 40, 256, 1], [512], [300, 300]])
def test_counts_equal_flex_attention(kind, lengths):
    mask = mask_of(kind, lengths, 16)
    assert block_counts(mask) == torch_counts(mask)


@given(kind=kinds, lengths=documents, block_size=blocks, block=st.sampled_from([2, 4, 8]))
@settings(deadline=None, max_examples=25)
def test_counts_equal_flex_attention_with_other_blocks(kind, lengths, block_size, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        mask = mask_of(kind, lengths, block_size)
        assert block_counts(mask, block=block) == torch_counts(mask)


def test_each_row_has_its_own_counts():
    mask = masks.causal_document(torch.cat([positions_of([8]), positions_of([4, 4]), positions_of([1] * 8)]))
    counts = [block_counts(mask, block=4, row=row) for row in range(3)]
    assert [(c.full, c.partial, c.empty) for c in counts] == [(1, 2, 1), (0, 2, 2), (0, 2, 2)]
    assert [allowed_fraction(mask, row=row) for row in range(3)] == [36 / 64, 20 / 64, 8 / 64]


@given(length=st.integers(1, 60), block=blocks)
@settings(deadline=None, max_examples=40)
def test_causal_counts_are_those_of_one_document(length, block):
    counts = causal_counts(length, block=block)
    assert counts == block_counts(mask_of("causal", [length]), block=block)
    assert relative_to_causal(counts, length=length) == 1


@given(kind=kinds.filter(lambda kind: "doubled" in kind), lengths=documents, block=blocks)
@settings(deadline=None, max_examples=30)
def test_parts_are_quarters_of_the_matrix(kind, lengths, block):
    mask, length = mask_of(kind, lengths), sum(lengths)
    grid = block_grid(mask, block=block, parts=2)
    dense = attention.evaluate_mask(mask)[0, 0]
    quarters = [[dense[i : i + length, j : j + length] for j in (0, length)] for i in (0, length)]
    assert grid.pairs_PP.tolist() == [[int(quarter.sum()) for quarter in row] for row in quarters]
    assert grid.pairs_allowed == int(dense.sum()) and grid.pairs_PP[0, 1] == 0
    counts = [grid.part_counts(i, j) for i in range(2) for j in range(2)]
    if length % block:
        assert counts == [None] * 4
    else:
        assert tuple(map(sum, zip(*(c[:4] for c in counts), strict=True))) == grid.counts[:4]
        assert counts[1].computed == 0


def test_doubling_costs_twice_causal_and_its_diagonal():
    mask = mask_of("doubled", [1024], 16)
    counts = block_counts(mask)
    # 8 x 8 blocks a quarter: 36 computed on each clean side, 8 on the diagonal of the masks.
    assert counts == BlockCounts(total=256, full=56, partial=24, empty=176)
    assert relative_to_causal(counts, length=1024) == 80 / 36


def test_no_evaluation_holds_more_than_a_strip():
    asked = []

    def mod(b, h, q_idx, kv_idx):
        asked.append((b + h + q_idx + kv_idx).shape)
        return q_idx >= kv_idx

    block_counts(masks.Mask("causal", mod, positions_of([300]), 300, 300))
    assert asked == [(128, 300), (128, 300), (44, 300)]


def test_keys_and_queries_may_differ():
    mask = masks.Mask("tall", lambda b, h, q, k: k <= q + 4, positions_of([3]), 3, 7)
    assert block_counts(mask, block=2) == brute_force(mask, 2)
    assert allowed_fraction(mask) == 18 / 21


def test_refusals_of_the_counts():
    mask = mask_of("causal", [3])
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        block_counts(mask, block=0)
    with pytest.raises(UserError, match="row 1 of the mask: the batch has 1"):
        block_counts(mask, row=1)


# --- the picture -----------------------------------------------------------------------


def colour_at(figure, image, query: float, key: float) -> str:
    """Colour of the PNG under a place given in tokens."""
    x, y = figure.axes[0].transData.transform((key, query))
    pixel = image[image.shape[0] - 1 - int(y), int(x), :3]
    return "#" + "".join(f"{round(float(channel) * 255):02x}" for channel in pixel)


def drawn(path, mask, **options):
    """The figure, and the PNG that was written of it."""
    from matplotlib.image import imread

    from torchtitan_ext.planning import mask_picture

    mask_picture.draw_mask(path, mask, **options)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    figure = mask_picture.mask_figure(mask, **options)
    figure.canvas.draw()
    image = imread(path)
    assert image.shape[:2] == tuple(
        int(inches * mask_picture.DPI) for inches in figure.get_size_inches()[::-1]
    )
    assert min(image.shape[:2]) > 900
    return figure, image


@needs_matplotlib
@pytest.mark.parametrize("kind", ["causal", "doubled", "doubled, last block"])
def test_every_cell_has_the_colour_of_its_region(tmp_path, kind):
    mask = mask_of(kind, [5, 3, 4])
    labels = ("clean", "mask") if kind != "causal" else ()
    options = {"block": 4 if labels else None, "labels": labels, "title": "a mask"}
    figure, image = drawn(tmp_path / "mask.png", mask, **options)
    dense = attention.evaluate_mask(mask)[0, 0]
    colour = {(0, 0): "#0072b2", (1, 0): "#e69f00", (1, 1): "#009e73"}
    seen = set()
    for query in range(mask.q_len):
        for key in range(mask.kv_len):
            expected = colour[query // 12, key // 12] if dense[query, key] else "#ffffff"
            assert colour_at(figure, image, query + 0.5, key + 0.5) == expected, (query, key)
            seen.add(expected)
    assert len(seen) == (4 if labels else 2)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    regions = ["clean → clean", "mask → clean", "mask → mask"] if labels else ["allowed"]
    assert texts == [*regions, "forbidden", *(["blocks of 4"] if labels else []), "documents"]
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("key (token)", "query (token)")


@needs_matplotlib
def test_a_long_sequence_is_drawn_in_blocks(tmp_path):
    mask = mask_of("doubled", [512], 16)
    figure, image = drawn(tmp_path / "mask.png", mask, block=16, labels=("clean", "mask"))
    at = lambda i, j: colour_at(figure, image, 128 * i + 64, 128 * j + 64)  # noqa: E731
    # Blocks of 16 are finer than the picture: no border of theirs runs through the middle.
    assert at(2, 0) == "#0072b2" and at(2, 2) == "#7fb8d8" and at(2, 3) == "#ffffff"
    assert at(6, 0) == "#e69f00" and at(6, 2) == "#f2cf7f" and at(6, 3) == "#ffffff"
    assert at(6, 6) == "#7fceb9" and at(6, 5) == at(2, 6) == "#ffffff"
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"clean → clean: full (6)", "mask → mask: partial (4)", "empty (40)"} <= texts


@needs_matplotlib
def test_blocks_across_parts_and_of_padding_alone_are_told_apart():
    from torchtitan_ext.planning.mask_picture import mask_figure

    figure = mask_figure(mask_of("doubled", [160, 160], 16), labels=("clean", "mask"))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "across parts: partial (4)" in texts
    figure = mask_figure(mask_of("causal", [256, 200]))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["full (1)", "partial (5)", "padding alone: partial (1)", "empty (9)", "documents"]


# --- the tool --------------------------------------------------------------------------

DOUBLED = ["mask", "--kind", "doubled_blocks", "--block-size", "4"]


def test_table(tool, capsys):
    tool.main([*DOUBLED, "--documents", "11,5,8", "--tile", "8"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == (
        "doubled_blocks, documents of 11, 5, 8, blocks of 4, layout block, clean causal; blocks of 8 x 8"
    )
    assert header.split("  ")[0] == "mask" and header.endswith("relative to causal at 24")
    assert len({len(line) for line in [header, *rows]}) == 1
    counts = block_counts(mask_of("doubled", [11, 5, 8]), block=8)
    assert rows[0].split() == [
        *("doubled_blocks", "48", "267", "(11.59%)", str(counts.full), str(counts.partial)),
        *(str(counts.computed), "of", "36", f"{counts.computed / 36:.2%}", f"{counts.computed / 6:.3f}"),
    ]
    assert [row.split()[:3] for row in rows[1:5]] == [
        [query, "->", key] for query in ("clean", "mask") for key in ("clean", "mask")
    ]
    assert rows[5].startswith("causal, one document") and rows[5].endswith(" 1.000")


def test_parts_that_blocks_straddle_have_no_count(tool, capsys):
    tool.main([*DOUBLED, "--documents", "11,5,8"])
    assert capsys.readouterr().out.splitlines()[3].split()[-5:] == ["-"] * 5


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--layout", "last_block"], "doubled, last block"),
        (["--clean", "block"], "doubled, clean block"),
    ],
)
def test_json_and_layouts(tool, capsys, flags, kind):
    tool.main([*DOUBLED, "--documents", "9, 7", "--tile", "4", "--json", *flags])
    told = json.loads(capsys.readouterr().out)
    counts = block_counts(mask_of(kind, [9, 7]), block=4)
    assert told["documents"] == [9, 7] and told["block_size"] == 4 and told["tile"] == 4
    assert told["rows"][0]["blocks"] == {**counts._asdict(), "fraction_computed": counts.fraction_computed}
    assert told["rows"][0]["relative_to_causal"] == counts.computed / 10
    assert told["rows"][0]["allowed_fraction"] == allowed_fraction(mask_of(kind, [9, 7]))


@needs_matplotlib
def test_picture_of_the_tool(tool, tmp_path, capsys):
    tool.main([*DOUBLED, "--documents", "6,5", "--png", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").stat().st_size > 5000 and "pairs allowed" in capsys.readouterr().out


CONFIG = '[model]\nname = "ar"\nflavor = "smollm2-debug"\n[training]\nseq_len = 192\n'


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(CONFIG)
    return str(path)


def plan_of(tool, capsys, *argv: str):
    tool.main(["mask", "--json", *argv])
    told = json.loads(capsys.readouterr().out)
    return {name: told[name] for name in ("kind", "documents", "block_size", "layout", "clean")}


def test_mask_of_a_config(tool, config, capsys):
    expected = {"kind": "causal_document", "block_size": None, "layout": "block", "clean": "causal"}
    assert plan_of(tool, capsys, "--config", config) == {**expected, "documents": [192]}
    found = plan_of(tool, capsys, "--config", config, "--seq-len", "64")
    assert found == {**expected, "documents": [64]}
    found = plan_of(tool, capsys, "--config", config, "--documents", "3,4")
    assert found == {**expected, "documents": [3, 4]}


def test_mask_of_a_bidirectional_config(tool, config, capsys, monkeypatch):
    size = SimpleNamespace(attention="bidirectional")
    monkeypatch.setattr(
        models, "build_spec", lambda config: SimpleNamespace(model=SimpleNamespace(size=size))
    )
    assert plan_of(tool, capsys, "--config", config)["kind"] == "bidirectional_document"


def test_a_method_with_blocks_brings_them_and_flags_override(tool, config, capsys, monkeypatch):
    model = SimpleNamespace(block_size=8, mask_layout="last_block")
    monkeypatch.setattr(models, "build_spec", lambda config: SimpleNamespace(model=model))
    expected = {
        "kind": "doubled_blocks",
        "documents": [192],
        "block_size": 8,
        "layout": "last_block",
        "clean": "causal",
    }
    assert plan_of(tool, capsys, "--config", config) == expected
    found = plan_of(tool, capsys, "--config", config, "--block-size", "2", "--layout", "block")
    assert found == {**expected, "block_size": 2, "layout": "block"}
    assert plan_of(tool, capsys, "--config", config, "--kind", "causal_document")["block_size"] is None


@pytest.mark.parametrize(
    ("method", "section", "expected"),
    [
        ("tidar", 'block_size = 4\nmask_layout = "last_block"', (4, "last_block", "causal")),
        ("block_diffusion", "block_size = 16", (16, "block", "block")),
    ],
)
def test_mask_of_the_methods_with_blocks(tool, config, tmp_path, capsys, method, section, expected):
    if method not in registry.METHODS:
        pytest.skip(f"no {method}")
    (tmp_path / "a.toml").write_text(CONFIG.replace('"ar"', f'"{method}"') + f"[{method}]\n{section}\n")
    found = plan_of(tool, capsys, "--config", config)
    assert (found["kind"], found["documents"]) == ("doubled_blocks", [192])
    assert (found["block_size"], found["layout"], found["clean"]) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"which mask\? give --kind \(causal_document, .*or --config"),
        (["--kind", "causal_document"], r"which documents\? give --documents"),
        (["--kind", "causal_document", "--documents", ""], "--documents is empty"),
        (["--kind", "causal_document", "--documents", "3,x"], "'x' is not a whole number"),
        (["--kind", "causal_document", "--documents", "3,,4"], "'' is not a whole number"),
        (["--kind", "causal_document", "--documents", "3,0"], "at least 1 token, got 0"),
        (["--kind", "causal_document", "--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["--kind", "causal_document", "--seq-len", "4", "--documents", "4"], "give it or --documents"),
        (["--kind", "causal_document", "--seq-len", "4", "--tile", "0"], "--tile must be at least 1, got 0"),
        (["--kind", "causal_document", "--seq-len", "4", "--block-size", "2"], "--block-size does not apply"),
        (["--kind", "causal_documents", "--seq-len", "4"], "unknown --kind .*mean 'causal_document'"),
        (["--kind", "doubled_blocks", "--seq-len", "4"], "doubled_blocks needs --block-size"),
        ([*DOUBLED[1:-1], "0", "--seq-len", "4"], "--block-size must be at least 1, got 0"),
        ([*DOUBLED[1:], "--seq-len", "4", "--layout", "last"], "unknown --layout .*mean 'last_block'"),
        ([*DOUBLED[1:], "--seq-len", "4", "--clean", "casual"], "unknown --clean .*mean 'causal'"),
        (["--config", "absent.toml"], "no such file"),
    ],
)
def test_refusals(tool, argv, message, capsys):
    with pytest.raises(UserError, match=message) as error:
        tool.main(["mask", *argv])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


@needs_matplotlib
def test_a_picture_that_has_no_place(tool, tmp_path, capsys):
    for path, message in ((tmp_path / "no" / "a.png", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=message):
            tool.main([*DOUBLED, "--seq-len", "4", "--png", str(path)])
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_a_missing_matplotlib_is_one_line(tool, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else real(n, *a))
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: tool.main([*DOUBLED, "--seq-len", "4", "--png", "a.png"]))
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: a picture needs matplotlib") and captured.err.count("\n") == 1
    tool.main([*DOUBLED, "--seq-len", "4"])


def test_as_a_command(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), *DOUBLED, "--seq-len", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout)["rows"][0]["blocks"]["total"] == 1


def test_kinds_are_those_of_the_masks(tool):
    for name, kind in tool.KINDS.items():
        mask = kind.build(tool.MaskPlan(kind=name, documents=[3, 2], block_size=2))
        assert mask.kind == name and mask.q_len == 5 * max(1, len(kind.labels))
    assert mask_blocks.BLOCK == flex.BLOCK
