"""Exports open without this package: by their own code, as the plain backbone, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.hf_exports import CASES, SLOW, exported, native
from tests.unit.test_hf_models import our_logits, tokens
from tools import convert_to_hf as to_tool
from torchtitan_ext.backbones import hf_config, lookup
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.checkpoint.remote import describe
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.decoding.strategies import decoder_of, parse
from torchtitan_ext.errors import UserError

transformers = pytest.importorskip("transformers")

PLAIN = {"tidar": "LlamaForCausalLM", "wedlm": "Qwen3ForCausalLM", "block_diffusion": "LlamaForCausalLM"}
FAST = tuple(case for case in sorted(CASES) if case not in SLOW)
PROMPTS = [[5, 17, 200, 3, 44], [9, 1]]
NEW, PAD, STOP = 6, 258, 261

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
folder, out = Path(sys.argv[1]), {}
for case, tokens in torch.load(folder / "inputs.pt").items():
    model = AutoModelForCausalLM.from_pretrained(folder / case / "hf", trust_remote_code=True)
    got = {"class": type(model).__name__, "training": model.training}
    prompts = torch.load(folder / "prompts.pt")
    with torch.no_grad():
        got["logits"] = model(tokens).logits
        mask = torch.ones_like(tokens)
        mask[:, :3] = 0
        got["padded"] = model(tokens, attention_mask=mask).logits[:, 3:]
        got["loss"] = model(tokens, labels=tokens).loss
    got["new"] = model.generate(
        **prompts, max_new_tokens=6, eos_token_id=261, pad_token_id=258, do_sample=False
    )[:, prompts["input_ids"].shape[1]:]
    out[case] = got
    try:
        opened = AutoModelForCausalLM.from_pretrained(folder / case / "hf", trust_remote_code=False)
        out[case]["plain"] = type(opened).__name__
    except ValueError as error:
        out[case]["plain"] = str(error)
if (folder / "broken").is_dir():
    try:
        AutoModelForCausalLM.from_pretrained(folder / "broken", trust_remote_code=True)
    except ValueError as error:
        out["broken"] = str(error)
assert "torchtitan" not in sys.modules and "torchtitan_ext" not in sys.modules
torch.save(out, folder / "out.pt")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Exports, and what a process without this package makes of them."""
    return run_elsewhere(tmp_path_factory.mktemp("remote"), FAST)


@pytest.fixture(scope="module")
def elsewhere_too(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The same for the other cases."""
    return run_elsewhere(tmp_path_factory.mktemp("remote"), SLOW)


def run_elsewhere(folder: Path, cases: tuple[str, ...]) -> tuple[Path, dict[str, Any]]:
    for case in cases:
        exported(folder / case, case)
    if "t2mlr" in cases:
        without_a_tensor(folder / "t2mlr" / "hf", folder / "broken")
    torch.save({case: tokens(case) for case in cases}, folder / "inputs.pt")
    ids = torch.tensor([PROMPTS[0], [PAD] * 3 + PROMPTS[1]])
    torch.save({"input_ids": ids, "attention_mask": (ids != PAD).long()}, folder / "prompts.pt")
    (folder / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment.update(HF_MODULES_CACHE=str(folder / "modules"), OMP_NUM_THREADS="1")
    run = subprocess.run(
        [sys.executable, str(folder / "script.py"), str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return folder, torch.load(folder / "out.pt")


def without_a_tensor(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    del tensors["core.fusion.g_current"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def check_case(case: str, folder: Path, got: dict[str, Any]) -> None:
    """Logits, loss and greedy tokens.

    The tokens are those of the method's decoder for models that fill masks, else of one token at a time.
    """
    assert got["class"] == "TorchtitanExtForCausalLM" and got["training"] is False
    expected = our_logits(folder / case / "step-1", case, tokens(case))
    # Rounding alone: normed from pass to pass, alodlm differs by 1.6e-5 here and by 1.6e-6 in float64.
    atol = 4e-5 if case == "alodlm-carry-norm" else 1e-5
    torch.testing.assert_close(got["logits"], expected, atol=atol, rtol=1e-5)
    alone = our_logits(folder / case / "step-1", case, tokens(case)[:, 3:])
    torch.testing.assert_close(got["padded"], alone, atol=1e-4, rtol=1e-4)
    assert got["loss"].isfinite() and got["loss"] > 0
    loaded = load_model(folder / case / "step-1")
    options: dict[str, Any] = {"prefill": "exact"} if loaded.method == "t2mlr" else {}
    decode = decoder_for(loaded.method)
    if loaded.method == "alodlm" or case == "block_diffusion-causal":
        decode = decoder_of(parse("ar"), loaded.model, method=loaded.method)
    rows = decode(loaded.model, PROMPTS, max_new_tokens=NEW, stop_ids=(STOP,), **options)
    width = got["new"].shape[1]
    assert got["new"].tolist() == [r.new_tokens + [PAD] * (width - len(r.new_tokens)) for r in rows]


@pytest.mark.parametrize("case", FAST)
def test_the_folders_own_code_computes_the_same(case, elsewhere):
    folder, out = elsewhere
    check_case(case, folder, out[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_the_folders_own_code_computes_the_same_for_other_choices(case, elsewhere_too):
    folder, out = elsewhere_too
    check_case(case, folder, out[case])


def test_without_consent_a_folder_is_its_backbone_or_is_refused(elsewhere):
    _, out = elsewhere
    for case, name in PLAIN.items():
        assert out[case]["plain"] == name
    for case in ("alodlm", "t2mlr", "looped-middle", "looped-pause", "tdlm", "mdlm"):
        assert "trust_remote_code=True" in out[case]["plain"]
    assert "missing_keys ['core.fusion.g_current']" in out["broken"]


def test_the_option_and_the_files_of_an_export(tmp_path):
    checkpoint, folder = exported(tmp_path, "tidar")
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoModelForCausalLM": "modeling_torchtitan_ext.TorchtitanExtForCausalLM"
    }
    convert_to_hf(checkpoint, tmp_path / "bare", self_contained=False)
    assert not (tmp_path / "bare" / describe.MODELLING).exists()
    assert "auto_map" not in json.loads((tmp_path / "bare" / "config.json").read_text())
    # Through a checkpoint and back, the code is this version's.
    (folder / describe.MODELLING).write_text("old")
    back = convert_to_hf(convert_from_hf(folder, tmp_path / "again"), tmp_path / "back")
    assert "class TorchtitanExtForCausalLM" in (back / describe.MODELLING).read_text()
    plain = convert_to_hf(convert_from_hf(folder, tmp_path / "ar", name="ar"), tmp_path / "plain")
    assert not (plain / describe.MODELLING).exists()
    assert not {"auto_map", "torchtitan_ext"} & set(json.loads((plain / "config.json").read_text()))


def test_the_methods_that_the_code_knows_are_those_it_is_compared_with():
    from torchtitan_ext.checkpoint.remote import modeling_torchtitan_ext as code

    assert set(describe.KNOWN) == set(code.METHODS) == {method for method, _, _ in CASES.values()}
    config = code.TorchtitanExtConfig(
        **{**hf_config(lookup("smollm2-debug")), "torchtitan_ext": {"name": "two_ahead", "section": {}}}
    )
    with pytest.raises(ValueError, match="method 'two_ahead' is not computed here"):
        code.TorchtitanExtForCausalLM(config)


def test_a_method_without_modelling_code_is_exported_without_it(tmp_path, monkeypatch, caplog):
    checkpoint = native(tmp_path / "step-1", "tidar")
    monkeypatch.setattr(describe, "KNOWN", tuple(name for name in describe.KNOWN if name != "tidar"))
    tool = [str(checkpoint), str(tmp_path / "hf")]
    with pytest.raises(UserError, match=r"^--self-contained: .* does not compute method 'tidar' \(allowed: "):
        to_tool.main([*tool, "--self-contained"])
    assert not (tmp_path / "hf").exists()
    for options, warnings in (([], 1), (["--no-self-contained"], 0)):
        caplog.clear()
        to_tool.main([*tool, *options])
        assert sum("does not compute method 'tidar'" in line for line in caplog.messages) == warnings
        assert not (tmp_path / "hf" / describe.MODELLING).exists()
        values = json.loads((tmp_path / "hf" / "config.json").read_text())
        assert "auto_map" not in values and values["torchtitan_ext"]["name"] == "tidar"
    assert convert_to_hf(native(tmp_path / "step-2", "wedlm"), tmp_path / "known", self_contained=True)
    assert (tmp_path / "known" / describe.MODELLING).exists()


def test_own_types_go_and_come_with_the_method(tmp_path):
    _, folder = exported(tmp_path, "looped-middle")
    values = json.loads((folder / "config.json").read_text())
    assert values["model_type"] == "torchtitan_ext_looped_qwen2"
    assert set(values["auto_map"]) == {"AutoConfig", "AutoModelForCausalLM"}
    plain = convert_to_hf(convert_from_hf(folder, tmp_path / "ar", name="ar"), tmp_path / "plain")
    values = json.loads((plain / "config.json").read_text())
    assert values["model_type"] == "qwen2" and values["architectures"] == ["Qwen2ForCausalLM"]


def test_published_code_stays_where_it_fits_and_goes_where_it_would_drop_tensors(tmp_path):
    _, folder = exported(tmp_path, "mdlm")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    theirs = {"AutoModel": "modeling_llada.LLaDAModelLM", "AutoConfig": "configuration_llada.LLaDAConfig"}
    path.write_text(json.dumps({**values, "auto_map": theirs}))
    checkpoint = convert_from_hf(folder, tmp_path / "mdlm")
    back = json.loads((convert_to_hf(checkpoint, tmp_path / "back") / "config.json").read_text())
    assert back["auto_map"] == theirs and back["model_type"] == "llada"
    section = {"heads": 2, "head_dim": 8, "mask_token_id": 260}
    checkpoint = convert_from_hf(folder, tmp_path / "tdlm", name="tdlm", section=section)
    back = json.loads((convert_to_hf(checkpoint, tmp_path / "new") / "config.json").read_text())
    assert back["model_type"] == "torchtitan_ext_tdlm_llada" and "modeling_llada" not in str(back["auto_map"])


def test_generation_config_names_the_tokenizers_special_tokens(tmp_path):
    from tokenizers import Tokenizer, models

    checkpoint, _ = exported(tmp_path, "tidar")
    assets = checkpoint / "hf_assets"
    assets.mkdir()
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(262)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="w255", eos_token="w257", pad_token="w258"
    ).save_pretrained(assets)
    folder = convert_to_hf(checkpoint, tmp_path / "with")
    values = json.loads((folder / "generation_config.json").read_text())
    known = load_model(checkpoint)
    assert values["bos_token_id"] == 255 and values["pad_token_id"] == 258
    eos = values["eos_token_id"]
    assert 257 in (eos if isinstance(eos, list) else [eos])
    assert load_model(folder).stop_ids >= known.stop_ids
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token_id == 257
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stops = model.generation_config.eos_token_id
    assert ({stops} if isinstance(stops, int) else set(stops)) == load_model(folder).stop_ids
    assert (model.generation_config.bos_token_id, model.generation_config.pad_token_id) == (255, 258)
    # One that is there is kept.
    (assets / "generation_config.json").write_text('{"eos_token_id": 3}')
    folder = convert_to_hf(checkpoint, tmp_path / "kept")
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 3}
