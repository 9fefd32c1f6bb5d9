"""Folders in the form of T2MLR's authors: names, settings, what is refused, and a twin of their forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.distributed import jobs
from tests.distributed.harness import run
from tools import convert_from_hf as tool
from torchtitan_ext.checkpoint.convert import convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.checkpoint.published import method_of, recognise
from torchtitan_ext.checkpoint.published.writing import convert_published
from torchtitan_ext.errors import UserError

transformers = pytest.importorskip("transformers")

DIM, LAYERS, VOCAB, FIRST, LAST = 48, 4, 264, 1, 2
MIXER = f"t2mlr_model.model.layers.{FIRST}.t2mlr_mixing_module"
SETTINGS: dict[str, Any] = {
    "t2mlr_enabled": True,
    "l_start": FIRST,
    "l_end": LAST - LAYERS,
    "batch_forward": False,
    "batch_forward_approximate_depth": 16,
    "batch_backward_approximate_depth": 4,
    "connection_detach": False,
    "recurrent_mixing_module_name": "gated",
    "use_recurrent_projection": True,
    "recurrent_projection_dim": None,
    "recurrent_state_proj_type": "linear",
    "use_learnable_gate": True,
    "use_learnable_recurrent_gate": True,
    "use_learnable_input_gate": True,
    "gate_proj_type": "linear",
    "gate_weight_init_std": 1.0,
    "normalize_gates": False,
    "pre_norm_streams": False,
    "post_norm": False,
    "recurrent_skip_to_l_end": False,
    "recurrent_residual_to_recurrent_cache": True,
    "recurrent_residual_to_recurrent_cache_weight": 1.0,
    "recurrent_residual_to_recurrent_cache_post_norm": True,
    "recurrent_residual_to_recurrent_cache_post_norm_eps": 1e-6,
    "recurrent_residual_to_recurrent_cache_post_norm_clamp": 5.0,
    "recurrent_residual_to_recurrent_cache_detach": False,
    "mixing_module_kwargs": None,
    "transformers_version": "4.57.0",
}


class Folder(NamedTuple):
    path: Path
    base: Any
    """The wrapped model of transformers."""

    mixer: dict[str, torch.Tensor]
    """The recurrence's tensors, by their names without a prefix."""

    residual: bool


def base_model(kind: str, *, tied: bool) -> Any:
    config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def mixer_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    return {
        "recurrent_projection.weight": drawn(DIM, DIM),
        "recurrent_gate_proj.weight": drawn(DIM, 2 * DIM),
        "recurrent_gate_proj.bias": drawn(DIM),
        "input_gate_proj.weight": drawn(DIM, 2 * DIM),
        "input_gate_proj.bias": drawn(DIM),
        "rezero_gamma_recurrent_gate": torch.tensor([0.8]),
        "rezero_gamma_input_gate": torch.tensor([-0.4]),
    }


def published_name(name: str) -> str:
    inside = f"model.layers.{FIRST}."
    return "t2mlr_model." + name.replace(inside, f"{inside}model.")


def write(path: Path, base: Any, mixer: dict[str, torch.Tensor], *, shards: int = 1, **changes: Any) -> Path:
    """A folder as the authors' ``save_pretrained`` writes it; ``changes``: of config.json."""
    tensors = {published_name(name): value.detach().clone() for name, value in base.state_dict().items()}
    if base.config.tie_word_embeddings:
        del tensors["t2mlr_model.lm_head.weight"]
    tensors.update({f"{MIXER}.{name}": value for name, value in mixer.items()})
    path.mkdir(parents=True)
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, path / file, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    base_config = json.loads(base.config.to_json_string(use_diff=False))
    config = {
        "architectures": ["T2MLRWrapper"],
        "model_type": "t2mlr",
        "base_model_type": base_config["model_type"],
        "base_config": base_config,
        "dtype": "float32",
        **SETTINGS,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a folder of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


CASES = {
    "llama, tied, residual": ("llama", True, True, 1),
    "llama, untied, no residual, sharded": ("llama", False, False, 3),
    "qwen3, untied, residual, sharded": ("qwen3", False, True, 4),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory) -> Folder:
    kind, tied, residual, shards = CASES[request.param]
    base, mixer = base_model(kind, tied=tied), mixer_tensors()
    path = tmp_path_factory.mktemp("published") / "hf"
    changes = {"recurrent_residual_to_recurrent_cache": residual}
    return Folder(write(path, base, mixer, shards=shards, **changes), base, mixer, residual)


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "checkpoint"
    tool.main([str(folder.path), str(target)])
    return target


@pytest.fixture
def plain(tmp_path) -> Path:
    return write(tmp_path / "hf", base_model("llama", tied=True), mixer_tensors())


# --- a twin of the published forward ---------------------------------------------------


class Twin(nn.Module):
    """Token by token, recomputing the band over the whole prefix for each; no cache at all."""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self.causal_lm, self.mixer, self.residual = folder.base, folder.mixer, folder.residual

    def blocks(self, h: torch.Tensor, first: int, last: int) -> torch.Tensor:
        inner, length = self.causal_lm.model, h.shape[1]
        positions = torch.arange(length)[None]
        rotation = inner.rotary_emb(h, positions)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for block in inner.layers[first : last + 1]:
            out = block(h, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            h = out[0] if isinstance(out, tuple) else out
        return h

    def mix(self, h: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Gates read the current stream and the PROJECTED recurrent one."""
        weights = self.mixer
        projected = state @ weights["recurrent_projection.weight"].T
        both = torch.cat([h, projected], dim=-1)
        gates = {
            side: torch.sigmoid(
                both @ weights[f"{side}_gate_proj.weight"].T + weights[f"{side}_gate_proj.bias"]
            )
            for side in ("recurrent", "input")
        }
        recurrent = torch.tanh(weights["rezero_gamma_recurrent_gate"]) * gates["recurrent"] * projected
        return h + recurrent + torch.tanh(weights["rezero_gamma_input_gate"]) * gates["input"] * h

    def state(self, h_end: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        if not self.residual:
            return h_end
        total = h_end + previous
        rms = (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return total * (1 / rms).clamp(1 / 5, 5.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        before = self.blocks(self.causal_lm.model.embed_tokens(tokens), 0, FIRST - 1)
        state, mixed = torch.zeros_like(before[:, :1]), []
        for t in range(tokens.shape[1]):
            mixed.append(self.mix(before[:, t : t + 1], state))
            state = self.state(self.blocks(torch.cat(mixed, dim=1), FIRST, LAST)[:, -1:], state)
        h = self.blocks(torch.cat(mixed, dim=1), FIRST, LAYERS - 1)
        return self.causal_lm.lm_head(self.causal_lm.model.norm(h))


def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model: Any = load_model(path).model
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad(), model.exact(tokens.shape[1]):
        return model(tokens, positions, model.get_attention_masks(positions))


def test_logits_equal_a_twin_of_the_published_forward(folder, converted):
    tokens = torch.randint(0, VOCAB, (2, 14), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = Twin(folder)(tokens)
    got = logits(converted, tokens)
    assert torch.isfinite(got).all()
    # Not 0: their rescaling has an epsilon that ours does not have.
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    with torch.no_grad():
        plain = folder.base(tokens).logits
    assert (plain - expected).abs().max() > 0.1  # the recurrence does something


# --- names and settings ----------------------------------------------------------------

OURS = {
    "tok_embeddings.weight": "t2mlr_model.model.embed_tokens.weight",
    "norm.weight": "t2mlr_model.model.norm.weight",
    "layers.0.attention.qkv_linear.wq.weight": "t2mlr_model.model.layers.0.self_attn.q_proj.weight",
    "layers.0.feed_forward.w2.weight": "t2mlr_model.model.layers.0.mlp.down_proj.weight",
    "layers.1.attention.qkv_linear.wv.weight": "t2mlr_model.model.layers.1.model.self_attn.v_proj.weight",
    "layers.1.attention.wo.weight": "t2mlr_model.model.layers.1.model.self_attn.o_proj.weight",
    "layers.1.feed_forward.w1.weight": "t2mlr_model.model.layers.1.model.mlp.gate_proj.weight",
    "layers.1.attention_norm.weight": "t2mlr_model.model.layers.1.model.input_layernorm.weight",
    "layers.2.ffn_norm.weight": "t2mlr_model.model.layers.2.post_attention_layernorm.weight",
    "layers.3.feed_forward.w3.weight": "t2mlr_model.model.layers.3.mlp.up_proj.weight",
    "core.fusion.w_recurrent.weight": f"{MIXER}.recurrent_projection.weight",
    "core.fusion.f_recurrent.weight": f"{MIXER}.recurrent_gate_proj.weight",
    "core.fusion.f_recurrent.bias": f"{MIXER}.recurrent_gate_proj.bias",
    "core.fusion.f_current.weight": f"{MIXER}.input_gate_proj.weight",
    "core.fusion.f_current.bias": f"{MIXER}.input_gate_proj.bias",
    "core.fusion.g_recurrent": f"{MIXER}.rezero_gamma_recurrent_gate",
    "core.fusion.g_current": f"{MIXER}.rezero_gamma_input_gate",
}


def test_every_tensor_is_in_its_place(folder, converted):
    stored = {}
    for file in folder.path.glob("*.safetensors"):
        stored.update(load_file(file))
    state = load_model(converted).model.state_dict()
    tied = folder.base.config.tie_word_embeddings
    assert len(state) == len(stored) + tied  # the tied head is stored once
    for ours, theirs in OURS.items():
        assert torch.equal(state[ours], stored[theirs]), ours
    head = stored["t2mlr_model.model.embed_tokens.weight" if tied else "t2mlr_model.lm_head.weight"]
    assert torch.equal(state["lm_head.weight"], head)
    # No tensor is used twice: all are random, so what is equal is the same.
    sums = sorted(float(value.double().sum()) for value in stored.values() if value.unique().numel() > 1)
    taken = [value for name, value in state.items() if not (tied and name == "lm_head.weight")]
    assert sorted(float(value.double().sum()) for value in taken if value.unique().numel() > 1) == sums


def test_config_names_the_section(folder, converted):
    config = load_model(converted).config
    section = config.t2mlr
    assert (config.model.name, section.start, section.end) == ("t2mlr", FIRST + 1, LAST + 1)
    assert (section.forward_depth, section.backward_depth) == (16, 4)
    assert (section.gate_features, section.cache_norm) == ("projected", "clamped")
    assert section.temporal_residual is folder.residual


def test_export_and_back(converted, tmp_path):
    """Into this package's own folder, which transformers' code opens too, and into a checkpoint again."""
    expected = load_model(converted).model.state_dict()
    back = convert_to_hf(converted, tmp_path / "hf")
    assert method_of(back) is None
    tool.main([str(back), str(tmp_path / "again")])
    for path in (back, tmp_path / "again"):
        got = load_model(path).model.state_dict()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_backward_depth_follows_theirs(tmp_path):
    base, mixer = base_model("llama", tied=True), mixer_tensors()
    deep = write(tmp_path / "a", base, mixer, batch_backward_approximate_depth=10_000_000)
    cut = write(tmp_path / "b", base, mixer, connection_detach=True)
    found = [recognise(path) for path in (deep, cut)]
    assert [each.section["backward_depth"] for each in found if each] == [16, 0]


def test_older_and_compiled_folders(plain, tmp_path):
    """The wrapped model's type in older configs, absent settings, the prefix of compiled models."""
    config = json.loads((plain / "config.json").read_text())
    config["model_type"] = "llama"
    config["base_config"]["model_type"] = "tinyllama"
    config["base_config"]["disable_positional_encoding"] = False
    config["recurrent_state_proj_type"] = "auto"
    del config["normalize_gates"], config["use_learnable_input_gate"], config["use_learnable_recurrent_gate"]
    (plain / "config.json").write_text(json.dumps(config))
    convert_published(plain, tmp_path / "a")

    def compile_names(tensors):
        for name in list(tensors):
            tensors[name.replace("t2mlr_model.", "_orig_mod.t2mlr_model.")] = tensors.pop(name)

    rewrite(plain, compile_names)
    convert_published(plain, tmp_path / "b")
    first, second = (load_model(tmp_path / name).model.state_dict() for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_equal_tied_head_may_be_stored(plain, tmp_path):
    head, embedding = "t2mlr_model.lm_head.weight", "t2mlr_model.model.embed_tokens.weight"
    rewrite(plain, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    convert_published(plain, tmp_path / "a")
    rewrite(plain, lambda tensors: tensors.update({head: tensors[embedding] + 1}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from .*embed_tokens"):
        convert_published(plain, tmp_path / "b")
    assert not (tmp_path / "b").exists()


# --- what is refused -------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixer": (
        {"recurrent_mixing_module_name": "alpha_coupled"},
        "recurrent_mixing_module_name = 'alpha_coupled'",
    ),
    "disabled": ({"t2mlr_enabled": False}, "t2mlr_enabled = False; only True"),
    "no projection": ({"use_recurrent_projection": False}, "use_recurrent_projection = False"),
    "bottleneck": ({"recurrent_state_proj_type": "mlp"}, "recurrent_state_proj_type = 'mlp'"),
    "bottleneck by its width": (
        {"recurrent_state_proj_type": "auto", "recurrent_projection_dim": 8},
        "recurrent_state_proj_type = 'mlp'",
    ),
    "fixed gate": ({"use_learnable_input_gate": False}, "use_learnable_input_gate = False"),
    "gate of layers": ({"gate_proj_type": "mlp"}, "gate_proj_type = 'mlp'"),
    "gates that sum to 1": ({"mixing_module_kwargs": {"normalize_gates": True}}, "normalize_gates = True"),
    "gate for each dimension": (
        {"mixing_module_kwargs": {"rezero_gamma_scalar": False}},
        "rezero_gamma_scalar = False",
    ),
    "skip": ({"recurrent_skip_to_l_end": True}, "recurrent_skip_to_l_end = True"),
    "unnormalised cache": (
        {"recurrent_residual_to_recurrent_cache_post_norm": False},
        "recurrent_residual_to_recurrent_cache_post_norm = False",
    ),
    "other clamp": (
        {"recurrent_residual_to_recurrent_cache_post_norm_clamp": 2.0},
        "recurrent_residual_to_recurrent_cache_post_norm_clamp = 2.0; only 5.0",
    ),
    "unknown setting": ({"recurrent_twist": 1}, "unknown setting of the recurrence 'recurrent_twist'"),
    "unknown argument": (
        {"mixing_module_kwargs": {"normalise_gates": True}},
        "'normalise_gates' in mixing_module_kwargs; did you mean 'normalize_gates'",
    ),
    "band": ({"l_end": 4}, "l_start = 1, l_end = 4 is not a band of the 4 layers"),
    "no depth": ({"batch_forward_approximate_depth": 0}, "batch_forward_approximate_depth = 0"),
    "no backbone": ({"base_config": None}, "lacks base_config"),
    "backbone": ({"base_config": {"model_type": "gpt_neox"}}, "unknown model_type 'gpt_neox'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_we_do_not_have(case, tmp_path):
    changes, message = REFUSED[case]
    path = tmp_path / "hf"
    path.mkdir()
    base_config = json.loads(transformers.LlamaConfig(num_hidden_layers=4).to_json_string(use_diff=False))
    config = {"model_type": "t2mlr", "base_config": base_config, **SETTINGS, **changes}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        recognise(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_tensors_that_do_not_fit(plain, tmp_path):
    def attempt(change, match: str) -> None:
        kept = (plain / "model.safetensors").read_bytes()
        rewrite(plain, change)
        with pytest.raises(UserError, match=match):
            convert_published(plain, tmp_path / "out")
        (plain / "model.safetensors").write_bytes(kept)
        assert not (tmp_path / "out").exists()

    bias, extra = f"{MIXER}.input_gate_proj.bias", f"{MIXER}.norm_x.weight"
    attempt(lambda tensors: tensors.pop(bias), rf"missing {bias}")
    attempt(lambda tensors: tensors.update({extra: torch.ones(DIM)}), rf"unexpected {extra}")
    gamma = f"{MIXER}.rezero_gamma_input_gate"
    attempt(lambda tensors: tensors.update({gamma: torch.ones(DIM)}), r"rezero_gamma_input_gate: got \[48\]")
    moved = "t2mlr_model.model.layers.1.model.self_attn.q_proj.weight"
    unwrapped = moved.replace("1.model.", "1.")
    attempt(lambda tensors: tensors.update({unwrapped: tensors.pop(moved)}), rf"missing {moved}; unexpected")


def test_the_tool_takes_nothing_that_the_folder_says(plain, tmp_path, capsys):
    out = str(tmp_path / "out")
    for options in (["--model.flavor", "smollm2-debug"], ["--model.name", "t2mlr", "--t2mlr.start", "1"]):
        with pytest.raises(UserError, match=f"leave out {options[-2]}"):
            tool.main([str(plain), out, *options])
    tool.main([str(plain), out, "--model.name", "t2mlr"])
    assert capsys.readouterr().out == f"wrote {out}\n"


@pytest.mark.slow
def test_a_run_starts_from_the_result(plain, tmp_path):
    convert_published(plain, tmp_path / "checkpoint")
    section = {"start": 2, "end": 3, "forward_depth": 4, "backward_depth": 2, "gate_features": "projected"}
    args = ["--model.name", "t2mlr"]
    args += [word for name, value in section.items() for word in (f"--t2mlr.{name}", str(value))]
    args += ["--model.flavor", "hf", "--model.hf_assets_path", str(tmp_path / "checkpoint/hf_assets")]
    args += ["--tokenizer.kind", "byte", "--training.steps", "1", "--checkpoint.enable"]
    args += ["--checkpoint.initial_load_path", str(tmp_path / "checkpoint")]
    (logged,) = run(jobs.train_logged, world=1, folder=str(tmp_path), args=args)
    assert "start fresh" not in logged["log"]
    assert all(value > 0 for value in logged["loss"].values()) and logged["loss"]
