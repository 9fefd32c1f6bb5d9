"""Rules, order and arithmetic of streaming decoding, the depth-aware cache, and a slow twin.

The models and the twin are used by the decoding tests of WeDLM and ALoDLM too.
"""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.streaming import Entries, Trace, Twin
from torchtitan_ext import backbones
from torchtitan_ext.decoding import SamplingParams, streaming
from torchtitan_ext.decoding.depth_cache import DepthCache, LayerCounts, estimated_flops
from torchtitan_ext.decoding.streaming import Rules, choose, generate, physical_order
from torchtitan_ext.errors import UserError
from torchtitan_ext.looped import LoopedBackbone
from torchtitan_ext.methods.alodlm.config import Section
from torchtitan_ext.methods.alodlm.model import ALoDLM, core_config
from torchtitan_ext.methods.wedlm.model import WeDLM

VOCAB, CONTEXT, MASK = 40, 64, 39


def randomise(model: Any, *, seed: int = 0, scale: float = 0.25) -> Any:
    """Weights whose greedy text varies, whose entropies lie all over the range, and open gates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.ndim == 1))
    # Double: what differs between ways to compute the same must not grow from pass to pass.
    return model.double().eval().requires_grad_(False)


def small(flavor: str, layers: int) -> backbones.BackboneSize:
    size = backbones.lookup(flavor)
    return dataclasses.replace(size, vocab_size=VOCAB, context=CONTEXT, n_layers=layers, tied=False)


DECODING = {"mask_token_id": MASK, "block_size": 8, "window": 4, "tau": 1.0, "position_penalty": 0.02}


@functools.cache
def plain_model(flavor: str = "smollm2-debug") -> Any:
    """A WeDLM model of two layers."""
    fields = backbones.config_fields(small(flavor, 2), attention="dense")
    model = randomise(WeDLM.Config(**fields, **DECODING).build())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return model


@functools.cache
def looped_model(
    flavor: str = "smollm2-debug", *, band: tuple[int, int] = (1, 2), layers: int = 3, **knobs: Any
) -> Any:
    """An ALoDLM model; ``knobs``: fields of its section."""
    section = Section(**{"start": band[0], "end": band[1], "passes": 3, **DECODING, **knobs})
    size = small(flavor, layers)
    config = ALoDLM.Config(
        **backbones.config_fields(size, attention="dense"),
        core=core_config(section, dim=size.dim, n_layers=layers),
        **{name: getattr(section, name) for name in ("start", "end", "passes", "q", "left1", *DECODING)},
    )
    model = randomise(config.build())
    with torch.no_grad():
        # Readouts are wide; halting must depend on the token and be neither certain nor excluded.
        model.core.gate.weight.mul_(0.5)
        model.core.gate.depth_bias.sub_(1.5)
    return model


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(MASK, (n,), generator=generator).tolist() for n in lengths]


def check_against_twin(decode, model, prompt, *, new, rules: Rules, stop=(), **knobs) -> Trace:
    """Tokens, steps, passes, callbacks, costs and cached entries of one row."""
    twin = Twin(model, mask_id=MASK)
    trace = twin.run(prompt or [7], new=new, rules=rules, stop=stop)
    tokens, seen, caches = trace.given[-1], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "DepthCache", recorder(caches))
        result = decode(
            model,
            [prompt],
            max_new_tokens=new,
            stop_ids=stop,
            bos_id=7,
            on_step=lambda row, count: seen.append(("step", row, count)),
            on_token=lambda row, token: seen.append(("token", row, token)),
            **knobs,
        )
    row, extra = result[0], result.extra
    assert row.new_tokens == tokens and row.tokens == [*(prompt or [7]), *tokens]
    assert extra["revealed"] == [trace.steps] and extra["passes"] == [trace.passes]
    assert row.forwards == result.forwards == 1 + len(trace.steps)  # the prompt's
    assert extra["tokens_per_step"] == len(tokens) / len(trace.steps)
    assert row.finish_reason == ("stop" if tokens[-1] in stop else "length")
    expected, given = [], 0
    for count, known in zip(trace.steps, trace.given, strict=True):
        expected += [("step", 0, count), *(("token", 0, token) for token in known[given:])]
        given = len(known)
    assert seen == expected
    counts = [layers_a_slot(model, passes) for passes in trace.passes]
    assert extra["layer_evaluations"] == [
        sum(width * n for width, n in zip(trace.widths, counts, strict=True))
    ]
    check_entries(caches[0], twin.text(trace.text, trace.depths))
    return trace


def layers_a_slot(model: Any, passes: int) -> int:
    if not isinstance(model, LoopedBackbone):
        return len(model.layers)
    return model.start + passes * (len(model.config.layers) - model.start)


def recorder(caches: list[DepthCache]) -> type[DepthCache]:
    class Recorded(DepthCache):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            caches.append(self)

    return Recorded


def check_entries(cache: DepthCache, entries: Entries, *, row: int = 0, atol: float = 1e-6) -> None:
    """The cache gives at every layer and depth what recomputation of the text gives."""
    assert cache.lengths[row] == len(entries.held)
    for layer_id in entries.held[0]:
        for depth in range(1, cache.depths + 1):
            want = [entries.read(i, layer_id, depth) for i in range(len(entries.held))]
            for got, expected in zip(cache.layer(layer_id, depth), zip(*want, strict=True), strict=True):
                torch.testing.assert_close(
                    got[row, :, : len(want)], torch.stack(expected, dim=1), atol=atol, rtol=1e-5
                )


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=8))
def test_physical_order_is_filled_then_masked(window):
    order = physical_order(window)
    filled = [i for i, token in enumerate(window) if token is not None]
    masked = [i for i, token in enumerate(window) if token is None]
    assert order == filled + masked


def test_fill_rules():
    rules = Rules(window=4, tau=0.5, position_penalty=0.1)
    slots, entropy = [2, 3, 6], [0.45, 0.35, 0.05]
    assert rules.adjusted(slots, entropy) == pytest.approx([0.45, 0.45, 0.45])
    assert rules.select(slots, entropy) == [2, 3, 6]
    assert rules.select(slots, [0.5, 0.41, 0.0]) == [6]
    assert (
        rules.select([0], [0.5]) == [] and Rules(window=1, tau=0, position_penalty=0).select([0], [0.0]) == []
    )
    assert rules.least(slots, [0.3, 0.15, 0.05]) == 3
    assert rules.least(slots, [0.7, 0.7, 0.7]) == 2
    left = Rules(window=4, tau=9.0, position_penalty=0, left1=True)
    assert left.select(slots, entropy) == [2]


def test_equal_entropies_fill_the_leftmost():
    assert Rules(window=4, tau=0, position_penalty=0).least([1, 2, 5], [0.3, 0.3, 0.3]) == 1


def test_entropy_is_of_the_models_distribution_without_the_mask_token():
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[:, MASK] = 50.0
    logits[1, 5] = 100.0
    before = logits.clone()
    tokens, entropy, sure = choose(logits, mask_id=MASK, params=SamplingParams(), generators=[])
    assert tokens.tolist() == [0, 5, 0] and torch.equal(logits, before)
    assert entropy.dtype == torch.float32
    assert entropy.tolist() == pytest.approx([math.log(VOCAB - 1), 0.0, math.log(VOCAB - 1)])
    assert sure.tolist() == pytest.approx([1 / (VOCAB - 1), 1.0, 1 / (VOCAB - 1)])
    generators = [torch.Generator().manual_seed(i) for i in range(200)]
    params = SamplingParams(temperature=3.0, top_k=8)
    drawn, same, each = choose(logits[:1].expand(200, -1), mask_id=MASK, params=params, generators=generators)
    assert MASK not in drawn.tolist() and len(set(drawn.tolist())) > 5
    assert same.tolist() == pytest.approx([math.log(VOCAB - 1)] * 200)
    assert each.tolist() == pytest.approx([1 / (VOCAB - 1)] * 200)


def test_entropy_against_its_definition():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    p = torch.cat((logits[:, :MASK], logits[:, MASK + 1 :]), dim=1).double().softmax(-1)
    _, entropy, _ = choose(logits, mask_id=MASK, params=SamplingParams(), generators=[])
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=1e-5)


def test_published_layer_counts_and_parameters():
    """The 8B model: 114 layers for four passes; 192.9M parameters a layer, 622.3M in the head."""
    assert LayerCounts(10, 16, 10).evaluations(4) == 114
    assert LayerCounts(0, 28, 0).evaluations(3) == 84
    size = backbones.lookup("qwen3-8B")
    one = estimated_flops(size, layer_evaluations=1, head_evaluations=0, length=0)
    assert one == 2 * 192_937_984
    assert estimated_flops(size, layer_evaluations=0, head_evaluations=1, length=7) == 2 * 622_329_856
    longer = estimated_flops(size, layer_evaluations=3, head_evaluations=0, length=100)
    assert longer - 3 * one == 3 * 4 * 32 * 128 * 100


def test_estimated_parameters_are_those_of_the_modules():
    size = small("qwen3-debug", 1)
    model = backbones.build_config(size, attention="dense").build()
    dense = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert estimated_flops(size, layer_evaluations=1, head_evaluations=0, length=0) == 2 * dense
    head = estimated_flops(size, layer_evaluations=0, head_evaluations=1, length=0)
    assert head == 2 * model.lm_head.weight.numel()


def random_kv(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), depths=st.integers(1, 4), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_depth_cache_reads_the_matching_depth_or_the_deepest(data, depths, batch, seed):
    """Random steps of random rows, against entries kept by token."""
    cache = DepthCache(batch, capacity=40, depths=depths, core=range(1, 2))
    held = [Entries(range(1, 2)) for _ in range(batch)]
    for _ in range(3):
        width = data.draw(st.integers(1, 4))
        counts = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
        passes = data.draw(st.lists(st.integers(1, depths), min_size=batch, max_size=batch))
        new: list[list[dict]] = [[{} for _ in range(count)] for count in counts]
        for depth in range(1, max(passes) + 1):
            live = [row for row in range(batch) if passes[row] >= depth]
            masks = cache.attend(width, None if len(live) == batch else live)
            cache.depth = depth
            for layer_id in (0, 1, 2):
                k, v = (
                    random_kv(len(live), width, 2, 3, seed=seed + depth + 10 * layer_id + i) for i in (0, 1)
                )
                keys, values = masks.cache.update(layer_id, k, v)
                own = depth if layer_id == 1 else 1
                for at, row in enumerate(live):
                    for slot in range(counts[row]):
                        new[row][slot].setdefault(layer_id, {})[own] = (k[at, slot], v[at, slot])
                    end = cache.lengths[row]
                    torch.testing.assert_close(keys[at, :, end : end + width], k[at].transpose(0, 1))
                    for token in range(end):
                        want = held[row].read(token, layer_id, depth)
                        assert torch.equal(keys[at, :, token], want[0])
                        assert torch.equal(values[at, :, token], want[1])
                    assert masks.mask_BQK[at].sum(-1).tolist() == [end + q + 1 for q in range(width)]
        cache.advance(counts)
        for row in range(batch):
            held[row].held += new[row]
    assert cache.lengths == [len(entries.held) for entries in held]
    kept = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(1, batch))]
    cache.select(kept)
    for row, old in enumerate(kept):
        if held[old].held:
            check_entries(cache, held[old], row=row, atol=0)


def test_depth_cache_keeps_one_buffer_outside_the_core():
    cache = DepthCache(1, capacity=4, depths=3, core=range(1, 3))
    masks = cache.attend(2)
    for layer_id in range(4):
        masks.cache.update(layer_id, torch.ones(1, 2, 2, 3), torch.ones(1, 2, 2, 3))
    assert [len(cache._keys[i]) for i in range(4)] == [1, 3, 3, 1]


def test_depth_cache_refuses_misuse():
    with pytest.raises(ValueError, match="rows, slots and depths"):
        DepthCache(1, capacity=4, depths=0, core=range(0))
    cache = DepthCache(2, capacity=4, depths=2, core=range(1))
    with pytest.raises(RuntimeError, match="attend"):
        cache.update(0, torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1))
    with pytest.raises(ValueError, match="5 slots"):
        cache.attend(5)
    cache.attend(2)
    with pytest.raises(ValueError, match="cannot advance"):
        cache.advance([1, -1])
    with pytest.raises(ValueError, match="depth 3"):
        cache.layer(0, 3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"tau": -0.1}, "tau must be a finite number of at least 0, got -0.1"),
        ({"tau": math.inf}, "tau must be a finite number"),
        ({"tau": math.nan}, "tau must be a finite number"),
        ({"position_penalty": -1.0}, "position_penalty must be a finite number of at least 0, got -1.0"),
        ({"position_penalty": math.inf}, "position_penalty must be"),
        ({"q": 1.5}, "q must be between 0 and 1, got 1.5"),
        ({"q": -0.5}, "q must be between 0 and 1"),
        ({"q": math.nan}, "q must be between 0 and 1"),
        ({"feedback": "oneshot"}, "unknown feedback 'oneshot'; did you mean 'one_shot'"),
    ],
)
def test_rules_out_of_range_are_refused(change, message):
    with pytest.raises(UserError, match=message) as caught:
        Rules(**{"window": 4, "tau": 0.4, "position_penalty": 0.02, **change})
    assert "\n" not in str(caught.value)


RULES = Rules(window=4, tau=0.4, position_penalty=0.02)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask_id": VOCAB}, f"mask_id {VOCAB}.*{VOCAB} tokens"),
        ({"mask_id": -1}, "mask_id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": CONTEXT}, f"{CONTEXT + 1}, longer than the {CONTEXT}"),
        ({"max_len": 3}, "longer than the 3"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_options_that_do_not_fit_are_refused(change, message):
    model = plain_model()
    hook = model.tok_embeddings.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    try:
        with pytest.raises(UserError, match=message):
            generate(model, [[1]], **{"max_new_tokens": 4, "mask_id": MASK, "rules": RULES, **change})
    finally:
        hook.remove()


def test_models_that_cannot_be_decoded_this_way_are_refused():
    options = {"max_new_tokens": 4, "mask_id": MASK, "rules": RULES}
    with pytest.raises(UserError, match="dense"):
        generate(
            backbones.build_config(small("smollm2-debug", 1), attention="flex").build(), [[1]], **options
        )
    with pytest.raises(UserError, match="both directions"):
        generate(backbones.build_config(small("llada-debug", 1), attention="dense").build(), [[1]], **options)
    with pytest.raises(UserError, match="not a decoder"):
        generate(torch.nn.Linear(1, 1), [[1]], **options)
    with pytest.raises(UserError, match=r"prompt 0 is empty"):
        generate(plain_model(), [[]], **options)


def test_no_prompts_and_the_model_is_left_as_it_was():
    model = plain_model()
    modules = dict(model.named_modules())
    empty = generate(model, [], max_new_tokens=4, mask_id=MASK, rules=RULES)
    assert list(empty) == [] and empty.forwards == 0 and empty.extra["revealed"] == []
    assert empty.extra["gflop_per_token"] == 0
    assert generate(model, [[1]], max_new_tokens=4, mask_id=MASK, rules=RULES).seconds > 0
    assert dict(model.named_modules()) == modules
