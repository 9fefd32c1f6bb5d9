"""Pause tokens: the expanded batch, which ids may be a pause, and the model on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.test_looped_model import build, logits, plain, rows, tokens_for
from torchtitan_ext import backbones, models
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError
from torchtitan_ext.masks import document_ids
from torchtitan_ext.methods.looped import Section, build_objective, model_registry, pause
from torchtitan_ext.methods.looped.objective import PauseObjective
from torchtitan_ext.trainer import default_config

documents = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def batch(lengths: list[int], seed: int = 0):
    """A packed row with the labels of the project: -100 at each document's last token."""
    positions = rows(*lengths)
    tokens = tokens_for(positions, seed)
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
    return tokens, positions, labels


def prepared(lengths: list[int], *, pauses: int, seed: int = 0):
    tokens, positions, labels = batch(lengths, seed)
    objective = PauseObjective(pauses=pauses, pause_id=263)
    return objective.prepare(
        {"input": tokens, "positions": positions}, labels, generator=torch.Generator().manual_seed(0)
    )


@given(lengths=documents, pauses=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_expansion_written_token_by_token(lengths, pauses):
    tokens, positions, labels = batch(lengths)
    wanted: dict[str, list[int]] = {"input": [], "positions": [], "labels": []}
    place = 0
    for token, position, label in zip(tokens[0], positions[0], labels[0], strict=True):
        place = 0 if position == 0 else place
        for j in range(1 + pauses):
            wanted["input"].append(int(token) if j == 0 else 263)
            wanted["positions"].append(place)
            wanted["labels"].append(int(label) if j == pauses else -100)
            place += 1
    got = prepared(lengths, pauses=pauses)
    assert got.inputs["input"][0].tolist() == wanted["input"]
    assert got.inputs["positions"][0].tolist() == wanted["positions"]
    assert got.labels[0].tolist() == wanted["labels"]


@given(lengths=documents, pauses=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_loss_lies_on_last_pauses_alone_and_counts_data_tokens(lengths, pauses):
    tokens, positions, labels = batch(lengths)
    got = prepared(lengths, pauses=pauses)
    width = 1 + pauses
    supervised = got.labels[0] != -100
    assert all(index % width == pauses for index in supervised.nonzero()[:, 0].tolist())
    assert got.counts == {"loss": float((labels != -100).sum())}
    # The same documents, each with the pauses that belong to it.
    expected = document_ids(positions).repeat_interleave(width, dim=1)
    assert torch.equal(document_ids(got.inputs["positions"]), expected)
    assert torch.equal(got.inputs["input"][:, ::width], tokens)


def test_expand_prompt_is_the_same_expansion():
    tokens = tokens_for(rows(5))
    expanded = pause.expand_tokens(tokens, pauses=2, pause_id=9)
    assert pause.expand_prompt(tokens[0].tolist(), pauses=2, pause_id=9) == expanded[0].tolist()


def test_data_that_holds_the_pause_token_is_refused():
    tokens, positions, labels = batch([4])
    objective = PauseObjective(pauses=1, pause_id=int(tokens[0, 2]))
    with pytest.raises(UserError, match="occurs in the data"):
        objective.prepare({"input": tokens, "positions": positions}, labels, generator=torch.Generator())


def test_packed_documents_equal_separate_ones():
    model = build(kind="pause", pause_tokens=2)
    lengths = [3, 1, 6]

    def run(*chosen):
        got = prepared(list(chosen), pauses=2)
        return got.inputs["input"], got.inputs["positions"]

    tokens, positions = run(*lengths)
    with torch.no_grad():
        packed = logits(model, tokens, positions)
        pieces = tokens.split([3 * n for n in lengths], dim=1)
        separate = [logits(model, piece, rows(piece.shape[1])) for piece in pieces]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changed", [0, 2, 3, 7])
def test_a_token_changes_nothing_before_it_nor_in_another_document(changed):
    model = build(kind="pause", pause_tokens=1)
    tokens, positions, _ = batch([3, 5])
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 256

    def out(given):
        expanded = pause.expand_tokens(given, pauses=1, pause_id=263)
        return logits(model, expanded, pause.expand_positions(positions, pauses=1))

    with torch.no_grad():
        difference = (out(tokens) - out(other)).abs().amax(-1)[0].view(-1, 2)
    document = range(3) if changed < 3 else range(3, 8)
    for t in range(8):
        if t < changed or t not in document:
            assert (difference[t] == 0).all(), t
    assert (difference[changed] > 0).all()


def test_the_model_is_the_backbone_on_the_expanded_sequence():
    model = build(kind="pause")
    got = prepared([4, 5], pauses=1)
    args = got.inputs["input"], got.inputs["positions"]
    with torch.no_grad():
        assert torch.equal(logits(model, *args), logits(plain("smollm2-debug", model), *args))


def config_with(**knobs):
    config = default_config({"name": "looped"})
    config.model.flavor = "smollm2-debug"
    config.looped = Section(kind="pause", **knobs)
    return config


def test_rotary_tables_hold_the_expanded_sequence():
    config = config_with(pause_tokens=3)
    config.training.seq_len = 64
    spec = models.build_spec(config)
    spec.model.update_from_config(config=config)
    spec.model.update_from_config(config=config)  # as often as one likes
    assert spec.model.max_seq_len == 256
    model = spec.model.build()
    model.init_weights()
    assert {block.attention.rope.cache.shape[0] for block in model.layers.values()} == {256}


def test_a_sequence_that_outgrows_the_context_is_refused():
    config = config_with(pause_tokens=3)
    config.training.seq_len = 1024
    with pytest.raises(UserError) as caught:
        models.build_spec(config).model.update_from_config(config=config)
    for word in ("pause_tokens = 3", "seq_len = 1024", "4096 tokens", "2048", "up to 512"):
        assert word in str(caught.value)


def test_pipeline_parallel_is_refused():
    config = config_with()
    config.training.seq_len = 64
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2"):
        models.build_spec(config).model.update_from_config(config=config)


@pytest.mark.parametrize("pauses", [1, 3])
def test_counted_flops_are_those_of_the_expanded_sequence(pauses):
    model = build(kind="pause", pause_tokens=pauses)
    length, width = 32, 1 + pauses
    positions = rows(length * width)
    with FlopCounterMode(display=False) as counter:
        logits(model, tokens_for(positions), positions).sum().backward()
    counted = sum(f for op, f in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    size = backbones.lookup("smollm2-debug")
    attention = 3 * 4 * width * 4 * length * width * size.n_heads * size.head_dim
    _, ours = model.config.get_nparams_and_flops(model, length)
    assert ours - attention == pytest.approx(counted / length, rel=0.01)


def test_the_last_row_is_the_default_pause():
    assert build_objective(config_with()).pause_id == 263
    assert model_registry("smollm2-debug", section=Section(kind="pause")).model.pause_token_id == 263


@pytest.mark.parametrize(
    ("pause_id", "words"), [(65, "stands for '<0x41>'"), ("eos", "is the tokenizer's EOS"), ("pad", "PAD")]
)
def test_ids_that_the_tokenizer_uses_are_refused(pause_id, words):
    tokenizer = Tokenizer.Config(kind="byte").build(tokenizer_path="")
    used = pause_id if isinstance(pause_id, int) else getattr(tokenizer, f"{pause_id}_id")
    with pytest.raises(UserError, match=words):
        build_objective(config_with(pause_token_id=used))


def test_free_and_spare_special_ids_are_allowed():
    tokenizer = Tokenizer.Config(kind="byte").build(tokenizer_path="")
    for allowed in (262, tokenizer.mask_id):
        assert build_objective(config_with(pause_token_id=allowed)).pause_id == allowed
