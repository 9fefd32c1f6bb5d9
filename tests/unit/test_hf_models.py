"""Exports of every method open in transformers and compute what the checkpoint computes."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.hf_exports import CASES, SLOW, exported

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM  # noqa: E402

import torchtitan_ext.checkpoint.hf as hf  # noqa: E402
from torchtitan_ext import masks  # noqa: E402
from torchtitan_ext.attention import build_mask  # noqa: E402
from torchtitan_ext.checkpoint import hf_folder  # noqa: E402
from torchtitan_ext.checkpoint.load import load_model  # noqa: E402
from torchtitan_ext.errors import UserError  # noqa: E402

PROMPT, LENGTH = [5, 17, 200, 3, 44], 12
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Case -> (checkpoint, folder), made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(case: str) -> tuple[Path, Path]:
        if case not in made:
            made[case] = exported(tmp_path_factory.mktemp(case), case)
        return made[case]

    return get


def tokens(case: str, rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Random tokens; some are masks where the model fills them."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 250, (rows, length), generator=generator)
    if CASES[case][0] in ("mdlm", "tdlm", "block_diffusion"):
        drawn[:, length // 2 :: 2] = 260
    return drawn


@torch.no_grad()
def our_logits(checkpoint: Path, case: str, tokens_BL: torch.Tensor) -> torch.Tensor:
    """One forward of the native checkpoint, written out for each kind of model."""
    model: Any = load_model(checkpoint).model
    config = model.config
    positions = torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL).contiguous()
    if case == "looped-pause":
        pauses = torch.full_like(tokens_BL, config.pause_token_id)
        wide = torch.stack([tokens_BL, pauses, pauses], dim=-1).flatten(1)
        positions = torch.arange(wide.shape[1]).expand_as(wide).contiguous()
        return model(wide, positions, model.get_attention_masks(positions))[:, 2::3]
    if case == "block_diffusion":
        block = positions[0] // 4
        return model(tokens_BL, positions, (block[:, None] >= block).expand(len(tokens_BL), 1, -1, -1))
    mask = build_mask(masks.DOCUMENT_MASKS[config.size.attention](positions), "dense")
    if case == "tdlm-current":
        from torchtitan_ext.methods.tdlm.decode import memory_of

        memory = memory_of(model)
        memory.begin(tokens_BL == 260)
        return model(tokens_BL, positions, mask, temporal=memory)
    return model(tokens_BL, positions, mask)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in sorted(CASES)],
)
def test_logits_are_those_of_the_checkpoint(case, exports):
    checkpoint, folder = exports(case)
    model = AutoModelForCausalLM.from_pretrained(folder)
    method = CASES[case][0]
    assert type(model) is hf.MODELS[method] and type(model.config) is hf.CONFIGS[method]
    assert not model.training and model.dtype == torch.float32
    tokens_BL = tokens(case)
    with torch.no_grad():
        logits = model(tokens_BL).logits
        last = model(tokens_BL, logits_to_keep=2).logits
    expected = our_logits(checkpoint, case, tokens_BL)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(last, expected[:, -2:], **CLOSE)
    with torch.no_grad():
        assert_padding_is_not_seen(model, tokens_BL[:1])


def assert_padding_is_not_seen(model: Any, row: torch.Tensor) -> None:
    """A row beside a longer one, padded on either side, has the logits it has alone."""
    pad = 5
    other = torch.randint(0, 250, (1, LENGTH + pad), generator=torch.Generator().manual_seed(2))
    filler, zeros = torch.full((1, pad), 260), torch.zeros(1, pad, dtype=torch.long)
    alone = model(row).logits
    for step, kept in ((1, slice(pad, None)), (-1, slice(None, LENGTH))):
        padded = torch.cat([filler, row][::step], dim=1)
        mask = torch.cat([zeros, torch.ones_like(row)][::step], dim=1)
        attention_mask = torch.cat([mask, torch.ones_like(other)])
        logits = model(torch.cat([padded, other]), attention_mask=attention_mask).logits
        torch.testing.assert_close(logits[:1, kept], alone, atol=1e-4, rtol=1e-4)


def test_packed_documents_do_not_see_each_other(exports):
    model = AutoModelForCausalLM.from_pretrained(exports("t2mlr")[1])
    rows = tokens("t2mlr")
    packed = rows.flatten()[None]
    position_ids = torch.arange(LENGTH).repeat(2)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(packed, position_ids=position_ids).logits.view(2, LENGTH, -1), model(rows).logits, **CLOSE
        )
    with pytest.raises(UserError, match="position_ids must count on"):
        model(packed, position_ids=position_ids * 2)


def test_exact_iterates_are_the_recurrence(exports):
    model = AutoModelForCausalLM.from_pretrained(exports("t2mlr")[1])
    rows = tokens("t2mlr")
    with torch.no_grad():
        exact, trained = model(rows, exact=True).logits, model(rows).logits
        with model.model.exact(LENGTH):
            torch.testing.assert_close(exact, model(rows).logits)
    assert not torch.allclose(exact, trained, atol=1e-5)
    with pytest.raises(UserError, match="exact = True is for t2mlr, not tidar"):
        AutoModelForCausalLM.from_pretrained(exports("tidar")[1])(rows, exact=True)


@pytest.mark.parametrize("case", ["tidar", "t2mlr", "alodlm", "looped-pause"])
def test_loss_of_causal_models_is_the_shifted_one(case, exports):
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1])
    rows = tokens(case)
    labels = rows.clone()
    labels[:, :3] = -100
    out = model(rows, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, 2:-1].flatten(0, 1), rows[:, 3:].flatten())
    torch.testing.assert_close(out.loss, expected)
    summed = model(rows, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(summed * 7, expected * 2 * (LENGTH - 3))
    out.loss.backward()
    # The gate decides about exits, which a forward without commitments does not have.
    assert all(p.grad is not None for name, p in model.named_parameters() if "core.gate" not in name)


@pytest.mark.parametrize("case", ["mdlm", "tdlm-current", "tdlm", "block_diffusion"])
def test_loss_of_masked_models_is_the_own_token_one_at_masks(case, exports):
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1])
    rows = tokens(case)
    labels = torch.randint(0, 250, rows.shape, generator=torch.Generator().manual_seed(3))
    out = model(rows, labels=labels)
    back = 1 if case == "tdlm-current" else 0
    chosen = [(b, p) for b, p in (rows == 260).nonzero().tolist()]
    expected = torch.stack(
        [torch.nn.functional.cross_entropy(out.logits[b, p - back], labels[b, p]) for b, p in chosen]
    ).mean()
    torch.testing.assert_close(out.loss, expected)
    with pytest.raises(UserError, match="mask some tokens"):
        model(rows.clamp(max=250), labels=labels)


def test_tdlm_trains_its_temporal_modules_alone(exports):
    model = AutoModelForCausalLM.from_pretrained(exports("tdlm")[1])
    assert {".temporal." in name for name, p in model.named_parameters() if p.requires_grad} == {True}


@pytest.mark.parametrize("case", ["alodlm", "mdlm", "t2mlr", "tdlm", "tidar"])
def test_saved_again_it_reads_the_same(case, exports, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1])
    (tmp_path / "notes.txt").write_text("kept")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert (tmp_path / "notes.txt").read_text() == "kept"
    before, after = (hf_folder.read_tensors(path) for path in (exports(case)[1], tmp_path))
    assert set(before) == set(after)
    assert all(
        torch.equal(hf_folder.load_tensor(before[name]), hf_folder.load_tensor(after[name]))
        for name in before
    )
    one, two = (json.loads((path / "config.json").read_text()) for path in (exports(case)[1], tmp_path))
    keys = ("model_type", "torchtitan_ext", "architectures", "auto_map")
    assert {key: one.get(key) for key in keys} == {key: two.get(key) for key in keys}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens(case)).logits, model(tokens(case)).logits)
    # Another save takes the place of the first, whatever its shards.
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert torch.equal(load_model(tmp_path).model.lm_head.weight, model.model.lm_head.weight)


def test_dtype_is_followed_and_auto_is_the_folders(exports, tmp_path):
    folder = exports("tidar")[1]
    assert AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    half = AutoModelForCausalLM.from_pretrained(folder, dtype="float16")
    half.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float16
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float16
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(UserError, match="unknown dtype 'float64'"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_from_config_draws_a_model(exports):
    config = AutoConfig.from_pretrained(exports("t2mlr")[1])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        assert model(tokens("t2mlr")).logits.isfinite().all()


def test_a_training_step_and_a_state_dict_of_its_names(exports, tmp_path):
    """What transformers' Trainer does: loss.backward, state_dict, save_pretrained with it."""
    model = AutoModelForCausalLM.from_pretrained(exports("looped-middle")[1]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(tokens("looped-middle"), labels=tokens("looped-middle")).loss
    before.backward()
    optimizer.step()
    state = model.state_dict()
    model.save_pretrained(tmp_path, state_dict=state)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.load_state_dict(state)
    after = again(tokens("looped-middle"), labels=tokens("looped-middle")).loss
    assert after < before
    state.popitem()
    with pytest.raises(UserError, match="save_pretrained: the tensors do not fit the model: missing"):
        model.save_pretrained(tmp_path, state_dict=state)


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_the_tensors_of_a_folder_are_a_state_dict_too(case, exports):
    """How transformers' Trainer goes on from a checkpoint: ``load_state_dict`` of what it saved."""
    folder = exports(case)[1]
    model = AutoModelForCausalLM.from_pretrained(folder)
    fresh, stored = hf.MODELS[CASES[case][0]](model.config), hf_folder.read_tensors(folder)
    assert fresh.load_state_dict(hf_folder.load_tensors(stored)) == ([], [])
    with torch.no_grad():
        assert torch.equal(fresh(tokens(case)).logits, model(tokens(case)).logits)
    # One file of several, and something else.
    some = dict(list(stored.items())[:3])
    found = fresh.load_state_dict(hf_folder.load_tensors(some) | {"x": torch.zeros(1)}, strict=False)
    tied = model.config.size.tied and any("embed" in name or "wte" in name for name in some)
    assert found.unexpected_keys == ["x"]
    assert len(found.missing_keys) == len(model.state_dict()) - len(some) - tied


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_a_model_can_be_pickled_whole(case, exports):
    """As torch.save(model) does, and processes that are spawned."""
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1])
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(again(tokens(case)).logits, model(tokens(case)).logits)


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_a_state_dict_has_the_names_of_the_parameters(case, exports):
    """Tools that put modules into a model (peft) find their parameters in it by these."""
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1])
    named = dict(model.named_parameters(remove_duplicate=False)).keys()
    assert model.state_dict().keys() == named
    # In another module, as peft has it, too.
    assert torch.nn.ModuleList([model]).state_dict().keys() == {f"0.{name}" for name in named}


# --- which class opens a folder --------------------------------------------------------


def test_ar_exports_and_other_folders_stay_transformers_own(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is transformers.LlamaConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
    assert type(AutoConfig.for_model("qwen3", hidden_size=32)) is transformers.Qwen3Config
    hf.register()
    assert type(AutoConfig.from_pretrained(tmp_path)) is transformers.LlamaConfig


@pytest.mark.parametrize("case", ["tidar", "t2mlr"])
def test_consent_to_run_the_folders_code_changes_nothing(case, exports):
    model = AutoModelForCausalLM.from_pretrained(exports(case)[1], trust_remote_code=True)
    assert type(model) is hf.MODELS[CASES[case][0]]


def test_a_name_on_the_hub_is_fetched(exports, monkeypatch):
    import huggingface_hub

    asked: list[tuple[Any, dict[str, Any]]] = []

    def fetched(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(exports("tidar")[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    config = AutoConfig.from_pretrained(exports("tidar")[1])
    hf.MODELS["tidar"].from_pretrained("some/name", config=config, revision="v1", token=None)
    assert asked == [("some/name", {"revision": "v1"})]


def test_an_own_type_without_its_entry_is_refused(exports, tmp_path):
    shutil.copytree(exports("t2mlr")[1], tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    del values["torchtitan_ext"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="lacks its 'torchtitan_ext' entry"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_exports_from_before_the_own_types_are_recognised(exports, tmp_path):
    for case, plain in (("t2mlr", "llama"), ("looped-middle", "qwen2"), ("tdlm", "llada")):
        folder = tmp_path / case
        shutil.copytree(exports(case)[1], folder)
        values = json.loads((folder / "config.json").read_text())
        assert values["model_type"] == f"torchtitan_ext_{CASES[case][0]}_{plain}"
        values.pop("auto_map")
        (folder / "config.json").write_text(json.dumps({**values, "model_type": plain}))
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is hf.MODELS[CASES[case][0]]
        assert load_model(folder).method == CASES[case][0]


def test_a_published_masked_backbone_is_mdlm(exports, tmp_path):
    folder = tmp_path / "llada"
    shutil.copytree(exports("mdlm")[1], folder)
    values = json.loads((folder / "config.json").read_text())
    del values["torchtitan_ext"], values["auto_map"]
    (folder / "config.json").write_text(json.dumps({**values, "mask_token_id": 260}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is hf.MODELS["mdlm"]
    with torch.no_grad():
        expected = our_logits(exports("mdlm")[0], "mdlm", tokens("mdlm"))
        torch.testing.assert_close(model(tokens("mdlm")).logits, expected, **CLOSE)


# --- refusals --------------------------------------------------------------------------


def test_missing_tensors_are_one_clear_error(exports, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(exports("t2mlr")[1], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("core.fusion.g_current", "model.norm.weight"):
        left = {key: value for key, value in tensors.items() if key != name}
        save_file(left, tmp_path / "hf" / "model.safetensors")
        with pytest.raises(UserError, match=f"not fit the model: missing {name}"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    extra = {**tensors, "model.extra.weight": torch.zeros(2)}
    save_file(extra, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected model\.extra\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes = True is not supported"),
        ({"device_map": {"model.layers": 0, "": "cpu"}}, "one device"),
        ({"max_memory": {0: "1GB"}}, "max_memory is not supported"),
    ],
)
def test_what_from_pretrained_would_have_to_ignore_is_refused(options, message, exports):
    with pytest.raises((UserError, ValueError), match=message):
        AutoModelForCausalLM.from_pretrained(exports("tidar")[1], **options)


def test_where_peft_is_installed_and_finds_no_adapter(exports):
    """The Auto classes then say how they looked for one."""
    folder = exports("tidar")[1]
    for found in (None, {}, {"revision": None}, {"revision": "main", "token": "x"}):
        assert type(AutoModelForCausalLM.from_pretrained(folder, adapter_kwargs=found)) is hf.MODELS["tidar"]
    with pytest.raises(UserError, match="ADAPTER holds an adapter; load the folder that it was trained on"):
        AutoModelForCausalLM.from_pretrained(folder, adapter_kwargs={"_adapter_model_path": "ADAPTER"})


def test_a_changed_config_is_refused(exports):
    folder = exports("tidar")[1]
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 2
    with pytest.raises(UserError, match="differs from its config.json in n_layers"):
        AutoModelForCausalLM.from_pretrained(folder, config=config)
    config = AutoConfig.from_pretrained(folder)
    config.torchtitan_ext["section"]["block_size"] = 2
    with pytest.raises(UserError, match="differs from its config.json in block_size"):
        AutoModelForCausalLM.from_pretrained(folder, config=config)
    with pytest.raises(UserError, match="is a model of the method 't2mlr', not 'tidar'"):
        hf.MODELS["tidar"].from_pretrained(exports("t2mlr")[1], config=AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"past_key_values": object()}, "past_key_values is not supported"),
        ({"output_hidden_states": True}, "output_hidden_states is not supported"),
        ({"use_cache": True}, "use_cache is not supported"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padding between tokens"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "only masks of padding"),
        ({"labels": torch.zeros(1, 3, dtype=torch.long), "logits_to_keep": 1}, "labels need the logits"),
    ],
)
def test_what_forward_would_have_to_ignore_is_refused(options, message, exports):
    model = AutoModelForCausalLM.from_pretrained(exports("tidar")[1])
    with pytest.raises(UserError, match=message):
        model(torch.tensor([[1, 2, 3]]), **options)
    model(torch.tensor([[1, 2, 3]]), use_cache=False, past_key_values=None)
    with pytest.raises(UserError, match="context"):
        model(torch.zeros(1, model.model.config.max_seq_len + 1, dtype=torch.long))
