"""A TiDAR model trained on the standard library decodes exactly what plain decoding does, in fewer forwards.

python -m pytest -m slow tests/e2e/test_tidar_stdlib.py

``TORCHTITAN_EXT_TIDAR_RUN`` names the dump folder of train_configs/tidar/stdlib_cpu.toml; without it the
config is trained here for a part of its steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

FEW_STEPS = ["--training.steps", "200", "--lr_scheduler.total_steps", "200", "--validation.enable", "false"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from torchtitan_ext.checkpoint.load import load_model

    given = os.environ.get("TORCHTITAN_EXT_TIDAR_RUN")
    if given:
        return load_model(Path(given))
    folder = tmp_path_factory.mktemp("tidar")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NGPU": "2",
        "CONFIG_FILE": str(ROOT / "train_configs" / "tidar" / "stdlib_cpu.toml"),
    }
    command = [str(ROOT / "launch" / "run_train.sh"), "--job.dump_folder", str(folder), *FEW_STEPS]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return load_model(folder)


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    """Beginnings of twenty held-out files."""
    from torchtitan_ext.data.sources import stdlib_source

    source = stdlib_source(split="validation", fraction=0.05)
    texts = (source.read(i) for i in range(source.size))
    starts = [loaded.tokenizer.encode(text)[:64] for text in texts if len(text) > 300]
    return starts[:20]


@pytest.fixture(scope="module")
def plain(loaded, prompts):
    from torchtitan_ext.decoding import generate

    return generate(loaded.model, prompts, max_new_tokens=200)


@pytest.mark.parametrize("draft_length", [4, 8, 16])
def test_greedy_is_plain_greedy_token_for_token(loaded, prompts, plain, draft_length):
    from torchtitan_ext.decoding import decoder_for

    decode = decoder_for("tidar")
    ours = decode(loaded.model, prompts, max_new_tokens=200, draft_length=draft_length)
    assert len(prompts) == 20
    for theirs, row in zip(plain, ours, strict=True):
        assert row.new_tokens == theirs.new_tokens
        assert len(row.new_tokens) == 200
    assert plain.tokens_per_forward == 1
    # Even a fifth of the run drafts better than a token a forward.
    assert ours.tokens_per_forward > 1.3
