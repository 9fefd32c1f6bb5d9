"""The memory of earlier forwards against a slow twin, and decoding with it."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import tdlm as reference
from tests.unit.test_tdlm_model import build, plain
from torchtitan_ext.backbones import SIZES
from torchtitan_ext.decoding.masked_diffusion import generate
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.tdlm.decode import decode, memory_of
from torchtitan_ext.methods.tdlm.memory import HistoryMemory

VOCAB, MASK = 40, 39
windows = st.sampled_from(["full", "current", 1, 2, 3])


# --- the memory alone ------------------------------------------------------------------


class SlowMemory:
    """A list of keys for every masked position of every row, which are named by where they began."""

    def __init__(self, masked, *, window):
        self.names = [[(b, p) for p in range(len(row))] for b, row in enumerate(masked.tolist())]
        self.past = {(b, p): [] for b, p in masked.nonzero().tolist()}
        self.window = window

    def at(self, places):
        """The names of these tokens of the batch."""
        names = [name for row in self.names for name in row]
        return [names[place] for place in places]

    def forward(self, tick: int):
        """What each masked position sees, and then remembers: the number of the forward."""
        seen = {}
        for name, past in self.past.items():
            seen[name] = past[-self.window :] if isinstance(self.window, int) else list(past)
            past.append((tick, name))
        return seen


@given(
    masked=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3),
    window=st.sampled_from(["full", 1, 2, 3, 9]),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_serves_exactly_what_a_masked_position_has_been_through(masked, window, data):
    masked_BL = torch.tensor(masked)
    memory, slow = HistoryMemory(head_dim=2, window=window), SlowMemory(masked_BL, window=window)
    memory.begin(masked_BL)
    for tick in range(22):  # the buffers grow, and those of a window begin anew
        if tick and slow.past and data.draw(st.integers(0, 3)) == 0:
            _events(memory, slow, data)
        seen = slow.forward(tick)
        names = slow.at(memory.places_P.tolist())
        assert sorted(names) == sorted(slow.past)  # each once, in any order
        values = torch.tensor([[[[tick, b, p, 0]]] for b, p in names], dtype=torch.float32)
        values = values.view(len(names), 1, 1, 4)
        keys, got, allowed = memory.recall(0, -values, values)
        assert allowed is None and torch.equal(keys, -got)
        want = [[[float(t), float(b), float(p), 0.0] for t, (b, p) in seen[name]] for name in names]
        assert got[:, :, 0].tolist() == want


def _events(memory, slow, data):
    """Reveal some masked positions; perhaps keep some rows only, in another order and shorter."""
    revealed = [name for name in slow.past if data.draw(st.integers(0, 2)) == 0]
    where = [(r, row.index(n)) for n in revealed for r, row in enumerate(slow.names) if n in row]
    if where:
        memory.revealed([r for r, _ in where], [p for _, p in where])
    for name in revealed:
        del slow.past[name]
    if data.draw(st.booleans()):
        rows = data.draw(st.permutations(range(len(slow.names))))
        rows = rows[: data.draw(st.integers(1, len(rows)))]
        length = data.draw(st.integers(3, len(slow.names[0])))
        memory.select(rows, length)
        slow.names = [slow.names[r][:length] for r in rows]
        left = {name for row in slow.names for name in row}
        slow.past = {name: past for name, past in slow.past.items() if name in left}


def test_rotations_count_the_revealed_tokens_of_each_row():
    memory = HistoryMemory(head_dim=2)
    memory.begin(torch.tensor([[False, True, True], [True, True, True]]))
    memory.recall(0, torch.ones(5, 1, 1, 2), torch.ones(5, 1, 1, 2))
    memory.revealed([1, 1], [0, 2])
    x = torch.tensor([1.0, 0.0]).expand(3, 1, 1, 2)
    angles = torch.tensor([0.0, 0.0, 2.0])
    torch.testing.assert_close(memory.turn(x)[:, 0, 0, 0], angles.cos())
    memory.select([1], 3)
    torch.testing.assert_close(memory.turn(x[:1])[:, 0, 0, 0], torch.tensor([2.0]).cos())


@pytest.mark.parametrize("window", ["full", 3, "current"])
def test_its_bytes_are_layers_x_positions_x_forwards_x_widths(window):
    model = tiny(window=window)
    memory = memory_of(model)
    masked = torch.zeros(2, 8, dtype=torch.bool)
    masked[:, 3:] = True
    memory.begin(masked)
    positions = torch.arange(8).expand(2, -1)
    masks = model.get_attention_masks(positions)
    with torch.no_grad():
        for _ in range(5):
            model(torch.full((2, 8), MASK), positions, masks, temporal=memory)
    forwards = {"full": 5, 3: 3, "current": 0}[window]
    config = model.config
    assert memory.remembered == forwards
    assert memory.nbytes == len(config.temporal) * 10 * forwards * 2 * config.heads * config.head_dim * 4


@pytest.mark.parametrize("window", ["full", 6])
@pytest.mark.parametrize("a_forward", [1, 4])
def test_the_buffers_stay_near_what_is_remembered(window, a_forward):
    """Their largest size while a response is revealed, against the largest size of what they hold."""
    memory, positions = HistoryMemory(head_dim=2, window=window), list(range(60))
    memory.begin(torch.ones(1, 60, dtype=torch.bool))
    held = room = 0
    while positions:
        new = torch.zeros(len(positions), 1, 3, 2)
        memory.recall(0, new, new)
        held, room = max(held, memory.nbytes), max(room, memory.allocated)
        memory.revealed([0] * a_forward, positions[:a_forward])
        del positions[:a_forward]
    # Forwards fill half as much again and eight more, and what is dropped leaves its place until then.
    assert held <= room <= 3.5 * held
    assert memory.nbytes == 0


# --- decoding --------------------------------------------------------------------------


@functools.cache
def tiny(flavor: str = "llada-debug", **knobs):
    """A model of few tokens whose confidences lie far from 0 and 1, with its temporal modules at work."""
    small = dataclasses.replace(SIZES[flavor], vocab_size=VOCAB, context=64, n_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, flavor, small)
        model = build(flavor, mask_token_id=MASK, layers=[0, 1], block_size=4, **knobs)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    return model.eval().requires_grad_(False)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(MASK, (n,), generator=generator).tolist() for n in lengths]


def traces(generation):
    return [(t["tokens"], t["steps"]) for t in generation.extra["traces"]]


@given(
    flavor=st.sampled_from(["llada-debug", "dream-debug"]),
    moved=st.booleans(),
    window=windows,
    tau=st.sampled_from([0.0, 0.2, 0.4, 1.0]),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=25)
def test_decoding_equals_a_replay_of_all_earlier_states(flavor, moved, window, tau, seed):
    """Blocks of 4 in a response of 10: histories reach over block changes."""
    shift = "moved" if moved and flavor == "dream-debug" else "literal"
    model = tiny(flavor, shift=shift)
    (prompt,) = prompts(5, seed=seed)
    got = decode(model, [prompt], max_new_tokens=10, tau=tau, window=window)
    want = reference.decode(model, prompt, new=10, size=4, mask_id=MASK, tau=tau, window=window)
    assert traces(got) == [want]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    window=windows,
    tau=st.sampled_from([0.1, 0.3, 0.9]),
    stop=st.sets(st.integers(0, MASK - 1), max_size=8),
    after_stop=st.sampled_from(["drop", "reveal"]),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=25)
def test_a_batch_equals_single_runs(lengths, window, tau, stop, after_stop, seed):
    """Rows of unequal prompts end at unequal times; each has the history of its own."""
    model, rows = tiny(), prompts(*lengths, seed=seed)
    options = dict(max_new_tokens=9, tau=tau, window=window, stop_ids=stop, after_stop=after_stop)
    together = decode(model, rows, **options)
    alone = [decode(model, [row], **options) for row in rows]
    assert traces(together) == [traces(single)[0] for single in alone]
    assert list(together) == [single[0] for single in alone]


def test_history_changes_what_is_decoded_and_off_is_the_frozen_backbone():
    model, rows = tiny(), prompts(4, 6, 3, 8)
    found = {w: traces(decode(model, rows, max_new_tokens=12, tau=0.4, window=w)) for w in
             ("full", 1, "current", "off")}  # fmt: skip
    assert all(found["full"] != found[w] for w in (1, "current", "off"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "llada-debug", model.config.size)
        backbone = plain(model, "llada-debug").eval()
    own = {"mask_id": MASK, "block_size": 4, "policy": "threshold", "tau": 0.4}
    assert found["off"] == traces(generate(backbone, rows, max_new_tokens=12, **own))
    assert found["full"] == traces(decode(model, rows, max_new_tokens=12, tau=0.4))


def test_at_the_start_every_policy_decodes_as_the_backbone():
    model, rows = tiny(noise=0.0), prompts(4, 6)
    for policy in ("one_token", "threshold", "entropy"):
        with_memory, without = (
            traces(decode(model, rows, max_new_tokens=9, policy=policy, tau=0.4, window=w))
            for w in ("full", "off")
        )
        assert with_memory == without


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("window", ["full", "current", 1, "off"])
def test_a_response_of_one_token_or_revealed_in_one_step(new, window):
    """No position is left masked, so nothing is remembered and nothing is NaN."""
    result = decode(tiny(), prompts(3, 5), max_new_tokens=new, tau=0.0, window=window)
    assert result.forwards == 1
    for trace in result.extra["traces"]:
        assert trace["steps"] == [1] * new
        assert all(0 < c <= 1 for c in trace["confidence"])


def test_the_models_own_tau_window_and_block_size_are_the_defaults():
    model, rows = tiny(tau=0.3, window=1), prompts(4, 7)
    given = traces(decode(model, rows, max_new_tokens=10, tau=0.3, window=1, block_size=4))
    result = decode(model, rows, max_new_tokens=10)
    assert traces(result) == given
    assert [(t["tau"], t["block_size"]) for t in result.extra["traces"]] == [(0.3, 4)] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tau": 1.5}, "tau must be between 0 and 1, got 1.5"),
        ({"window": 0}, "window must be at least 1, 'full', 'current' or 'off', got 0"),
        ({"window": "all"}, "window must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        decode(tiny(), prompts(3), max_new_tokens=4, **options)
