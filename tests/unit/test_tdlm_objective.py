"""What a training step sees of a trajectory, and its loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_tdlm_model import MASK, build
from torchtitan_ext.errors import UserError
from torchtitan_ext.losses import LossSection
from torchtitan_ext.methods.tdlm import temporal
from torchtitan_ext.methods.tdlm.objective import TrajectoryDistillation

IGNORE = -100


def batch_of(*rows: tuple[int, list[int]], length: int, seed: int = 0):
    """Rows of (prompt length, reveal steps of the response), padded to ``length``, as the loader has them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, MASK, (len(rows), length), generator=generator)
    labels = torch.full_like(tokens, IGNORE)
    for b, (prompt, steps) in enumerate(rows):
        labels[b, prompt : prompt + len(steps)] = torch.tensor(steps, dtype=torch.long)
    positions = torch.arange(length).expand(len(rows), -1).clone()
    return {"input": tokens, "positions": positions}, labels


class Fixed(TrajectoryDistillation):
    """The sampled steps are given."""

    steps: list[list[int]]

    def draw(self, reveal_step_BL, *, generator):
        return torch.tensor(self.steps)


def prepare(objective, inputs, labels, seed: int = 0):
    before = {k: v.clone() for k, v in inputs.items()}, labels.clone()
    prepared = objective.prepare(inputs, labels, generator=torch.Generator().manual_seed(seed))
    assert all(torch.equal(inputs[k], v) for k, v in before[0].items()) and torch.equal(labels, before[1])
    return prepared


@pytest.mark.parametrize("prediction", ["own", "shifted"])
def test_a_written_example(prediction):
    """Two trajectories of 4 and 3 steps, K = 2: s = 0, 2, 4 and 0, 1, 3; the complete state is not run."""
    inputs, labels = batch_of((2, [3, 1, 4, 2]), (1, [1, 2, 3, 3]), length=7)
    objective = Fixed(mask_id=MASK, states=2, prediction=prediction)
    objective.steps = [[0, 2, 4], [0, 1, 3]]
    got = prepare(objective, inputs, labels)
    y, m = inputs["input"], MASK
    assert got.inputs["input"].tolist() == [
        [*y[0, :2].tolist(), m, m, m, m, y[0, 6].item()],
        [*y[0, :2].tolist(), m, y[0, 3].item(), m, y[0, 5].item(), y[0, 6].item()],
        [y[1, 0].item(), m, m, m, m, *y[1, 5:].tolist()],
        [y[1, 0].item(), y[1, 1].item(), m, m, m, *y[1, 5:].tolist()],
    ]
    assert torch.equal(got.inputs["masked_NL"], got.inputs["input"] == m)
    assert got.inputs["revealed_N"].tolist() == [0, 2, 0, 1]
    # Padding is a document of its own.
    assert got.inputs["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0]] * 2 + [[0, 1, 2, 3, 4, 0, 1]] * 2
    targets = [(1, 2), (1, 4), (3, 2), (3, 3), (3, 4)]
    back = 1 if prediction == "shifted" else 0
    assert got.inputs["readout_M"][:5].tolist() == [7 * n + p - back for n, p in targets]
    assert got.labels[0, :5].tolist() == [y[n // 2, p].item() for n, p in targets]
    assert set(got.labels[0, 5:].tolist()) <= {IGNORE}
    assert got.counts == {"loss": 5.0}
    assert set(got.inputs) == {"input", "positions", "readout_M", "masked_NL", "revealed_N"}


@st.composite
def responses(draw):
    total = draw(st.integers(4, 9))
    extra = draw(st.lists(st.integers(1, total), max_size=4))
    return draw(st.integers(1, 3)), draw(st.permutations([*range(1, total + 1), *extra]))


@given(
    rows=st.lists(responses(), min_size=1, max_size=3),
    states=st.integers(2, 4),
    prediction=st.sampled_from(["own", "shifted"]),
    multiple=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_each_token_after_the_first_interval_is_supervised_once(rows, states, prediction, multiple, seed):
    length = max(prompt + len(steps) for prompt, steps in rows) + 1
    inputs, labels = batch_of(*rows, length=length, seed=seed)
    objective = TrajectoryDistillation(mask_id=MASK, states=states, prediction=prediction, multiple=multiple)
    got = prepare(objective, inputs, labels, seed)
    index, found = got.inputs["readout_M"], got.labels[0]
    assert len(index) == len(found) > 0 and len(index) % multiple == 0
    supervised = torch.zeros_like(labels)
    shown = got.inputs["input"].unflatten(0, (-1, states))
    back = 1 if prediction == "shifted" else 0
    for place, label in zip(index.tolist(), found.tolist(), strict=True):
        if label == IGNORE:
            continue
        row, p = divmod(place, length)
        b, i, p = row // states, row % states, p + back
        assert i > 0 and shown[b, i, p] == MASK and label == inputs["input"][b, p]
        assert i == states - 1 or shown[b, i + 1, p] != MASK
        supervised[b, p] += 1
    first = (shown[:, 0] == MASK) & (shown[:, 1] != MASK)
    assert torch.equal(supervised + first, (labels != IGNORE).long())
    assert got.counts["loss"] == supervised.sum()


def loss_of(objective, model, prepared, counts: float, *, chunks: int = 1):
    positions = prepared.inputs["positions"]
    loss_fn = LossSection(num_chunks=chunks, global_vocab_size=model.config.vocab_size).build()
    if chunks > 1:
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return objective.loss(
        model,
        prepared.inputs["input"],
        prepared.labels,
        model_inputs={"positions": positions, "attention_masks": model.get_attention_masks(positions)},
        loss_inputs={k: prepared.inputs[k] for k in objective.loss_inputs},
        counts={"loss": torch.tensor(counts)},
        loss_fn=loss_fn,
    )[0]


@pytest.mark.parametrize("flavor", ["llada-debug", "dream-debug"])
def test_the_loss_is_the_mean_cross_entropy_over_all_targets(flavor):
    model = build(flavor)
    inputs, labels = batch_of((2, [3, 1, 4, 2]), (1, [1, 2, 3, 3]), length=7)
    objective = Fixed(mask_id=MASK, states=2, prediction=model.config.prediction)
    objective.steps = [[0, 2, 4], [0, 1, 3]]
    prepared = prepare(objective, inputs, labels)
    states = temporal.States(prepared.inputs["masked_NL"], prepared.inputs["revealed_N"], 2)
    positions = prepared.inputs["positions"]
    with torch.no_grad():
        logits = model(
            prepared.inputs["input"], positions, model.get_attention_masks(positions), temporal=states
        )
        if flavor == "dream-debug":
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    y = inputs["input"]
    terms = [-logits[n, p].log_softmax(-1)[y[n // 2, p]] for n, p in [(1, 2), (1, 4), (3, 2), (3, 3), (3, 4)]]
    got = loss_of(objective, model, prepared, prepared.counts["loss"])
    torch.testing.assert_close(got, torch.stack(terms).mean())


def test_chunks_and_two_microbatches_are_one_batch():
    rows = [(2, [3, 1, 4, 2]), (1, [1, 2, 3, 3])]
    steps = [[0, 2, 4], [0, 1, 3]]
    model = build()
    grads = []
    for parts, chunks in (([[0, 1]], 1), ([[0, 1]], 3), ([[0], [1]], 1)):
        model.zero_grad()
        model._skip_lm_head = False
        for part in parts:
            inputs, labels = batch_of(*rows, length=7)
            objective = Fixed(mask_id=MASK, states=2, multiple=chunks)
            objective.steps = [steps[b] for b in part]
            inputs = {k: v[part] for k, v in inputs.items()}
            prepared = prepare(objective, inputs, labels[part])
            loss_of(objective, model, prepared, 5.0, chunks=chunks).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(".temporal." in name for name in grads[0]) and len(grads[0]) == 10
    for other in grads[1:]:
        for name, gradient in grads[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_rows_of_padding_alone_train_nothing():
    model = build()
    inputs, labels = batch_of((1, []), (2, []), length=5)
    prepared = prepare(TrajectoryDistillation(mask_id=MASK, states=3), inputs, labels)
    assert prepared.counts == {"loss": 0.0} and not prepared.inputs["masked_NL"].any()
    loss = loss_of(TrajectoryDistillation(mask_id=MASK, states=3), model, prepared, 0.0)
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("window", ["full", "current"])
def test_training_lowers_the_loss_from_the_backbones(window):
    """From the start of a run (W_O = 0) with the temporal parameters alone, with and without memory."""
    model = build(noise=0.0, head_dim=8, window=window)
    backbone = {k: v.clone() for k, v in model.state_dict().items() if ".temporal." not in k}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    inputs, labels = batch_of((2, list(range(1, 9))), (3, list(range(8, 0, -1))), length=12)
    prepared = prepare(TrajectoryDistillation(mask_id=MASK, states=4), inputs, labels)
    losses = []
    for _ in range(25):
        loss = loss_of(
            TrajectoryDistillation(mask_id=MASK, states=4), model, prepared, prepared.counts["loss"]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(v, backbone[k]) for k, v in model.state_dict().items() if k in backbone)


def test_the_same_generator_draws_the_same_states():
    inputs, labels = batch_of((2, list(range(1, 10))), length=12)
    objective = TrajectoryDistillation(mask_id=MASK, states=3)
    drawn = [prepare(objective, inputs, labels, seed).inputs["input"] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_trajectory_of_fewer_steps_than_states_is_refused():
    inputs, labels = batch_of((2, [1, 1, 1]), length=6)
    with pytest.raises(UserError, match=r"states = 2 \(K\) is more than the 1 steps"):
        TrajectoryDistillation(mask_id=MASK, states=2).prepare(inputs, labels, generator=torch.Generator())
