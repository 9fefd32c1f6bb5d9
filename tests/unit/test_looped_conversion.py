"""A folder exported from a looped model says how it is run."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.methods.looped.decode import decode

KINDS = {
    "middle": ["--looped.kind", "middle", "--looped.start", "2", "--looped.end", "3", "--looped.loops", "3"],
    "full": ["--looped.kind", "full", "--looped.loops", "2"],
    "pause": ["--looped.kind", "pause", "--looped.pause_tokens", "1"],
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_way_to_a_folder_and_back(kind, tmp_path):
    args = ["--model.name", "looped", *KINDS[kind], "--checkpoint.enable", "--training.steps", "2"]
    run(jobs.train, world=1, folder=str(tmp_path), args=args)
    trained = tmp_path / "out" / "checkpoint" / "step-2"
    convert_to_hf(trained, tmp_path / "hf")
    convert_from_hf(tmp_path / "hf", tmp_path / "back")
    prompts = [[1, 2, 3], [7, 8, 9, 10, 11]]
    expected = [r.new_tokens for r in decode(load_model(trained).model, prompts, max_new_tokens=8)]
    for path in (tmp_path / "hf", tmp_path / "back"):
        loaded = load_model(path)
        assert loaded.method == "looped"
        assert [r.new_tokens for r in decode(loaded.model, prompts, max_new_tokens=8)] == expected
        for name, tensor in load_model(trained).model.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], tensor), name
