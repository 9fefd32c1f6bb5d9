"""Folders in the form of ALoDLM's authors: names, the gate's file, refusals, a twin of their decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.distributed import alodlm_jobs as jobs
from tests.distributed.harness import run
from tools import convert_from_hf as tool
from torchtitan_ext.checkpoint import published
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.checkpoint.published.writing import convert_published
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.errors import UserError

transformers = pytest.importorskip("transformers")

DIM, VOCAB, MASK, DEPTH = 48, 264, 261, 4
RECURRENCE: dict[str, Any] = {
    "max_depth": DEPTH,
    "depth_prior_c": 0.3,
    "kl_beta_mi": 0.2,
    "kl_beta_marg": 0.9,
    "gate_init_pi": [0.25, 0.25, 0.25, 0.25],
    "mask_token_id": MASK,
    "block_size": 8,
    "gradient_checkpointing": True,
    "gradient_checkpointing_stride": 2,
    "attention_backend": "sdpa",
    "compile_layers": False,
}


class Folder(NamedTuple):
    path: Path
    base: Any
    """The backbone, of transformers."""

    gate: dict[str, torch.Tensor]
    """As exit_gate.pt has it."""

    start: int
    end: int


def write(path: Path, *, layers: int, start: int, end: int, shards: bool = False, **changes: Any) -> Folder:
    """A folder as the authors' ``save_pretrained`` writes it; ``changes``: of config.json."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(path, max_shard_size="40KB" if shards else "1GB")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, **changes}))
    gate = {
        "net.weight": torch.randn(1, DIM) * 0.1,
        "net.bias": torch.tensor([-0.3]),
        "depth_bias": torch.tensor([-1.2, -0.9, -0.4, 0.0]),
    }
    torch.save(gate, path / "exit_gate.pt")
    recurrence = {**RECURRENCE, "loop_start": start, "loop_end": end}
    (path / "alodlm_config.json").write_text(json.dumps(recurrence))
    return Folder(path, base, gate, start, end)


CASES = {"core in the middle": (4, 1, 3, True), "all layers": (2, 0, 2, False)}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory) -> Folder:
    layers, start, end, shards = CASES[request.param]
    path = tmp_path_factory.mktemp("published") / "hf"
    return write(path, layers=layers, start=start, end=end, shards=shards)


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "checkpoint"
    tool.main([str(folder.path), str(target)])
    return target


@pytest.fixture
def plain(tmp_path) -> Folder:
    return write(tmp_path / "hf", layers=2, start=0, end=2)


# --- names and settings ----------------------------------------------------------------


def test_every_tensor_is_in_its_place(folder, converted):
    stored: dict[str, torch.Tensor] = {}
    files = list(folder.path.glob("*.safetensors"))
    for file in files:
        stored.update(load_file(file))
    assert len(files) > 1 or len(stored) < 30
    state = load_model(converted).model.state_dict()
    gate = {name: state.pop(name) for name in ("core.gate.weight", "core.gate.depth_bias")}
    assert torch.equal(gate["core.gate.weight"], folder.gate["net.weight"])
    # Each pass has one bias here: theirs and the layer's.
    assert torch.equal(gate["core.gate.depth_bias"], folder.gate["depth_bias"] - 0.3)
    assert len(state) == len(stored)
    for ours, theirs in {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "layers.0.attention.qkv_linear.wk.weight": "model.layers.0.self_attn.k_proj.weight",
        "layers.1.attention.q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
        "layers.1.feed_forward.w1.weight": "model.layers.1.mlp.gate_proj.weight",
        "layers.1.feed_forward.w2.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        assert torch.equal(state[ours], stored[theirs]), ours
    sums = sorted(float(value.double().sum()) for value in stored.values())
    assert sorted(float(value.double().sum()) for value in state.values()) == sums


def test_config_names_the_section(folder, converted):
    section = load_model(converted).config.alodlm
    assert (section.start, section.end, section.passes) == (folder.start, folder.end, DEPTH)
    assert (section.block_size, section.mask_token_id) == (8, MASK)
    assert (section.a, section.b, section.prior_decay) == (0.2, 0.9, 0.3)
    assert section.carry_norm and section.feedback == "one_shot"
    assert (section.window, section.tau, section.q, section.position_penalty) == (16, 0.4, 0.5, 0.02)


def test_export_and_back(converted, tmp_path):
    expected = load_model(converted).model.state_dict()
    back = convert_to_hf(converted, tmp_path / "hf")
    assert published.method_of(back) is None
    tool.main([str(back), str(tmp_path / "again")])
    for path in (back, tmp_path / "again"):
        got = load_model(path).model.state_dict()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_gate_of_a_bfloat16_folder(plain, tmp_path):
    """The sum of both biases is not rounded to their dtype."""
    half = {name: value.bfloat16() for name, value in plain.gate.items()}
    torch.save(half, plain.path / "exit_gate.pt")
    found = published.recognise(plain.path)
    assert found is not None and found.tensors["core.gate.weight"].dtype == torch.bfloat16
    expected = half["depth_bias"].double() + half["net.bias"].double()
    assert torch.equal(found.tensors["core.gate.depth_bias"].double(), expected.float().double())
    assert found.tensors["core.gate.depth_bias"].dtype == torch.float32


# --- a twin of the published decoder ---------------------------------------------------


class Twin:
    """Their decoding in the words of their guide, one row, greedy; keys and values in plain dicts.

    As this package, and other than theirs, it never predicts the mask token.
    """

    def __init__(self, folder: Folder, *, tau: float, q: float, window: int, left1: bool) -> None:
        self.folder, self.inner, self.lm_head = folder, folder.base.model, folder.base.lm_head
        self.tau, self.q, self.window, self.left1 = tau, q, window, left1
        self.prefix: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.length, self.passes, self.readouts = 0, [], []

    def layer(
        self, i: int, h: torch.Tensor, rotation: Any, key: tuple[int, int], fresh: dict
    ) -> torch.Tensor:
        """One block over the slots of a window, which also see the committed prefix."""
        block, attention = self.inner.layers[i], self.inner.layers[i].self_attn
        x, size = block.input_layernorm(h), attention.head_dim
        q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, size)) for n in "qkv")
        cos, sin = (part[0][:, None] for part in rotation)

        def turn(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-right, left], dim=-1) * sin

        q, k = turn(attention.q_norm(q)), turn(attention.k_norm(k))
        fresh[key] = list(zip(k, v, strict=True))
        seen = [*self.prefix.get(key, []), *fresh[key]]
        keys, values = (torch.stack(part) for part in zip(*seen, strict=True))
        groups = q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        scores = torch.einsum("qnh,knh->nqk", q, keys) / size**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(self.length + 1)
        mixed = torch.einsum("nqk,knh->qnh", scores.masked_fill(later, float("-inf")).softmax(-1), values)
        h = h + attention.o_proj(mixed.flatten(1))
        return h + block.mlp(block.post_attention_layernorm(h))

    def step(self, tokens: list[int], places: list[int], masked: list[int]) -> tuple[dict, dict[int, int]]:
        """All passes over a window; keys and values, and tokens committed by their row."""
        start, end, count = self.folder.start, self.folder.end, len(self.inner.layers)
        fresh: dict = {}
        h = self.inner.embed_tokens(torch.tensor(tokens))
        rotation = self.inner.rotary_emb(h[None], torch.tensor(places)[None])
        for i in range(start):
            h = self.layer(i, h, rotation, (i, 1), fresh)
        committed: dict[int, int] = {}
        survival = {row: 1.0 for row in masked}
        for depth in range(1, DEPTH + 1):
            for i in range(start, end):
                h = self.layer(i, h, rotation, (i, depth), fresh)
            readout = h
            for i in range(end, count):
                readout = self.layer(i, readout, rotation, (i, 1), fresh)
            readout = self.inner.norm(readout)
            self.readouts.append(readout)
            now = self.read(
                readout, depth, [row for row in masked if row not in committed], places, committed
            )
            hazard = self.hazard(readout, depth)
            survival = {row: left * (1 - float(hazard[row])) for row, left in survival.items()}
            open_rows = [row for row in masked if row not in committed]
            halted = [1 - survival[row] for row in open_rows]
            if depth == DEPTH or (masked and (not halted or sum(halted) / len(halted) >= self.q)):
                break
            h = self.inner.norm(h)
            for row, token in now.items():
                h[row] = self.inner.embed_tokens.weight[token]
        if masked and not committed:
            committed.update(self.least)
        for i in range(start, end):
            fresh.update({(i, deeper): fresh[i, depth] for deeper in range(depth + 1, DEPTH + 1)})
        if masked:
            self.passes.append(depth)
        return fresh, committed

    def read(
        self, readout: torch.Tensor, depth: int, rows: list[int], places: list[int], committed: dict[int, int]
    ) -> dict[int, int]:
        """What this pass commits; ``self.least`` is what a window without any commits."""
        if not rows:
            return {}
        logits = self.lm_head(readout[rows]).float()
        logits[:, MASK] = float("-inf")
        entropy = torch.distributions.Categorical(logits=logits).probs.clamp(min=1e-30)
        entropy = -(entropy * entropy.log()).sum(-1)
        ends = {row: place for row, place in zip(rows, (places[r] for r in rows), strict=True)}
        first = min(self.first, min(ends.values()))
        adjusted = {row: float(entropy[n]) + 0.05 * 0.4 * (ends[row] - first) for n, row in enumerate(rows)}
        best = {row: int(logits[n].argmax()) for n, row in enumerate(rows)}
        least = min(adjusted, key=lambda row: adjusted[row])
        self.least = {least: best[least]}
        chosen = [rows[0]] if self.left1 else [row for row in rows if adjusted[row] < self.tau]
        now = {row: best[row] for row in chosen}
        committed.update(now)
        return now

    def hazard(self, readout: torch.Tensor, depth: int) -> torch.Tensor:
        gate = self.folder.gate
        return torch.sigmoid(
            readout @ gate["net.weight"][0] + gate["net.bias"] + gate["depth_bias"][depth - 1]
        )

    def keep(self, fresh: dict, rows: list[int]) -> None:
        for key, entries in fresh.items():
            self.prefix.setdefault(key, []).extend(entries[row] for row in rows)
        self.length += len(rows)

    @torch.no_grad()
    def __call__(self, prompt: list[int], *, new: int) -> list[int]:
        self.first = 0
        fresh, _ = self.step(prompt, list(range(len(prompt))), [])
        self.keep(fresh, list(range(len(prompt))))
        out: list[int] = []
        slots: list[int | None] = []
        while True:
            leading = next((i for i, token in enumerate(slots) if token is None), len(slots))
            if len(out) + leading >= new:
                return [*out, *[token for token in slots[:leading] if token is not None]]
            wanted = leading + min(self.window, new - len(out) - leading)
            slots += [None] * (wanted - len(slots))
            order = sorted(range(len(slots)), key=lambda i: (slots[i] is None, i))
            tokens = [MASK if (token := slots[i]) is None else token for i in order]
            masked = [row for row, i in enumerate(order) if slots[i] is None]
            places = [self.length + i for i in order]
            self.first = places[masked[0]]
            fresh, committed = self.step(tokens, places, masked)
            self.keep(fresh, [order.index(i) for i in range(leading)])
            out += [token for token in slots[:leading] if token is not None]
            for row, token in committed.items():
                slots[order[row]] = token
            slots = slots[leading:]


@pytest.mark.parametrize(("tau", "q", "left1"), [(0.4, 0.5, False), (2.5, 0.9, False), (0.4, 0.7, True)])
def test_decoding_equals_a_twin_of_the_published_decoder(tau, q, left1, folder, converted):
    """Tokens, and how many passes each step took."""
    prompt = torch.randint(0, 250, (5,), generator=torch.Generator().manual_seed(1)).tolist()
    twin = Twin(folder, tau=tau, q=q, window=4, left1=left1)
    expected = twin(prompt, new=10)
    model = load_model(converted).model
    decode: Any = decoder_for("alodlm")
    options = {"tau": tau, "q": q, "left1": left1, "window": 4}
    got = decode(model, [prompt], max_new_tokens=10, stop_ids=(), **options)
    assert got[0].new_tokens == expected
    assert got[0].forwards - 1 == len(twin.passes)
    cumulative = decode(model, [prompt], max_new_tokens=10, stop_ids=(), feedback="cumulative", **options)
    if left1:  # else the option that is written into the config would not be tested
        assert cumulative[0].new_tokens != expected


@torch.no_grad()
def test_logits_and_halting_of_every_pass_equal_the_twin(folder, converted):
    """Nothing is committed, so each pass goes on from the normed output of the core before."""
    tokens = torch.randint(0, 250, (9,), generator=torch.Generator().manual_seed(2))
    twin = Twin(folder, tau=0.4, q=0.5, window=4, left1=False)
    twin.step(tokens.tolist(), list(range(9)), [])
    model: Any = load_model(converted).model
    positions, causal = torch.arange(9)[None], torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    h = model.prelude(tokens[None], positions, causal)
    assert len(twin.readouts) == DEPTH
    for depth, expected in enumerate(twin.readouts, start=1):
        core = model.core.run(h, causal, positions)
        readout = model.coda(core, positions, causal)[0]
        logits = model.lm_head(readout)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, folder.base.lm_head(expected), atol=1e-4, rtol=1e-4)
        if depth < DEPTH:  # the last pass always ends
            torch.testing.assert_close(model.hazard(readout, depth), twin.hazard(expected, depth))
        h = model.carry(core)


# --- what is refused -------------------------------------------------------------------


def refused(path: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        convert_published(path, path.parent / "out")
    assert "\n" not in str(error.value) and not (path.parent / "out").exists()


@pytest.mark.parametrize("name", ["alodlm_config.json", "exit_gate.pt"])
def test_incomplete_folders(name, plain):
    (plain.path / name).unlink()
    refused(plain.path, f"lacks {name}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true, but ALoDLM's LM head is its own"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2'; only 'qwen3'"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_backbones_that_are_not_theirs(change, match, plain):
    config = json.loads((plain.path / "config.json").read_text())
    (plain.path / "config.json").write_text(json.dumps({**config, **change}))
    refused(plain.path, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loop_end": 3}, "loop_start = 0, loop_end = 3, max_depth = 4 is not a core of the 2 layers"),
        ({"loop_start": 2}, "loop_start = 2"),
        ({"loop_start": False}, "loop_start must be a whole number, got False"),
        ({"max_depth": 3}, r"exit_gate\.pt holds .*depth_bias \[4\].*only a linear gate .*depth_bias \[3\]"),
        ({"mask_token_id": None}, "mask_token_id must be a whole number"),
        ({"loop_carry": "norm"}, "unknown field 'loop_carry'"),
    ],
)
def test_recurrences_that_are_not_theirs(change, match, plain):
    fields = json.loads((plain.path / "alodlm_config.json").read_text())
    (plain.path / "alodlm_config.json").write_text(json.dumps({**fields, **change}))
    refused(plain.path, match)


def test_gates_that_are_not_theirs(plain):
    gate = plain.path / "exit_gate.pt"
    layers = {"net.0.weight": torch.ones(8, DIM), "net.2.weight": torch.ones(1, 8)}
    torch.save(layers, gate)
    refused(plain.path, r"holds net\.0\.weight \[8, 48\].*; only a linear gate")
    torch.save({name: value for name, value in plain.gate.items() if name != "depth_bias"}, gate)
    refused(plain.path, "only a linear gate is supported")
    torch.save(plain.base, gate)  # code would have to be run
    refused(plain.path, "is not a gate that torch.save wrote")
    torch.save(torch.ones(2), gate)
    refused(plain.path, "must hold named tensors, got Tensor")
    gate.write_bytes(b"nothing")
    refused(plain.path, "is not a gate that torch.save wrote")


def test_tensors_that_do_not_fit(plain):
    file = plain.path / "model.safetensors"
    tensors = load_file(file)
    for change, match in (
        ({"lm_head.weight": None}, r"missing lm_head\.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, r"unexpected model\.layers\.0\.self_attn"),
        ({"model.norm.weight": torch.ones(7)}, r"model\.norm\.weight: got \[7\], expected \[48\]"),
    ):
        changed = {name: value for name, value in {**tensors, **change}.items() if value is not None}
        save_file(changed, file, metadata={"format": "pt"})
        refused(plain.path, match)


def test_a_gate_is_not_left_behind(plain, tmp_path):
    """What reads only this package's names would start a fresh gate without a word."""
    section = {"start": 0, "end": 2, "mask_token_id": MASK}
    with pytest.raises(UserError, match="a folder of alodlm's authors.*convert it first"):
        convert_from_hf(plain.path, tmp_path / "out", name="alodlm", section=section)
    with pytest.raises(UserError, match=r"leave out --alodlm\.start"):
        tool.main([str(plain.path), str(tmp_path / "out"), "--model.name", "alodlm", "--alodlm.start", "0"])
    with pytest.raises(UserError, match="convert it first"):
        load_model(plain.path)
    # Asked for by name, the backbone alone can be had.
    tool.main([str(plain.path), str(tmp_path / "ar"), "--model.name", "ar"])
    assert load_model(tmp_path / "ar").method == "ar"


@pytest.mark.slow
def test_a_run_starts_from_the_result(plain, tmp_path):
    convert_published(plain.path, tmp_path / "checkpoint")
    section = ["start", "0", "end", "2", "passes", "4", "mask_token_id", str(MASK), "carry_norm"]
    args = ["--model.name", "alodlm", *[f"--alodlm.{w}" if w.isidentifier() else w for w in section]]
    args += ["--model.flavor", "hf", "--model.hf_assets_path", str(tmp_path / "checkpoint/hf_assets")]
    args += ["--tokenizer.kind", "byte", "--checkpoint.enable"]
    args += ["--checkpoint.initial_load_path", str(tmp_path / "checkpoint")]
    got = run(jobs.loaded_weights, world=1, folder=str(tmp_path), args=args)[0]
    expected = load_model(tmp_path / "checkpoint").model.state_dict()
    for name, value in got.items():
        assert torch.equal(value, expected[name.replace("core.layers", "layers")]), name
