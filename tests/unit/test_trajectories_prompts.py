"""Where prompts come from, fingerprints of backbones and tokenizers, and the tool's command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.unit.test_trajectories_common import load, trajectories_of, weights, write_checkpoint
from tools import make_trajectories
from torchtitan_ext import backbones
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.decoding.masked_diffusion import generate
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.trajectories.fingerprint import backbone_fingerprint, tokenizer_fingerprint
from torchtitan_ext.trajectories.make import denoiser_of
from torchtitan_ext.trajectories.prompts import open_prompts

SIZE = backbones.lookup("llada-debug")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def loaded(checkpoint) -> LoadedModel:
    return load(checkpoint)


def texts(loaded: LoadedModel, source: Path | str, **options) -> list[str]:
    options = {"count": None, "seed": 0, "longest": 100, **options}
    return [loaded.tokenizer.decode(p) for p in open_prompts(loaded, str(source), **options).tokens]


# --- prompts ---------------------------------------------------------------------------


def test_lines_of_a_file_in_the_order_of_the_seed(loaded, tmp_path):
    path = tmp_path / "prompts.txt"
    lines = [f"line {i}" for i in range(9)] + ["x" * 30]
    path.write_text("\n".join(lines) + "\n\n")
    everything = texts(loaded, path)
    assert sorted(everything) == sorted(lines) and everything != lines
    assert texts(loaded, path) == everything != texts(loaded, path, seed=1)
    assert texts(loaded, path, count=3) == everything[:3]
    short = open_prompts(loaded, str(path), count=None, seed=0, longest=29)
    assert [loaded.tokenizer.decode(p) for p in short.tokens] == [t for t in everything if len(t) < 30]
    assert short.description["left_out"] == 1 and short.judge is None
    with pytest.raises(UserError, match=r"has 9 prompts of up to 29 tokens \(1 are longer\), but 10 are"):
        open_prompts(loaded, str(path), count=10, seed=0, longest=29)


def test_the_digest_tells_prompts_apart(loaded, tmp_path):
    path, digests = tmp_path / "prompts.txt", []
    for text in ("ab\nc", "a\nbc", "ab\nc"):
        path.write_text(text)
        digests.append(open_prompts(loaded, str(path), count=None, seed=0, longest=9).description["digest"])
    assert digests[0] == digests[2] != digests[1]


def test_conversations_end_where_the_last_answer_begins(loaded, tmp_path):
    path = tmp_path / "chat.jsonl"
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
    ask = {"role": "user", "content": "So?"}
    for messages, asked in [
        ([user, answer], [user]),
        ([user], [user]),
        ([user, answer, ask, answer, answer], [user, answer, ask]),
    ]:
        path.write_text(json.dumps({"messages": messages}) + "\n")
        (prompt,) = open_prompts(loaded, str(path), count=1, seed=0, longest=500).tokens
        whole = loaded.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        assert prompt == loaded.tokenizer.encode(whole)
    path.write_text(json.dumps({"prompt": "2 + 2 =", "completion": " 4"}) + "\n")
    assert texts(loaded, path, processor="completion") == ["2 + 2 ="]


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("chain_sun", {}, "is no task; did you mean 'chain_sum'"),
        ("chain_sum", {"count": None}, "--count is needed: the task 'chain_sum' has no end"),
        ("chain_sum", {"count": 0}, "--count must be at least 1, got 0"),
        ("chain_sum", {"longest": 3}, "sample 0 of chain_sum has .* tokens; with the response at most 3 fit"),
        ("chain_sum", {"longest": 0}, "leaves no room for a prompt"),
        ("chain_sum", {"processor": "gsm8k"}, "--processor has no use for the task"),
        ("group_retrieval", {}, "the task 'group_retrieval' is not in words"),
        ("chain_sum", {"knobs": {"nodes": 9}}, "nodes belongs to another task"),
        ("{tmp}/answers.jsonl", {}, "holds nothing but answers in the record"),
        ("{tmp}/answers.jsonl", {"processor": "gsm"}, "unknown processor.*did you mean 'gsm8k'"),
        ("{tmp}/answers.jsonl", {"knobs": {"max_digits": 2}}, "--max-digits belongs to a task"),
        ("{tmp}/mixed", {}, "holds both .txt and other files"),
        ("{tmp}/empty.txt", {}, "has 0 prompts"),
        ("{tmp}/none.txt", {}, "no file that is there"),
    ],
)
def test_sources_that_do_not_work_are_refused(loaded, tmp_path, source, options, message):
    only = json.dumps({"messages": [{"role": "assistant", "content": "Yo"}]}) + "\n"
    (tmp_path / "answers.jsonl").write_text(only)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    (tmp_path / "mixed" / "b.jsonl").write_text(only)
    options = {"count": 1, "seed": 0, "longest": 100, **options}
    with pytest.raises(UserError, match=message):
        open_prompts(loaded, source.format(tmp=tmp_path), **options)


# --- fingerprints ----------------------------------------------------------------------


def test_a_backbone_has_one_fingerprint_in_every_form(checkpoint, tmp_path):
    expected = backbone_fingerprint(checkpoint, size=SIZE)
    state = weights()
    assert backbone_fingerprint(write_checkpoint(tmp_path / "copy"), size=SIZE) == expected
    added = write_checkpoint(tmp_path / "added", extra={"layers.0.temporal.wq.weight": torch.ones(2)})
    assert backbone_fingerprint(added, size=SIZE) == expected
    adapter = backbones.HFAdapter(backbones.build_config(SIZE, attention="dense", max_seq_len=1), None)
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file({k: v.clone() for k, v in adapter.to_hf(state).items()}, hf / "model.safetensors")
    assert backbone_fingerprint(hf, size=SIZE) == expected
    # The same values in another dtype.
    short = {name: tensor.bfloat16() for name, tensor in state.items()}
    digests = set()
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        dcp.save({k: v.to(dtype) for k, v in short.items()}, checkpoint_id=folder, no_dist=True)
        digests.add(backbone_fingerprint(folder, size=SIZE))
    assert len(digests) == 1 and expected not in digests


def test_any_change_of_a_backbone_changes_its_fingerprint(checkpoint, tmp_path):
    seen = {backbone_fingerprint(checkpoint, size=SIZE)}
    names = sorted(weights())
    for i, name in enumerate([names[0], names[len(names) // 2], names[-1]]):
        state = {**weights(), name: weights()[name].clone()}
        state[name].view(-1)[-1] += 1e-6
        dcp.save(state, checkpoint_id=tmp_path / str(i), no_dist=True)
        seen.add(backbone_fingerprint(tmp_path / str(i), size=SIZE))
    seen.add(backbone_fingerprint(checkpoint, size=dataclasses.replace(SIZE, rope_theta=1e4)))
    assert len(seen) == 5


def test_a_folder_without_the_backbone_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"does not hold the backbone, whose .* is \[.*\]: it (has|lacks)"):
        backbone_fingerprint(checkpoint, size=backbones.lookup("dream-debug"))
    state = dict(weights())
    del state["norm.weight"]
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UserError, match=r"whose norm.weight is \[64\]: it lacks it"):
        backbone_fingerprint(tmp_path, size=SIZE)


def test_a_mask_token_of_the_config_is_no_part_of_the_tokenizer(tmp_path):
    def build(**options) -> Tokenizer:
        return Tokenizer.Config(kind="byte", **options).build(tokenizer_path="")

    plain = build()
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(build(mask_token_id=263))
    other = build()
    other.core.roles = {**other.core.roles, "eos": None}
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(plain)
    renamed = build()
    names = renamed.core.id_to_token
    renamed.core.id_to_token = lambda i: "?" if i == 65 else names(i)
    assert tokenizer_fingerprint(renamed) != tokenizer_fingerprint(plain)


# --- the tool --------------------------------------------------------------------------


def run_tool(checkpoint: Path, out: Path, *args: str, source: str = "chain_sum") -> None:
    fixed = ["--prompts", source, "--response-length", "5", "--out", str(out)]
    make_trajectories.main([str(checkpoint), *fixed, *args])


def test_the_tool_makes_a_set_and_says_what_came_out(checkpoint, tmp_path, capsys):
    args = ["--count", "5", "--shard-size", "2", "--block-size", "3", "--max-digits", "1"]
    run_tool(checkpoint, tmp_path / "set", *args)
    shown = capsys.readouterr()
    assert "5 trajectories of 5 steps in 3 shards" in shown.out and "0 answers right (0.00%)" in shown.out
    assert shown.out.count("\n") == 1
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert manifest["identity"]["recipe"]["block_size"] == 3
    assert manifest["identity"]["prompts"]["max_digits"] == 1
    first = trajectories_of(tmp_path / "set")
    assert [one.index for one in first] == [0, 1, 2, 3, 4] and len(first[0].response) == 5
    run_tool(checkpoint, tmp_path / "set", *args, "--batch-size", "2")
    assert capsys.readouterr().out == shown.out


def test_the_tool_answers_the_prompts_of_a_file(checkpoint, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("abc\nde\n" + "x" * 50)
    run_tool(checkpoint, tmp_path / "set", "--max-prompt-tokens", "10", source=str(tmp_path / "p.txt"))
    assert "right" not in capsys.readouterr().out
    found = trajectories_of(tmp_path / "set")
    assert sorted(len(one.prompt) for one in found) == [3, 4] and all(one.right is None for one in found)
    identity = json.loads((tmp_path / "set" / "manifest.json").read_text())["identity"]
    assert identity["recipe"]["block_size"] == 4  # the model's
    assert identity["prompts"]["left_out"] == 1 and identity["prompts"]["source"] == "p.txt"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--count", "3", "--response-length", "0"], "--response-length must be at least 1, got 0"),
        (["--count", "3", "--block-size", "0"], "--block-size must be at least 1, got 0"),
        (["--count", "3", "--shard-size", "0"], "--shard-size must be at least 1, got 0"),
        (["--count", "3", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--count", "3", "--dtype", "float31"], "unknown --dtype 'float31'"),
        (["--count", "3", "--response-length", "2048"], "leaves no room for a prompt"),
        (["--count", "3", "--max-prompt-tokens", "2044"], "expected 1 to 2043"),
        ([], "--count is needed"),
    ],
)
def test_the_tool_refuses_bad_options(checkpoint, tmp_path, args, message):
    with pytest.raises(UserError, match=message):
        run_tool(checkpoint, tmp_path / "set", *args)
    assert not (tmp_path / "set").exists()


def test_the_tool_refuses_what_does_not_denoise(tmp_path):
    size = backbones.lookup("smollm2-debug")
    model = backbones.build_config(size, attention="dense", max_seq_len=1).build()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ar", no_dist=True)
    (tmp_path / "ar" / "config.toml").write_text('[model]\nname = "ar"\nflavor = "smollm2-debug"\n')
    with pytest.raises(UserError, match="model of method 'ar'; trajectories need a bidirectional one"):
        run_tool(tmp_path / "ar", tmp_path / "set", "--count", "2")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file, expected a folder"):
        run_tool(tmp_path / "ar", tmp_path / "file", "--count", "2")


@pytest.mark.parametrize("flavor, prediction", [("llada-debug", "own"), ("dream-debug", "shifted")])
def test_a_hugging_face_folder_is_a_backbone_too(tmp_path, capsys, flavor, prediction):
    size = dataclasses.replace(backbones.lookup(flavor), mask_token_id=262)
    model = backbones.build_config(size, attention="dense", max_seq_len=1).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    hf = tmp_path / "hf"
    hf.mkdir()
    state = backbones.HFAdapter(model.config, None).to_hf(model.state_dict())
    save_file({name: tensor.clone() for name, tensor in state.items()}, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(backbones.hf_config(size)))
    (tmp_path / "p.txt").write_text("abc\nde")
    run_tool(hf, tmp_path / "set", source=str(tmp_path / "p.txt"))
    recipe = json.loads((tmp_path / "set" / "manifest.json").read_text())["identity"]["recipe"]
    assert recipe["mask_id"] == 262 and recipe["prediction"] == prediction and recipe["block_size"] == 32
    found = trajectories_of(tmp_path / "set")
    options = {"max_new_tokens": 5, "mask_id": 262, "block_size": 32, "prediction": prediction}
    loaded = load(hf)
    for one in found:
        (trace,) = generate(loaded.model, [one.prompt], **options).extra["traces"]
        assert (trace["tokens"], trace["steps"]) == (one.response, one.reveal_step)


def test_the_mask_token_may_be_the_tokenizers_but_must_be_known(tmp_path):
    dcp.save(weights(), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.toml").write_text('[model]\nname = "ar"\nflavor = "llada-debug"\n')
    plain = load(tmp_path)
    assert denoiser_of(plain).mask_id == plain.tokenizer.mask_id
    plain.tokenizer.mask_id = None
    with pytest.raises(UserError, match="neither its config nor its tokenizer names a mask token"):
        denoiser_of(plain)


def test_an_error_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_cli(lambda: run_tool(tmp_path / "none", tmp_path / "set"))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"error: {tmp_path / 'none'} is not there\n")
