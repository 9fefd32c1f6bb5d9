"""The real SmolLM2-135M-Instruct from end to end; needs its PyPI package, so it runs by hand.

python -m pytest -m slow tests/e2e/test_real_model.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run
from tests.paths import ROOT, shared_data

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Once upon a time, there was a little",
    "The three primary colours are",
]


def tool(name: str, *args: str) -> str:
    """Standard output of a tool, run as a user would."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def smollm(tmp_path_factory) -> Path:
    """The fetched folder; ``TORCHTITAN_EXT_SMOLLM2`` names one that is there already."""
    if "TORCHTITAN_EXT_SMOLLM2" in os.environ:
        return Path(os.environ["TORCHTITAN_EXT_SMOLLM2"])
    folder = tmp_path_factory.mktemp("assets") / "smollm2"
    tool("fetch_assets", "smollm2-135M-instruct", str(folder))
    return folder


@pytest.fixture(scope="session")
def converted(smollm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "step-0"
    tool("convert_from_hf", str(smollm), str(folder), "--model.flavor", "smollm2-135M")
    return folder


def test_generates_paris_from_the_folder_and_from_the_checkpoint(smollm, converted):
    for path in (smollm, converted):
        out = tool("generate", str(path), "--prompt", PROMPTS[0], "--max-new-tokens", "8", "--json")
        result = json.loads(out.strip().splitlines()[-1])
        assert result["text"].removeprefix(PROMPTS[0]).startswith(" Paris"), result
        assert result["forwards"] >= result["new_tokens"] == 8 and result["seconds"] > 0


def test_greedy_text_equals_transformers(smollm):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torchtitan_ext.checkpoint.load import load_model
    from torchtitan_ext.decoding.autoregressive import generate
    from torchtitan_ext.decoding.sampling import SamplingParams

    torch.set_num_threads(2)
    theirs = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    ours = load_model(smollm)
    prompts = [tokenizer(p)["input_ids"] for p in PROMPTS]
    assert prompts == [ours.tokenizer.encode(p) for p in PROMPTS]
    stop = [theirs.generation_config.eos_token_id]
    batch = generate(ours.model, prompts, max_new_tokens=40, sampling=SamplingParams(), stop_ids=stop)
    assert sum(len(row.new_tokens) for row in batch.results) > 100
    for prompt, got in zip(prompts, batch.results, strict=True):
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=40,
                do_sample=False,
            )[0, len(prompt) :]
        assert list(got.new_tokens) == expected.tolist(), tokenizer.decode(prompt)


def first_layers(folder: Path, target: Path, count: int) -> None:
    """A Hugging Face folder of the model's first ``count`` layers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.config.layer_types = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)


def test_chat_fine_tuning_lowers_the_loss(smollm, tmp_path):
    """20 steps on GSM8K with the first four layers; two ranks, from the Hugging Face folder."""
    data = shared_data()
    if data is None or not (data / "gsm8k" / "train.jsonl").is_file():
        pytest.skip("no GSM8K")
    small = tmp_path / "small"
    first_layers(smollm, small, 4)
    args = [
        *("--model.flavor", "hf", "--model.hf_assets_path", str(small)),
        *("--checkpoint.enable", "--checkpoint.interval", "100"),
        *("--checkpoint.initial_load_path", str(small), "--checkpoint.initial_load_in_hf"),
        *("--dataloader.dataset", "chat", "--dataloader.processor", "gsm8k"),
        *("--dataloader.dataset_path", str(data / "gsm8k" / "train.jsonl")),
        *("--training.local_batch_size", "2", "--training.seq_len", "256", "--training.steps", "20"),
        *("--optimizer.lr", "5e-4", "--loss.num_chunks", "4"),
    ]
    result = run(jobs.train, world=2, folder=str(tmp_path), args=args, timeout=900)[0]
    losses = list(result["loss"].values())
    assert len(losses) == 20
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.5


def test_round_trip_of_the_real_model_is_byte_identical(smollm, converted, tmp_path):
    from torchtitan_ext.checkpoint import hf_folder

    back = tmp_path / "back"
    tool("convert_to_hf", str(converted), str(back))
    before, after = hf_folder.read_tensors(smollm), hf_folder.read_tensors(back)
    assert before.keys() == after.keys()
    for name in before:
        a, b = hf_folder.load_tensor(before[name]), hf_folder.load_tensor(after[name])
        assert a.dtype == b.dtype and torch.equal(a, b), name


def test_tidar_decodes_what_the_loaded_model_decodes(smollm, tmp_path):
    """Never trained to draft, so the drafts are poor; the output is still that of plain decoding."""
    folder = tmp_path / "step-0"
    # Its vocabulary is full, so a token in use stands in; a run that trains would refuse it.
    mask = ["--tidar.mask_token_id", "17"]
    tool(
        *("convert_from_hf", str(smollm), str(folder), "--model.name", "tidar"),
        *("--model.flavor", "smollm2-135M", *mask),
    )
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    shared = [*prompts, "--max-new-tokens", "40", "--json"]
    plain = json.loads(tool("generate", str(smollm), *shared))["results"]
    ours = json.loads(tool("generate", str(folder), "--decode", "tidar:4", *shared))["results"]
    assert [row["text"] for row in ours] == [row["text"] for row in plain]
    assert all(row["tokens_per_forward"] >= 1 for row in ours)
