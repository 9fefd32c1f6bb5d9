"""Losses pinned in text files, so that a refactor shows that it changed nothing.

python -m tests.distributed.test_golden    # writes the files anew; say why in the commit
"""

from __future__ import annotations

import tempfile

import pytest

from tests.distributed import jobs
from tests.distributed.harness import run
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "assets" / "golden"
# The same text on every machine, unlike the standard library.
DATA = [
    *(
        "--dataloader.dataset",
        "text",
        "--dataloader.dataset_path",
        str(ROOT / "tests" / "assets" / "text.txt"),
    ),
    *("--dataloader.txt_documents", "paragraph"),
]
RUNS = {
    "ar_smollm2-debug": ["--model.flavor", "smollm2-debug"],
    "ar_qwen2_5-debug": ["--model.flavor", "qwen2_5-debug"],
    "ar_qwen3-debug": ["--model.flavor", "qwen3-debug"],
    "llama3_debugmodel": [
        *("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size", "2")
    ],
}


def losses(args: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        (result,) = run(jobs.train, world=1, folder=folder, args=[*args, *DATA])
    return list(result["loss"].values())


@pytest.mark.parametrize("name", sorted(RUNS))
def test_losses_are_as_pinned(name):
    pinned = [float(line) for line in (FOLDER / f"{name}.txt").read_text().split()]
    assert losses(RUNS[name]) == pytest.approx(pinned, abs=2e-4)


if __name__ == "__main__":
    for name, args in RUNS.items():
        text = "".join(f"{loss:.6f}\n" for loss in losses(args))
        (FOLDER / f"{name}.txt").write_text(text)
        print(name, *text.split())
