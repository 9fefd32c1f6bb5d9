"""What a CPU can tell of a run on a GPU: FlexAttention's numbers and blocks, and the check to run there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu import check
from tests.paths import ROOT
from torchtitan_ext.attention.flex import BLOCK, build_block_mask
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import block_grid

KINDS = sorted(check.mask_kinds("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_block_sparsity_is_that_of_enumeration(kind):
    """Blocks that FlexAttention computes, and the share that it skips, against pair by pair."""
    mask, _ = check.mask_kinds("cpu")[kind]
    blocks = build_block_mask(mask)
    length = -(-mask.q_len // BLOCK) * BLOCK
    index = torch.arange(length)
    q, k = index[:, None], index[None, :]
    inside = (q < mask.q_len) & (k < mask.q_len)
    zero = torch.zeros((), dtype=torch.long)
    allowed = mask.mod(zero, zero, q.clamp(max=mask.q_len - 1), k.clamp(max=mask.q_len - 1)) & inside
    allowed |= (q >= mask.q_len) & (k == 0)
    used = allowed.view(length // BLOCK, BLOCK, length // BLOCK, BLOCK).any(dim=3).any(dim=1)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), used)
    skipped = 100 * (1 - used.float().mean().item())
    assert blocks.sparsity() == pytest.approx(skipped, abs=1e-3)
    counts = block_grid(mask).counts
    assert counts.computed == used.sum() and 100 * (1 - counts.fraction_computed) == pytest.approx(skipped)


def test_flex_is_dense_under_every_mask(tmp_path):
    rows = check.check(check.Settings("cpu", (), tmp_path), ("kernels",))
    assert len(rows) == len(KINDS) and all(row.good for row in rows), check.table(rows)


def test_the_comparison_sees_a_wrong_kernel(tmp_path, monkeypatch):
    right = check.attended

    def wrong(backend, mask, *, backward):
        found = right(backend, mask, backward=backward)
        return [x + 1e-3 for x in found] if backend == "flex" else found

    monkeypatch.setattr(check, "attended", wrong)
    rows = check.check(check.Settings("cpu", (), tmp_path), ("kernels",))
    assert len(rows) == len(KINDS) and not any(row.good for row in rows)


@pytest.mark.parametrize(
    ("methods", "sections"),
    [
        ("ar", "syncs,speed"),
        pytest.param("ar,t2mlr,tdlm", ",".join(check.SECTIONS), marks=pytest.mark.slow),
        pytest.param(",".join(check.METHODS), "steps,syncs,speed", marks=pytest.mark.slow),
    ],
    ids=["ar", "some", "all"],
)
def test_the_check_runs_without_a_gpu(methods, sections, capsys):
    if torch.cuda.is_available():
        pytest.skip("the CPU is not torchtitan's device here")
    check.main(["--device", "cpu", "--methods", methods, "--only", sections])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["section", "what", "got", "wanted"]
    assert all(line.endswith("ok") for line in lines[1:-1])
    for section in sections.split(","):
        assert sum(line.startswith(section) for line in lines) >= len(methods.split(","))
    assert " 0 failed, " in lines[-1]


def test_without_cuda_it_says_so_in_one_line(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    check.main([])
    assert capsys.readouterr().out.startswith("skipped: this machine has no CUDA device")


def test_an_error_is_a_row_that_fails(tmp_path, monkeypatch, capsys):
    def broken(settings):
        yield check.Row("kernels", "first", "1", "1", True)
        raise ValueError("no such kernel\nmore")

    monkeypatch.setitem(check.SECTIONS, "kernels", broken)
    with pytest.raises(SystemExit) as ended:
        check.main(["--device", "cpu", "--only", "kernels"])
    shown = capsys.readouterr()
    assert ended.value.code == 1 and "FAIL" in shown.out and "ValueError: no such kernel" in shown.out
    assert "Traceback" in shown.err


def test_names_that_there_are_not():
    with pytest.raises(UserError, match="--only"):
        check.main(["--only", "kernel"])
    with pytest.raises(UserError, match="--methods"):
        check.main(["--methods", "tdar"])


@pytest.mark.slow
def test_the_module_starts_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 1
