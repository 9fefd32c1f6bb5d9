"""Specs, sections, and decoding of masked diffusion."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext import backbones, models, registry
from torchtitan_ext import config as front
from torchtitan_ext.decoding.masked_diffusion import generate
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.decode_options import parse_options
from torchtitan_ext.methods import mdlm
from torchtitan_ext.methods.mdlm.config import bidirectional_size_for, resolve_prediction
from torchtitan_ext.methods.mdlm.config_registry import debug
from torchtitan_ext.methods.mdlm.decode import decode
from torchtitan_ext.methods.mdlm.model import MaskedBackbone
from torchtitan_ext.trainer import default_config


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.METHODS, "mdlm", "torchtitan_ext.methods.mdlm")


def parse(tmp_path, flavor: str = "llada-debug", section: str = "", rest: str = ""):
    path = tmp_path / "c.toml"
    path.write_text(f'[model]\nname = "mdlm"\nflavor = "{flavor}"\n[mdlm]\n{section}\n{rest}')
    return front.load_toml(path, make_default=default_config)


def build(flavor: str, section: mdlm.Section) -> MaskedBackbone:
    model = mdlm.model_registry(flavor, section=section).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    return model.eval()


@pytest.mark.parametrize("flavor, prediction", [("llada-debug", "own"), ("dream-debug", "shifted")])
def test_a_config_is_completed_and_built(tmp_path, flavor, prediction):
    config = parse(tmp_path, flavor, "block_size = 5")
    spec = models.build_spec(config)
    assert (config.mdlm.prediction, config.mdlm.mask_token_id) == (prediction, 259)
    model = spec.model
    assert isinstance(model, MaskedBackbone.Config)
    assert (model.prediction, model.mask_token_id, model.block_size) == (prediction, 259, 5)
    objective = models.build_objective(config)
    assert (objective.mask_id, objective.prediction, objective.noise) == (259, prediction, "document")
    assert objective.eps == 1e-3 and objective.eos_id is not None
    again = front.load_toml(_saved(tmp_path, config), make_default=default_config)
    assert again.mdlm == config.mdlm and models.build_spec(again).model.mask_token_id == 259


def _saved(tmp_path, config):
    front.save(config, tmp_path / "saved.toml")
    return tmp_path / "saved.toml"


def test_the_sections_knobs_reach_the_objective(tmp_path):
    section = 'noise = "row"\neps = 0.25\nprediction = "shifted"\npadding = "none"\nmask_token_id = 263'
    config = parse(tmp_path, section=section, rest="[loss]\nnum_chunks = 4")
    models.build_spec(config)
    objective = models.build_objective(config)
    assert (objective.noise, objective.eps, objective.prediction) == ("row", 0.25, "shifted")
    assert (objective.eos_id, objective.mask_id, objective.multiple) == (None, 263, 4)


def test_published_mask_tokens():
    for flavor, mask_id in (("llada-8B", 126336), ("dream-7B", 151666)):
        assert bidirectional_size_for(flavor, method="mdlm").mask_token_id == mask_id
    assert resolve_prediction("own", family="dream") == "own"


def test_it_has_the_backbones_parameters_and_logits():
    ours = build("llada-debug", mdlm.Section(mask_token_id=257))
    plain = backbones.build_config(backbones.lookup("llada-debug"), attention="dense").build()
    plain.load_state_dict(ours.state_dict())
    tokens, positions = torch.arange(12)[None] % 7, torch.tensor([[*range(5), *range(7)]])
    masks = ours.get_attention_masks(positions)
    assert torch.equal(ours(tokens, positions, masks), plain(tokens, positions, masks))


def test_wrong_values_are_refused(tmp_path):
    for section, message in [
        ("eps = 0.0", "mdlm.eps"),
        ("eps = 1.0", "mdlm.eps"),
        ("block_size = 0", "block_size must be at least 1, got 0"),
        ('noise = "documents"', "noise"),
        ('prediction = "shift"', "prediction"),
        ("mask_id = 3", "mask_token_id"),
    ]:
        with pytest.raises((UserError, ValueError), match=message):
            parse(tmp_path, section=section)
    for flavor, section, message in [
        ("smollm2-debug", "", r"'mdlm' needs a bidirectional backbone, got flavor = 'smollm2-debug'.*causal"),
        ("llada-debug", "mask_token_id = 264", r"\[mdlm\] mask_token_id = 264 is outside"),
    ]:
        with pytest.raises(UserError, match=message):
            models.build_spec(parse(tmp_path, flavor, section))
    config = parse(tmp_path, section="mask_token_id = 65")
    models.build_spec(config)
    with pytest.raises(UserError, match=r"\[mdlm\] mask_token_id = 65: .*0x41.*free id is 260"):
        models.build_objective(config)
    with pytest.raises(ValueError, match="not settled"):
        mdlm.model_registry("llada-debug")
    with pytest.raises(ValueError, match="not settled"):
        mdlm.build_objective(parse(tmp_path, section="mask_token_id = 260"))


def test_pipelines_are_refused(tmp_path):
    config = parse(tmp_path, rest="[parallelism]\npipeline_parallel_degree = 2")
    with pytest.raises(UserError, match=r"pipeline_parallel_degree = 2 does not work with .*'mdlm'"):
        models.build_spec(config).model.update_from_config(config=config)


@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_every_kernel_can_hold_the_mask(attention):
    spec = mdlm.model_registry("llada-debug", attention=attention, section=mdlm.Section(mask_token_id=257))
    with torch.device("meta"):
        spec.model.build().verify_module_protocol()


@pytest.mark.parametrize("flavor", ["llada-debug", "dream-debug"])
def test_decode_takes_mask_block_and_shift_from_the_model(flavor):
    model = build(flavor, mdlm.Section(mask_token_id=257, block_size=3))
    prompts = [[1, 2, 3], [4]]
    options = {"max_new_tokens": 7, "policy": "threshold", "tau": 0.02}
    got = decode(model, prompts, **options)
    shift = "shifted" if flavor == "dream-debug" else "own"
    want, other = (
        generate(model, prompts, mask_id=257, block_size=3, prediction=p, **options)
        for p in (shift, "own" if shift == "shifted" else "shifted")
    )
    assert list(got) == list(want) and list(got) != list(other)
    assert [t["block_size"] for t in got.extra["traces"]] == [3, 3]
    assert decode(model, prompts, block_size=7, **options).extra["traces"][0]["block_size"] == 7
    assert decode(model, prompts, max_new_tokens=4).forwards == 4, "one token a forward"


def test_torchtitans_own_registry_starts_it():
    config = debug()
    assert config.model.name == "mdlm" and dataclasses.asdict(config.mdlm)["eps"] == 1e-3
    assert isinstance(models.build_spec(config).model, MaskedBackbone.Config)


def test_an_evaluation_can_set_the_decoders_options():
    options = parse_options(
        "policy=entropy,tau=0.4,block_size=8,comparison=inclusive,after_stop=reveal", decode
    )
    assert options == {
        "policy": "entropy",
        "tau": 0.4,
        "block_size": 8,
        "comparison": "inclusive",
        "after_stop": "reveal",
    }
    with pytest.raises(UserError, match="policy is 'greedy'"):
        parse_options("policy=greedy", decode)
