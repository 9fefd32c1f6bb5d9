"""The masked-diffusion loss: what is masked, what it weighs, and that its mean is the exact bound."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import backbones
from torchtitan_ext.losses import LossSection
from torchtitan_ext.methods.mdlm.objective import (
    MaskedDiffusion,
    document_starts,
    fill_with_eos,
    mask_probability,
    readout_labels,
)

MASK, EOS, IGNORE = 63, 62, -100


def row_of(documents: list[tuple[int, int]], *, generator: torch.Generator, padding: int = 0):
    """A packed row as the loader makes it: (tokens, of which the first few are a prompt); EOS ends each."""
    tokens, positions, labels = [], [], []
    for length, prompt in documents:
        text = torch.randint(60, (length,), generator=generator)
        text[-1] = EOS
        target = torch.full((length,), IGNORE)
        target[:-1] = torch.where(torch.arange(1, length) >= prompt, text[1:], IGNORE)
        tokens.append(text)
        labels.append(target)
        positions.append(torch.arange(length))
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.long))
        labels.append(torch.full((padding,), IGNORE))
        positions.append(torch.arange(padding))
    return torch.cat(tokens), torch.cat(positions), torch.cat(labels)


def batch_of(rows: list[list[tuple[int, int]]], *, seed: int = 0, length: int | None = None):
    generator = torch.Generator().manual_seed(seed)
    length = length or max(sum(n for n, _ in row) for row in rows)
    made = [row_of(r, generator=generator, padding=length - sum(n for n, _ in r)) for r in rows]
    tokens, positions, labels = (torch.stack(part) for part in zip(*made, strict=True))
    return {"input": tokens, "positions": positions}, labels


def prepare(objective, inputs, labels, seed: int = 0):
    before = {k: v.clone() for k, v in inputs.items()}, labels.clone()
    prepared = objective.prepare(inputs, labels, generator=torch.Generator().manual_seed(seed))
    assert all(torch.equal(inputs[k], v) for k, v in before[0].items()) and torch.equal(labels, before[1])
    return prepared


document = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(document, min_size=1, max_size=4), min_size=1, max_size=3),
    prediction=st.sampled_from(["own", "shifted"]),
    noise=st.sampled_from(["document", "row"]),
    multiple=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_what_is_masked_and_what_it_weighs(rows, prediction, noise, multiple, seed):
    inputs, labels = batch_of(rows, seed=seed)
    tokens, positions = inputs["input"], inputs["positions"]
    eps = 0.01
    objective = MaskedDiffusion(mask_id=MASK, prediction=prediction, noise=noise, eps=eps, multiple=multiple)
    got = prepare(objective, inputs, labels, seed)
    hidden = got.inputs["input"] == MASK
    supervised = torch.zeros_like(hidden)
    supervised[:, 1:] = labels[:, :-1] != IGNORE
    assert not (hidden & ~supervised).any(), "prompts, first tokens and padding are never masked"
    assert torch.equal(got.inputs["input"], tokens.masked_fill(hidden, MASK))
    assert torch.equal(got.inputs["positions"], positions)
    assert got.counts == {"loss": float(supervised.sum()), "masked": float(hidden.sum())}
    index, targets = got.inputs["readout_M"], got.labels[0]
    assert len(index) % multiple == 0 and got.labels.shape == (1, len(index))
    real = targets != IGNORE
    assert int(real.sum()) == int(hidden.sum())
    back = 1 if prediction == "shifted" else 0
    row, place = index[real] // tokens.shape[1], index[real] % tokens.shape[1]
    assert torch.equal(hidden.nonzero(), torch.stack([row, place + back], 1)), "each masked token once"
    assert torch.equal(targets[real], tokens[row, place + back])
    number = (positions == 0).cumsum(1)
    assert torch.equal(number[row, place], number[row, place + back]), "read inside the document"
    weights = got.inputs["weights_1MT"][0][real]
    assert (weights[:, 1] == 1).all() and (weights[:, 0] >= 1).all() and (weights[:, 0] <= 1 / eps + 1).all()
    groups: dict[tuple[int, int], set[float]] = {}
    for r, p, w in zip(row.tolist(), place.tolist(), weights[:, 0].tolist(), strict=True):
        groups.setdefault((r, int(number[r, p]) if noise == "document" else 0), set()).add(w)
    assert all(len(values) == 1 for values in groups.values())
    assert len(set().union(*groups.values())) == len(groups), "each draws its own noise"


def test_masked_fraction_follows_the_noise():
    """Long documents: each one's fraction is its p, and the p are uniform."""
    inputs, labels = batch_of([[(1000, 0)] * 4] * 100)
    got = prepare(MaskedDiffusion(mask_id=MASK, eps=0.1), inputs, labels)
    hidden = (got.inputs["input"] == MASK).view(400, 1000)
    weight = torch.zeros(hidden.numel())
    weight[got.inputs["readout_M"]] = got.inputs["weights_1MT"][0, :, 0]
    p = 1 / weight.view(400, 1000).max(1).values
    fraction = hidden[:, 1:].float().mean(1)
    assert ((fraction - p).abs() <= 5 * (p * (1 - p) / 999).sqrt() + 1e-6).all()
    # Uniform in [0.1, 1]: the largest distance of the empirical distribution (Kolmogorov, 1e-4 level).
    level = (p.sort().values - 0.1) / 0.9
    assert (level - (torch.arange(400) + 0.5) / 400).abs().max() < 2.23 / 400**0.5
    assert torch.equal(
        mask_probability(torch.tensor([0.0, 0.5, 1.0]), eps=0.1), torch.tensor([0.1, 0.55, 1.0])
    )


def test_noise_is_a_function_of_the_generator():
    inputs, labels = batch_of([[(9, 2), (8, 0)], [(17, 3)]])
    objective = MaskedDiffusion(mask_id=MASK)
    first, again, other = (prepare(objective, inputs, labels, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first.inputs[k], again.inputs[k]) for k in first.inputs)
    assert not torch.equal(first.inputs["input"], other.inputs["input"])


def test_documents_start_where_positions_restart():
    positions = torch.tensor([[0, 1, 0, 0, 1, 2], [4, 5, 0, 1, 2, 3]])
    assert document_starts(positions).tolist() == [[0, 0, 2, 3, 3, 3], [0, 0, 2, 2, 2, 2]]


def test_shifted_targets_stand_one_to_the_left():
    targets = torch.tensor([[IGNORE, 5, IGNORE, IGNORE, 7, 8]])
    assert readout_labels(targets, prediction="own") is targets
    assert readout_labels(targets, prediction="shifted").tolist() == [[5, IGNORE, IGNORE, 7, 8, IGNORE]]


# --- padding ---------------------------------------------------------------------------


def test_padding_becomes_eos_of_the_last_document():
    """Two documents and four tokens of padding; prompts of two."""
    tokens = torch.tensor([[1, 2, 3, EOS, 4, 5, EOS, 0, 0, 0, 0]])
    labels = torch.tensor([[IGNORE, 3, EOS, IGNORE, IGNORE, EOS, *[IGNORE] * 5]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]])
    got = fill_with_eos(tokens, labels, positions, eos_id=EOS)
    assert got[0].tolist() == [[1, 2, 3, EOS, 4, 5, EOS, EOS, EOS, EOS, EOS]]
    assert got[1].tolist() == [[IGNORE, 3, EOS, IGNORE, IGNORE, EOS, EOS, EOS, EOS, EOS, IGNORE]]
    assert got[2].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    "tokens, labels, positions",
    [
        ([1, 2, EOS, 3, 4, EOS], [2, EOS, -100, 4, EOS, -100], [0, 1, 2, 0, 1, 2]),  # no padding
        ([0, 0, 0, 0, 0, 0], [-100] * 6, [0, 1, 2, 3, 4, 5]),  # nothing else
        ([1, 2, 3, 4, 0, 0], [2, 3, 4, -100, -100, -100], [0, 1, 2, 3, 0, 1]),  # cut before its EOS
        ([1, 2, 3, EOS, 0, 0], [2, 3, -100, -100, -100, -100], [0, 1, 2, 3, 0, 1]),  # EOS is no target
        ([1, 2, 3, EOS, 5, 6], [2, 3, EOS, -100, -100, -100], [0, 1, 2, 3, 0, 1]),  # an unlabelled document
        ([EOS, 0, 0, 0, 0, 0], [-100] * 6, [0, 0, 1, 2, 3, 4]),  # a document of EOS alone
    ],
)
def test_what_is_no_padding_stays(tokens, labels, positions):
    given_row = [torch.tensor([x]) for x in (tokens, labels, positions)]
    for got, want in zip(fill_with_eos(*given_row, eos_id=EOS), given_row, strict=True):
        assert torch.equal(got, want)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(2, 6), st.just(1)), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    extra=st.integers(0, 5),
)
def test_filled_rows_are_those_of_longer_documents(rows, extra):
    length = max(sum(n for n, _ in row) for row in rows) + extra
    inputs, labels = batch_of(rows, length=length)
    tokens, labels, positions = fill_with_eos(inputs["input"], labels, inputs["positions"], eos_id=EOS)
    for b, row in enumerate(rows):
        begin = sum(n for n, _ in row[:-1])
        end = begin + row[-1][0]
        assert positions[b, begin:].tolist() == list(range(length - begin))
        assert (tokens[b, end - 1 :] == EOS).all() and labels[b, -1] == IGNORE
        assert torch.equal(labels[b, begin:-1], tokens[b, begin + 1 :])
        assert torch.equal(tokens[b, :end], inputs["input"][b, :end])


def test_eos_padding_is_masked_and_counted():
    inputs, labels = batch_of([[(5, 2)]], length=400)
    got = prepare(MaskedDiffusion(mask_id=MASK, eos_id=EOS, eps=0.9), inputs, labels)
    assert got.counts["loss"] == 398 and got.counts["masked"] > 330
    assert (got.inputs["input"][0, 5:] == MASK).sum() > 320
    none = prepare(MaskedDiffusion(mask_id=MASK, eps=0.9), inputs, labels)
    assert none.counts["loss"] == 3


# --- loss ------------------------------------------------------------------------------


@functools.cache
def model(flavor: str = "llada-debug") -> backbones.Backbone:
    size = dataclasses.replace(backbones.lookup(flavor), vocab_size=64, n_layers=2)
    made = backbones.build_config(size, attention="dense").build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    return made.train()


class Fixed(MaskedDiffusion):
    """Noise that is a function of the tokens, so that it does not depend on batches."""

    def draw(self, positions_BL, *, generator):
        key = self.tokens_BL.double() + 0.1 * positions_BL
        starts = document_starts(positions_BL)
        t = (key * 12.9898).sin().mul(43758.5453).remainder(1).float()
        return t.gather(1, starts), (key * 78.233).sin().mul(43758.5453).remainder(1).float()

    def prepare(self, inputs, labels, *, generator):
        self.tokens_BL = inputs["input"]
        return super().prepare(inputs, labels, generator=generator)


def losses_and_gradients(objective, microbatches, *, network):
    """The step's loss as the trainer computes it: counts over all microbatches, gradients accumulated."""
    prepared = [objective.prepare(i, y, generator=torch.Generator()) for i, y in microbatches]
    counts = {t: torch.tensor(sum(p.counts[t] for p in prepared)) for t in objective.terms}
    network.zero_grad()
    total, metrics = 0.0, {}
    for p in prepared:
        rest = {k: v for k, v in p.inputs.items() if k not in ("input", *objective.loss_inputs)}
        rest["attention_masks"] = network.get_attention_masks(rest["positions"])
        loss, own = objective.loss(
            network,
            p.inputs["input"],
            p.labels,
            model_inputs=rest,
            loss_inputs={k: p.inputs[k] for k in objective.loss_inputs},
            counts=counts,
            loss_fn=LossSection(global_vocab_size=64).build(),
        )
        loss.backward()
        total += loss.item()
        for k, v in own.items():
            metrics[k] = metrics.get(k, 0.0) + v.item()
    return total, metrics, {n: p.grad.clone() for n, p in network.named_parameters()}


@pytest.mark.parametrize("prediction, flavor", [("own", "llada-debug"), ("shifted", "dream-debug")])
def test_the_loss_is_the_definition(prediction, flavor):
    """Document by document, token by token; packing, prompts and padding change nothing."""
    network, objective = model(flavor), Fixed(mask_id=MASK, prediction=prediction)
    rows = [[(6, 2), (9, 0)], [(4, 1), (3, 3), (5, 2)], [(11, 5)]]
    inputs, labels = batch_of(rows, seed=11)
    total, metrics, _ = losses_and_gradients(objective, [(inputs, labels)], network=network)
    want = plain = masked = supervised = 0.0
    for b, row in enumerate(rows):
        begin = 0
        for length, prompt in row:
            text = inputs["input"][b, begin : begin + length]
            key = text.double() + 0.1 * torch.arange(length)
            t = float((key[0] * 12.9898).sin().mul(43758.5453).remainder(1))
            level = (key * 78.233).sin().mul(43758.5453).remainder(1)
            p = (1 - 1e-3) * t + 1e-3
            targets = [i for i in range(max(prompt, 1), length)]
            hidden = [i for i in targets if level[i] < p]
            shown = [MASK if i in hidden else int(x) for i, x in enumerate(text)]
            everything = torch.ones(1, 1, length, length, dtype=torch.bool)
            with torch.no_grad():
                logits = network(torch.tensor([shown]), torch.arange(length)[None], everything)[0]
            if prediction == "shifted":
                logits = torch.cat([logits[:1], logits[:-1]])
            values = [-float(logits[i].log_softmax(-1)[text[i]]) for i in hidden]
            want, plain = want + sum(values) / p, plain + sum(values)
            masked, supervised = masked + len(hidden), supervised + len(targets)
            begin += length
    assert masked > 8
    assert total == pytest.approx(want / supervised, rel=1e-4)
    assert metrics["mdlm/masked_loss"] == pytest.approx(plain / masked, rel=1e-4)
    assert metrics["mdlm/masked_share"] == pytest.approx(masked / supervised)


def test_the_mean_over_masks_is_the_exact_bound():
    """Three tokens behind a given one, all masks and Gauss nodes of t: the mean over all orders of
    minus the log-probability of the tokens one by one, divided by three."""
    network = model()
    text = torch.tensor([9, 4, 33, 50])
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)

    @functools.cache
    @torch.no_grad()
    def log_probability(place: int, hidden: frozenset[int]) -> float:
        shown = torch.tensor([[MASK if i in hidden else int(x) for i, x in enumerate(text)]])
        logits = network(shown, torch.arange(4)[None], everything)[0]
        return float(logits[place].log_softmax(-1)[text[place]])

    orders = list(itertools.permutations([1, 2, 3]))
    exact = -sum(log_probability(order[i], frozenset(order[i:])) for order in orders for i in range(3)) / len(
        orders
    )

    half, root = 0.5, 0.5 * math.sqrt(3 / 5)
    nodes = [(half - root, 5 / 18), (half, 8 / 18), (half + root, 5 / 18)]
    mean = 0.0
    for t, weight in nodes:
        for hidden in itertools.product([False, True], repeat=3):

            class Forced(MaskedDiffusion):
                def draw(self, positions_BL, *, generator, t=t, hidden=hidden):
                    level = torch.tensor([[0.0, *(0.0 if h else 1.0 for h in hidden)]])
                    return torch.full((1, 4), t), level

            batch = (
                {"input": text[None], "positions": torch.arange(4)[None]},
                torch.tensor([[4, 33, 50, IGNORE]]),
            )
            loss, _, _ = losses_and_gradients(Forced(mask_id=MASK, eps=1e-12), [batch], network=network)
            mean += weight * t ** sum(hidden) * (1 - t) ** (3 - sum(hidden)) * loss
    assert mean == pytest.approx(exact / 3, rel=1e-5)


@settings(deadline=None, max_examples=8)
@given(
    rows=st.lists(st.lists(document, min_size=1, max_size=3), min_size=2, max_size=4),
    prediction=st.sampled_from(["own", "shifted"]),
)
def test_one_batch_equals_microbatches(rows, prediction):
    network, objective = model(), Fixed(mask_id=MASK, prediction=prediction)
    inputs, labels = batch_of(rows, seed=5)
    pieces = [({k: v[b : b + 1] for k, v in inputs.items()}, labels[b : b + 1]) for b in range(len(rows))]
    whole, parts = (
        losses_and_gradients(objective, micro, network=network) for micro in ([(inputs, labels)], pieces)
    )
    assert whole[0] == pytest.approx(parts[0], abs=1e-5)
    assert whole[1] == pytest.approx(parts[1], abs=1e-5)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(gradient, parts[2][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("case", ["no supervised token", "nothing masked"])
def test_an_empty_batch_gives_a_zero_that_is_connected(case):
    class Nothing(MaskedDiffusion):
        def draw(self, positions_BL, *, generator):
            return torch.zeros(positions_BL.shape), torch.ones(positions_BL.shape)

    inputs, labels = batch_of([[(6, 6 if case == "no supervised token" else 1)]])
    objective = Nothing(mask_id=MASK) if case == "nothing masked" else MaskedDiffusion(mask_id=MASK)
    loss, metrics, gradients = losses_and_gradients(objective, [(inputs, labels)], network=model())
    assert loss == 0.0 and metrics == {"mdlm/masked_loss": 0.0, "mdlm/masked_share": 0.0}
    assert all(g is not None and bool((g == 0).all()) for g in gradients.values())
