"""ALoDLM on one process: WeDLM at K = 1, the rollout against a slow twin, isolation, memory, bad input."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.reference.alodlm import by_hand
from tests.unit.dual_streams import (
    MASK,
    build,
    gradients,
    loss_of,
    open_gate,
    prepare,
    rows,
    run_config,
)
from torchtitan_ext import backbones, losses
from torchtitan_ext.backbones import sizes
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods import alodlm, wedlm
from torchtitan_ext.methods.alodlm import Section, model_registry
from torchtitan_ext.methods.alodlm.objective import ALoDLMObjective
from torchtitan_ext.methods.wedlm.objective import WeDLMObjective
from torchtitan_ext.objective import IGNORE_INDEX

CORE = {"start": 1, "end": 3, "block_size": 4}


def pair(*, num_chunks: int = 1, scale: float = 2.0, **knobs):
    """A model with an open gate and its objective."""
    knobs = {**CORE, **knobs}
    model = build(alodlm, scale=scale, **knobs)
    open_gate(model)
    return model, ALoDLMObjective(Section(**knobs), mask_id=MASK, num_chunks=num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_one_pass_is_wedlm(num_chunks):
    """The same batch, loss and gradients."""
    packed = rows(9, 6, prompt=3, batch=2)
    plain = build(wedlm, block_size=4, scale=2.0)
    theirs = WeDLMObjective(mask_id=MASK, block_size=4, w_ar=1.0, weighting="global", multiple=num_chunks)
    expected, by_name = gradients(plain, theirs, prepare(theirs, packed))
    model, ours = pair(passes=1, num_chunks=num_chunks)
    got, named = gradients(model, ours, prepare(ours, packed))
    assert got == pytest.approx(expected, abs=1e-6)
    assert {name for name in named if name not in by_name} == {"core.gate.weight", "core.gate.depth_bias"}
    for name, gradient in by_name.items():
        torch.testing.assert_close(named[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert not named["core.gate.weight"].any()


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"feedback": "one_shot", "carry_norm": True},
        {"intermediate_supervision": False, "control_variate": False, "w_ar": 0.5},
        {"start": 0, "end": 4, "a": 1.0, "checkpoint_core": 2},
        {"loss_weighting": "local", "prior_decay": 0.0},
    ],
    ids=["paper", "public", "exit_only", "whole", "local"],
)
def test_loss_is_the_formula(knobs):
    """Every term from a rollout token by token, with the exits that the noise decides."""
    model, objective = pair(passes=3, num_chunks=2, **knobs)
    section = objective.section
    prepared = prepare(objective, rows(9, 6, prompt=2, batch=2))
    got, metrics = loss_of(model, objective, prepared)
    x = prepared.inputs
    valid = x["labels_M"] != IGNORE_INDEX
    noise = x["exit_noise_MK"][valid]
    l_MK, hazards, l_AK, exits = by_hand(
        model,
        prepared,
        lambda i, s, hazard: noise[i, s - 1].item() < hazard,
        feedback=section.feedback,
        carry_norm=section.carry_norm,
    )
    assert len(set(exits)) == 3, "the batch has exits at every depth"
    w = x["weights_M"][valid] / x["weights_M"].sum()
    denoise, c, u = 0.0, [], []
    full = torch.stack([h * torch.cumprod(torch.cat([torch.ones(1), 1 - h[:-1]]), 0) for h in hazards])
    qbar, pi = full.mean(0), torch.softmax(-section.prior_decay * torch.arange(3.0), 0)
    for i, z in enumerate(exits):
        omega = torch.zeros(3)
        omega[: z - 1] = full[i, : z - 1].detach()
        omega[z - 1] = 1 - omega.sum()
        if not section.intermediate_supervision:
            omega = torch.eye(3)[z - 1]
        denoise = denoise + w[i] * (omega * l_MK[i]).sum()
        u.append(full[i, z - 1].log())
        cost = l_MK[i, z - 1] - (l_MK[i, 0] if section.control_variate else 0)
        cost = cost + section.a * (u[i] - qbar[z - 1].log()) + section.b * (qbar[z - 1] / pi[z - 1]).log()
        c.append(cost.detach())
    actor = 0.0
    for segment in x["segment_M"][valid].unique():
        inside = [i for i, own in enumerate(x["segment_M"][valid]) if own == segment]
        actor = actor + sum(c[i] for i in inside) * sum(u[i] for i in inside) / len(exits)
    ar = l_AK.mean(1).sum() / len(l_AK)
    expected = (denoise + actor + section.w_ar * ar) / (1 + section.w_ar)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert metrics["alodlm/depth"].item() == pytest.approx(sum(exits) / len(exits))
    assert sum(metrics[f"alodlm/exit_{s}"].item() for s in (1, 2, 3)) == pytest.approx(1)
    # The gradients too, of every parameter.
    named = dict(model.named_parameters())
    got.backward()
    ours = [parameter.grad for parameter in named.values()]
    twin = torch.autograd.grad(expected, list(named.values()), allow_unused=True)
    for name, a, b in zip(named, ours, twin, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=2e-5, rtol=2e-3, msg=name)
    gate = torch.cat([ours[list(named).index(f"core.gate.{n}")].flatten() for n in ("weight", "depth_bias")])
    assert metrics["alodlm/gate_grad_norm/mean"].item() == pytest.approx(gate.norm().item(), rel=1e-4)


def test_documents_never_mix_whatever_exits():
    """Another token in the second document changes no readout of the first, in any pass."""
    model, objective = pair(passes=3, scale=3.0)
    readouts = []
    for change in (0, 1):
        prepared = prepare(objective, rows(9, 6))
        x = prepared.inputs
        for name, half in (("input", 0), ("gold_BL", 0), ("input", 15), ("gold_BL", 15)):
            x[name][:, half + 9 : half + 15] += change * (x[name][:, half + 9 : half + 15] != MASK)
        exits = alodlm.objective.Exits(
            x["gold_BL"], x["index_M"], x["labels_M"] != IGNORE_INDEX, x["exit_noise_MK"], x["index_A"]
        )
        with torch.no_grad():
            rollout = model(
                x["input"],
                positions=x["positions"],
                attention_masks=model.get_attention_masks(x["positions"]),
                exits=exits,
            )
        index = torch.cat([x["index_M"], x["index_A"]])
        first = (index % 15) < 9
        readouts.append((rollout.hidden_KND[:, first], rollout.hidden_KND[:, ~first]))
    assert torch.equal(readouts[0][0], readouts[1][0])
    assert not torch.allclose(readouts[0][1], readouts[1][1])


def test_clean_readouts_do_not_depend_on_the_exits():
    model, objective = pair(passes=3, scale=3.0)
    prepared = prepare(objective, rows(9, 6))
    results = []
    for noise in (0.0, 1.0):  # all leave at once, none leaves early
        prepared.inputs["exit_noise_MK"].fill_(noise)
        _, metrics = loss_of(model, objective, prepared)
        results.append(metrics)
    assert [r["alodlm/depth"].item() for r in results] == [1.0, 3.0]
    assert results[0]["alodlm/ar_loss"] == results[1]["alodlm/ar_loss"]


@pytest.mark.parametrize("weighting", ["global", "local"])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_batch_without_masks_has_zero_loss_and_all_gradients(passes, weighting):
    model, objective = pair(passes=passes, num_chunks=2, loss_weighting=weighting)
    loss, named = gradients(model, objective, prepare(objective, rows(9, 6, prompt=50)))
    assert loss == 0
    assert all(gradient.isfinite().all() and not gradient.any() for gradient in named.values())


def test_next_tokens_alone_train_where_nothing_is_masked():
    """Labels, but m = 0 in every block."""
    model, objective = pair(passes=2)
    objective.noise = lambda tokens, generator: (
        alodlm.objective.batch.Noise(torch.zeros(tokens.shape), torch.zeros(tokens.shape)),
        torch.zeros(*tokens.shape, 2),
    )
    prepared = prepare(objective, rows(9, 6))
    assert prepared.counts["masked"] == 0 and prepared.counts["ar"] == 13
    loss, named = gradients(model, objective, prepared)
    assert loss > 1 and all(gradient.isfinite().all() for gradient in named.values())
    assert not named["core.gate.weight"].any() and named["lm_head.weight"].any()


def test_same_generator_same_exits():
    _, objective = pair(passes=3)
    first, again = (prepare(objective, rows(9, 6)).inputs for _ in range(2))
    later = prepare(objective, rows(9, 6), step=2).inputs
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["exit_noise_MK"][:3], later["exit_noise_MK"][:3])


def test_plain_forward_runs_all_passes_and_one_pass_is_the_backbone():
    inputs, _ = rows(7, 6)
    tokens, positions = inputs["input"].repeat(1, 2), inputs["positions"].repeat(1, 2)
    outputs = {}
    for passes in (1, 3):
        model, _ = pair(passes=passes)
        masks = model.get_attention_masks(positions)
        h = model.prelude(tokens, positions, masks)
        for _ in range(passes):
            core = model.core.run(h, masks, positions)
            h = model.carry(core)
        with torch.no_grad():
            outputs[passes] = model(tokens, positions, masks)
            expected = model.lm_head(model.coda(core, positions, masks))
            assert torch.equal(outputs[passes], expected)
    plain = backbones.build_config(backbones.lookup("qwen3-untied-debug"), attention="dense").build()
    model, _ = pair(passes=1)
    gone = {name: value for name, value in model.state_dict().items() if not name.startswith("core.gate")}
    plain.load_state_dict(gone)
    with torch.no_grad():
        assert torch.equal(outputs[1], plain(tokens, positions, masks))
    assert not torch.allclose(outputs[1], outputs[3])


def test_state_dict_has_the_backbones_names_and_loads_back():
    model, _ = pair(passes=3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    backbone = backbones.build_config(backbones.lookup("qwen3-untied-debug"), attention="dense").build()
    assert set(state) == set(backbone.state_dict()) | {"core.gate.weight", "core.gate.depth_bias"}
    fresh = build(alodlm, passes=3, **CORE)
    assert fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())
    # A coda that recurs lies with the core; the prelude does not.
    assert list(model.core.layers) == ["1", "2", "3"] and list(model.layers) == ["0"]


class PeakBytes(TorchDispatchMode):
    """Largest sum of the sizes of all storages that operations made and that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def naive_token_losses(head, hidden, labels, weights, *, num_chunks=1):
    """All logits at once."""
    del num_chunks
    each = losses._token_losses(head(hidden), labels)
    return (each * weights).sum(), each.detach()


def test_logits_of_all_passes_never_exist_at_a_large_vocabulary(monkeypatch):
    """Peak of a whole step at vocabulary 151,936, in chunks and at once."""
    small = sizes.SIZES["qwen3-untied-debug"]
    wide = dataclasses.replace(small, n_layers=2, dim=16, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=16)
    monkeypatch.setitem(sizes.SIZES, "large-vocabulary", dataclasses.replace(wide, vocab_size=151_936))
    knobs = {"start": 0, "end": 2, "block_size": 8, "passes": 4}
    model = build(alodlm, flavor="large-vocabulary", **knobs)
    peaks, values = {}, {}
    for name, chunks in (("chunked", 8), ("naive", 1)):
        objective = ALoDLMObjective(Section(**knobs), mask_id=MASK, num_chunks=chunks)
        if name == "naive":
            monkeypatch.setattr(alodlm.objective, "weighted_token_losses", naive_token_losses)
        prepared = prepare(objective, rows(48))
        with PeakBytes() as counted:
            values[name], _ = gradients(model, objective, prepared)
        peaks[name] = counted.peak
    assert values["chunked"] == pytest.approx(values["naive"], abs=1e-5)
    rows_read = len(prepared.inputs["index_M"]) + len(prepared.inputs["index_A"])
    all_logits = 4 * rows_read * 151_936 * 4
    print(f"peak bytes {peaks}, logits of all passes {all_logits}")
    assert peaks["naive"] > all_logits > 2 * peaks["chunked"]


@pytest.mark.parametrize("passes", [1, 4])
def test_flops_are_those_of_the_passes(passes):
    """Matrix products of a step, counted, against what the config says (which reads out every slot)."""
    model, objective = pair(passes=passes, start=1, end=3, block_size=8)
    # All slots masked or observed are read out in the estimate, so mask everything and label everything.
    packed = rows(64, batch=2)
    objective.noise = lambda tokens, generator: (
        alodlm.objective.batch.Noise(torch.ones(tokens.shape), torch.zeros(tokens.shape)),
        torch.ones(*tokens.shape, passes),
    )
    prepared = prepare(objective, packed)
    with FlopCounterMode(display=False) as counter:
        gradients(model, objective, prepared)
    _, per_token = model.config.get_nparams_and_flops(model, 64)
    # The counter does not know the CPU's attention kernel, so scores are left out on both sides.
    scores = 12 * 4 * 32 * (1 + passes * 3) * (2 * 64 + 8)
    assert counter.get_total_flops() / (2 * 64) == pytest.approx(per_token - scores, rel=0.02)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"start": 0, "end": 0}, r"\[alodlm\] start = 0, end = 0 is not a core of layers"),
        ({"start": 3, "end": 5}, r"allowed: 0 <= start < end <= 4"),
        ({"start": -1, "end": 2}, r"start = -1"),
    ],
)
def test_a_core_outside_the_layers_is_refused(knobs, message):
    with pytest.raises(UserError, match=message):
        model_registry("smollm2-debug", section=Section(mask_token_id=MASK, **knobs))


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("passes", 0, "alodlm.passes must be at least 1, got 0"),
        ("q", 1.5, "alodlm.q must be between 0 and 1, got 1.5"),
        ("q", -0.1, "alodlm.q must be between 0 and 1"),
        ("tau", -1.0, "alodlm.tau must be a finite number of at least 0"),
        ("window", 0, "alodlm.window must be at least 1, got 0"),
        ("feedback", "twice", "alodlm.feedback must be 'cumulative' or 'one_shot', got 'twice'"),
        ("checkpoint_core", -1, "alodlm.checkpoint_core must not be negative"),
        ("b", float("inf"), "alodlm.b must be a finite number"),
        ("prior_decay", -1.0, "alodlm.prior_decay"),
    ],
)
def test_knobs_out_of_range_are_refused(knob, value, message):
    with pytest.raises(ValueError, match=message):
        Section(**{knob: value})


def test_what_it_does_not_work_with_is_refused(monkeypatch):
    section = Section(mask_token_id=MASK, **CORE)
    with pytest.raises(UserError, match=r"\[model\] attention = 'varlen' does not work"):
        model_registry("smollm2-debug", attention="varlen", section=section)
    with pytest.raises(UserError, match="needs a causal backbone"):
        model_registry("llada-debug", section=section)
    with pytest.raises(UserError, match=r"\[alodlm\] mask_token_id must be given"):
        model_registry("smollm2-debug", section=Section(**CORE))
    spec = model_registry("smollm2-debug", section=section)
    spec.model.enable_weight_tying = True
    with torch.device("meta"), pytest.raises(UserError, match="needs an LM head of its own"):
        spec.model.build()
    config = run_config("alodlm", monkeypatch)
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2 does not work"):
        model_registry("smollm2-debug", section=section).model.update_from_config(config=config)


def test_the_papers_mask_id_is_an_ordinary_token_of_qwen3(tmp_path, monkeypatch):
    """151665 is <tool_response> there; the refusal says so and names a free id."""
    write_qwen_ranks(tmp_path / "qwen.tiktoken")
    config = run_config("alodlm", monkeypatch)
    config.model.flavor, config.model.hf_assets_path = "qwen3-1.7B", str(tmp_path)
    config.alodlm.start, config.alodlm.end = 0, 28
    config.alodlm.mask_token_id = 151_665
    alodlm.complete(config)
    with pytest.raises(UserError, match=r"\[alodlm\] mask_token_id = 151665.*<tool_response>") as refused:
        alodlm.build_objective(config)
    assert "\n" not in str(refused.value)
    config.alodlm.mask_token_id = None
    alodlm.complete(config)
    assert config.alodlm.mask_token_id == 151_669
    assert alodlm.build_objective(config).mask_id == 151_669


def write_qwen_ranks(path) -> None:
    """A rank file of Qwen's length with made-up tokens."""
    import base64
    import itertools

    made = itertools.chain(
        (bytes([a]) for a in range(256)),
        (bytes([a, b]) for a in range(256) for b in range(256)),
        (bytes([97, b, c]) for b in range(256) for c in range(256)),
        (bytes([98, b, c]) for b in range(256) for c in range(256)),
    )
    ranks = itertools.islice(made, 151_643)
    path.write_bytes(
        b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)) + b"\n"
    )
