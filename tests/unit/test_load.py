"""Loading for decoding and evaluation, and the generate tool on top of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.paths import ROOT
from tests.unit import test_tokenizer_kinds as kinds
from tests.unit.test_data_chat import INSTRUCT
from tools.train_tokenizer import train, write_files
from torchtitan_ext import backbones
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import find_folder, load_model
from torchtitan_ext.data import chat_templates
from torchtitan_ext.data.chat import encode_conversation
from torchtitan_ext.decoding import generate
from torchtitan_ext.errors import UserError, run_cli

TOML = """
[model]
name = "ar"
flavor = "{flavor}"

[debug]
seed = 3
"""
CAUSAL = ("smollm2-debug", "qwen2_5-debug", "qwen3-debug")
TOKENS = torch.arange(40, 60)[None]


def random_model(size: backbones.BackboneSize) -> backbones.Backbone:
    model = backbones.build_config(size, attention="dense").build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    positions = torch.arange(TOKENS.shape[1])[None]
    with torch.no_grad():
        return model(TOKENS, positions, model.get_attention_masks(positions))


def write_checkpoint(
    folder: Path, model: torch.nn.Module, *, flavor: str = "smollm2-debug", extra=None
) -> Path:
    """A checkpoint as training writes it: weights beside optimizer and trainer state."""
    state = {
        **model.state_dict(),
        "optimizer.state.layers.0.attention.wo.weight.exp_avg": torch.ones(3),
        "optimizer.param_groups.layers.0.attention.wo.weight.lr": 0.1,
        "lr_scheduler.last_epoch": 4,
        "train_state": {"step": 4},
        **(extra or {}),
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.toml").write_text(TOML.format(flavor=flavor))
    return folder


def write_hf(folder: Path, model: backbones.Backbone, **config) -> Path:
    folder.mkdir()
    adapter = backbones.HFAdapter(model.config, None)
    save_file(
        {k: v.clone() for k, v in adapter.to_hf(model.state_dict()).items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**backbones.hf_config(model.config.size), **config}))
    return folder


@pytest.fixture(scope="module")
def model() -> backbones.Backbone:
    torch.manual_seed(0)
    return random_model(backbones.lookup("smollm2-debug"))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    """A dump folder with two whole checkpoints of different weights."""
    dump = tmp_path_factory.mktemp("run")
    older = random_model(backbones.lookup("smollm2-debug"))
    write_checkpoint(dump / "checkpoint" / "step-2", older)
    write_checkpoint(dump / "checkpoint" / "step-10", model)
    return dump


@pytest.mark.parametrize("flavor", [*CAUSAL, "llada-debug", "dream-debug"])
def test_a_checkpoint_with_optimizer_state_gives_the_same_logits(flavor, tmp_path):
    torch.manual_seed(1)
    model = random_model(backbones.lookup(flavor))
    loaded = load_model(write_checkpoint(tmp_path / "step-4", model, flavor=flavor))
    assert torch.equal(logits(loaded.model), logits(model))
    assert (loaded.method, loaded.flavor, loaded.path) == ("ar", flavor, tmp_path / "step-4")
    assert loaded.config_dict["model"]["flavor"] == flavor and loaded.config.debug.seed == 3
    assert loaded.tokenizer.kind == "byte" and loaded.stop_ids == {loaded.tokenizer.eos_id}
    assert loaded.add_bos
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    tied = loaded.model.tok_embeddings.weight is loaded.model.lm_head.weight
    assert tied == model.config.size.tied


@pytest.mark.parametrize("flavor", [*CAUSAL, "llada-debug", "dream-debug"])
def test_a_hugging_face_folder_gives_the_same_logits(flavor, tmp_path):
    torch.manual_seed(1)
    model = random_model(backbones.lookup(flavor))
    loaded = load_model(write_hf(tmp_path / "hf", model, eos_token_id=[5, 6]))
    assert torch.equal(logits(loaded.model), logits(model))
    assert (loaded.method, loaded.flavor) == ("ar", "hf")
    assert loaded.stop_ids == {5, 6, loaded.tokenizer.eos_id}


@pytest.mark.parametrize(
    "template", [chat_templates.CHATML, chat_templates.DEFAULT, chat_templates.LLAMA3, INSTRUCT]
)
def test_every_answer_ends_in_a_token_that_ends_decoding(template, model, tmp_path):
    """The last target of each answer: what stands behind it is not learnt, so decoding must end there."""
    folder = write_checkpoint(tmp_path / "step-4", model) / "hf_assets"
    folder.mkdir(exist_ok=True)
    end = "<|eot_id|>" if template == chat_templates.LLAMA3 else "<|im_end|>"
    write_files(train(iter(["some text"]), vocab_size=262, min_frequency=2), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "additional_special_tokens": ["<|im_start|>", end]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_model(folder.parent)
    talk = [{"role": role, "content": "ab c"} for role in ("user", "assistant") * 2]
    document = encode_conversation(loaded.tokenizer, talk)
    assert document is not None
    targets = document.labels != -100
    ends = document.labels[targets & ~np.append(targets[1:], False)]
    assert len(ends) >= 2 and set(ends.tolist()) <= loaded.stop_ids
    assert loaded.tokenizer.eos_id in loaded.stop_ids and len(loaded.stop_ids) <= 2
    exported = convert_to_hf(folder.parent, tmp_path / "hf")
    assert load_model(exported).stop_ids >= loaded.stop_ids
    stops = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    assert loaded.stop_ids <= ({stops} if isinstance(stops, int) else set(stops))


def test_the_rotary_tables_cover_the_context_and_are_shared(run):
    loaded = load_model(run)
    tables = [block.attention.rope.cache for block in loaded.model.layers.values()]
    assert tables[0].shape[0] == backbones.lookup("smollm2-debug").context
    assert len({table.data_ptr() for table in tables}) == 1
    assert tables[0].dtype == torch.float32


def test_the_newest_whole_checkpoint_is_taken(run, model, tmp_path):
    for path in (run, run / "checkpoint", run / "checkpoint" / "step-10"):
        assert load_model(path).path == run / "checkpoint" / "step-10"
    assert torch.equal(logits(load_model(run).model), logits(model))
    older = load_model(run, step=2)
    assert older.path.name == "step-2" and not torch.equal(logits(older.model), logits(model))
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "checkpoint" / "step-10" / ".metadata").unlink()
    assert find_folder(damaged) == damaged / "checkpoint" / "step-2"
    for action in (
        lambda: find_folder(damaged, step=10),
        lambda: find_folder(damaged / "checkpoint" / "step-10"),
    ):
        with pytest.raises(UserError, match=r"step-10 cannot be loaded.*did not finish"):
            action()


def test_a_warning_names_the_checkpoint_that_was_passed_over(run, tmp_path, caplog):
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    shard = next((damaged / "checkpoint" / "step-10").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert find_folder(damaged).name == "step-2"
    assert "step-10" in caplog.text and "using step-2" in caplog.text


def test_dtype(run, model):
    loaded = load_model(run, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    weight = loaded.model.layers["0"].attention.wo.weight
    assert torch.equal(weight, model.layers["0"].attention.wo.weight.bfloat16())
    assert generate(loaded.model, [[1, 2], [3]], max_new_tokens=4).new_tokens == 8


def test_what_is_not_a_model_is_refused(tmp_path, run):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "absent", "absent is not there"),
        (tmp_path / "file", "not a folder"),
        (tmp_path / "empty", "no step-N folder.*no Hugging Face folder"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(path)
    with pytest.raises(UserError, match=r"no step-7 \(it has 2, 10\)"):
        load_model(run, step=7)
    with pytest.raises(UserError, match="no step 7"):
        load_model(tmp_path / "empty", step=7)


def test_weights_without_a_config_are_refused(run, tmp_path):
    shutil.copytree(run / "checkpoint" / "step-2", tmp_path / "step-2")
    (tmp_path / "step-2" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"no config.toml and no config.json"):
        load_model(tmp_path / "step-2")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("norm.weight"), "missing norm.weight"),
        (lambda state: state.update({"gate.weight": torch.ones(2)}), "unexpected gate.weight"),
        (lambda state: state.update({"norm.weight": torch.ones(2)}), r"norm.weight is \[2\], .* \[64\]"),
    ],
)
def test_tensors_that_are_not_exactly_the_models_are_refused(change, message, model, tmp_path):
    state = dict(model.state_dict())
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / "config.toml").write_text(TOML.format(flavor="smollm2-debug"))
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "step-1")


def test_a_damaged_hugging_face_folder_is_refused(model, tmp_path):
    folder = write_hf(tmp_path / "hf", model)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"missing model\.norm\.weight"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(folder)


def test_flavor_hf_takes_the_size_from_the_assets_beside_the_weights(tmp_path):
    torch.manual_seed(2)
    size = dataclasses.replace(backbones.lookup("qwen3-debug"), n_layers=2, dim=32, context=128)
    model = random_model(size)
    folder = write_checkpoint(tmp_path / "step-1", model, flavor="hf")
    (folder / "hf_assets").mkdir()
    (folder / "hf_assets" / "config.json").write_text(json.dumps(backbones.hf_config(size)))
    (folder / "hf_assets" / "generation_config.json").write_text('{"eos_token_id": 9}')
    loaded = load_model(folder)
    assert torch.equal(logits(loaded.model), logits(model))
    assert 9 in loaded.stop_ids


def test_the_tokenizer_beside_the_weights_wins(run, tmp_path):
    folder, elsewhere = tmp_path / "step-2", tmp_path / "elsewhere"
    shutil.copytree(run / "checkpoint" / "step-2", folder)
    write_tokenizer(elsewhere, words=["here", "there"])
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("[debug]", f'hf_assets_path = "{elsewhere}"\n[debug]'))
    assert load_model(folder).tokenizer.encode("there") == [1]
    write_tokenizer(folder / "hf_assets", words=["there", "here"])
    assert load_model(folder).tokenizer.encode("there") == [0]


def test_a_tokenizer_that_is_asked_for_and_absent_is_refused(run, tmp_path):
    shutil.copytree(run / "checkpoint" / "step-2", tmp_path / "step-2")
    with (tmp_path / "step-2" / "config.toml").open("a") as file:
        file.write('\n[tokenizer]\nkind = "hf"\n')
    with pytest.raises(UserError, match="needs a hf tokenizer"):
        load_model(tmp_path / "step-2")


def write_tokenizer(folder: Path, *, words: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


# --- tools/generate.py -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


def answers(tool, capsys, *argv: str) -> dict:
    tool.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_generate_prints_prompt_and_text(tool, run, model, capsys):
    tool.main([str(run), "--prompt", "né", "--max-new-tokens", "12"])
    out = capsys.readouterr().out
    loaded = load_model(run)
    ids = loaded.tokenizer.encode("né", add_bos=True)
    want = generate(model, [ids], max_new_tokens=12, stop_ids=loaded.stop_ids)[0].new_tokens
    assert out == f"né{loaded.tokenizer.decode(want)}\n"


def test_generate_json_of_one_and_of_several_prompts(tool, run, capsys, tmp_path):
    one = answers(tool, capsys, str(run), "--prompt", "ab", "--max-new-tokens", "9")
    assert set(one) >= {"text", "new_tokens", "forwards", "seconds", "tokens_per_second"}
    assert one["new_tokens"] == one["forwards"] == 9 and one["finish_reason"] == "length"
    (tmp_path / "prompts").write_text("ab\n\nabc\n")
    options = ["--prompts-file", str(tmp_path / "prompts"), "--max-new-tokens", "9", "--batch-size", "2"]
    many = answers(tool, capsys, str(run), "--prompt", "x", *options)["results"]
    assert [answer["prompt"] for answer in many] == ["x", "ab", "abc"]
    assert many[1]["text"] == one["text"]


def test_generate_draws_the_same_in_any_batch(tool, run, capsys):
    options = [str(run), "--max-new-tokens", "8", "--temperature", "1"]
    prompts = ["--prompt", "a", "--prompt", "longer", "--prompt", "b"]
    small = answers(tool, capsys, *options, *prompts, "--batch-size", "1")["results"]
    large = answers(tool, capsys, *options, *prompts)["results"]
    single = answers(tool, capsys, *options, "--prompt", "longer", "--seed", "1")
    assert [a["text"] for a in small] == [a["text"] for a in large]
    assert single["text"] == large[1]["text"]


def test_bos_as_in_training_or_as_the_tokenizer_of_a_folder_has_it(tool, tmp_path):
    """transformers gives a published model the same ids."""
    run = write_checkpoint(tmp_path / "step-1", random_model(backbones.lookup("smollm2-debug")))
    kinds.write_hf(run / "hf_assets", config={"bos_token": "<s>"})
    folder = convert_to_hf(run, tmp_path / "hf")
    converted = convert_from_hf(folder, tmp_path / "converted")
    for path, with_bos in ((run, True), (folder, False), (converted, False)):
        loaded = load_model(path)
        bos = loaded.tokenizer.bos_id
        assert bos is not None and loaded.add_bos == with_bos
        assert (tool.encode(loaded, "hi", chat=False)[0] == bos) == with_bos


def test_generate_tells_what_the_chat_template_refuses(tool, run):
    loaded = load_model(run)
    loaded.tokenizer.set_chat_template("{{ raise_exception('ask nothing') }}")
    with pytest.raises(UserError, match="the chat template refuses a conversation: ask nothing"):
        tool.encode(loaded, "hi", chat=True)


def test_generate_stops_at_text_and_uses_the_chat_template(tool, run, capsys):
    free = answers(tool, capsys, str(run), "--chat", "--prompt", "hi", "--max-new-tokens", "30")
    plain = answers(tool, capsys, str(run), "--prompt", "hi", "--max-new-tokens", "30")
    assert free["text"] != plain["text"]
    stop = plain["text"][4:6]
    cut = answers(tool, capsys, str(run), "--prompt", "hi", "--max-new-tokens", "30", "--stop", stop)
    assert cut["text"] == plain["text"][: plain["text"].index(stop)]
    assert cut["finish_reason"] == "stop" and cut["new_tokens"] < 30


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "no prompt"),
        (["--prompt", "x", "--dtype", "float23"], "did you mean 'float32'"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", "x", "--device", "abacus"], "--device abacus cannot be used"),
        (["--prompt", "x", "--max-new-tokens", "5000"], "longer than the 2048"),
        (["--prompts-file", "absent.txt"], "absent.txt"),
        (["--prompt", "x", "--batch-size", "0"], "--batch-size"),
        (["--prompt", "x", "--step", "3"], "no step-3"),
    ],
)
def test_generate_refuses(tool, run, argv, message):
    with pytest.raises(UserError, match=message):
        tool.main([str(run), *argv])


def test_generate_as_a_command(run, tmp_path):
    """Prompts on stdin; nothing but the answer on stdout."""
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), str(run)]
    options = ["--prompts-file", "-", "--json", "--max-new-tokens", "3"]
    done = subprocess.run([*command, *options], input="a\nb\n", capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"]) == 2
    assert "Traceback" not in done.stderr


def test_an_error_of_generate_is_one_line_and_exit_code_2(tool, capsys):
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: tool.main(["absent", "--prompt", "x"]))
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    assert captured.err == "error: absent is not there\n"
