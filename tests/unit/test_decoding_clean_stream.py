"""Autoregressive decoding of streaming models: against full forwards, and what it counts."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_decoding_streaming import looped_model, plain_model, random_prompts
from torchtitan_ext import attention, masks
from torchtitan_ext.decoding import SamplingParams, autoregressive, clean_stream
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.alodlm.decode import LoopedPasses
from torchtitan_ext.methods.alodlm.decode import decode as decode_alodlm
from torchtitan_ext.methods.wedlm.decode import decode as decode_wedlm

BANDS = [(0, 3), (1, 2), (1, 3), (0, 1)]
"""Cores of three layers: all, the middle, without a coda, without a prelude."""


def by_full_forwards(model: Any, prompt: list[int], *, new: int, stop: frozenset[int]) -> list[int]:
    """Greedy tokens, the whole text being read anew for each; all passes, nothing committed."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + new and not (len(tokens) > len(prompt) and tokens[-1] in stop):
            positions = torch.arange(len(tokens))[None]
            mask = attention.build_mask(masks.causal_document(positions), "dense")
            hidden = model.hidden(torch.tensor([tokens]), positions, mask)
            tokens.append(int(model.lm_head(hidden[:, -1]).argmax()))
    return tokens[len(prompt) :]


@settings(deadline=None, max_examples=15)
@given(
    band=st.sampled_from(BANDS),
    carry_norm=st.booleans(),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    stop=st.frozensets(st.integers(0, 38), max_size=6),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([512, 4]),
)
def test_tokens_are_those_of_full_forwards(band, carry_norm, lengths, stop, seed, chunk):
    model, prompts = looped_model(band=band, carry_norm=carry_norm), random_prompts(*lengths, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoregressive, "PREFILL_CHUNK", chunk)
        result = clean_stream.generate(model, prompts, max_new_tokens=8, passes=LoopedPasses, stop_ids=stop)
    for row, prompt in zip(result, prompts, strict=True):
        assert row.new_tokens == by_full_forwards(model, prompt, new=8, stop=stop)
        assert row.forwards == len(row.new_tokens)
    assert result.forwards == max(row.forwards for row in result) and result.tokens_per_forward == 1


def test_passes_matter():
    """Else the test above would hold for a session that makes one pass."""
    model, prompts = looped_model(), random_prompts(5, 9, 3)
    texts = [
        [row.new_tokens for row in clean_stream.generate(model, prompts, max_new_tokens=8, passes=kind)]
        for kind in (LoopedPasses, _OnePass)
    ]
    assert texts[0] != texts[1]


class _OnePass(LoopedPasses):
    def complete(self, cache, tokens_RQ, positions_RQ, masks):
        cache.depth = 1
        return self.readout(
            self.run(self.begin(tokens_RQ, positions_RQ, masks), positions_RQ, masks), positions_RQ, masks
        )


def test_sampled_rows_of_a_batch_are_single_runs():
    model, prompts = looped_model(), random_prompts(2, 11, 6)
    options: dict[str, Any] = {"max_new_tokens": 9, "passes": LoopedPasses, "stop_ids": [3, 11, 20]}
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    together = clean_stream.generate(model, prompts, sampling=sampling, **options)
    for i, prompt in enumerate(prompts):
        alone = clean_stream.generate(model, [prompt], sampling=sampling, seeds=[5 + i], **options)
        assert alone[0] == together[i]
        assert alone.extra["layer_evaluations"] == together.extra["layer_evaluations"][i : i + 1]


def test_one_pass_is_the_plain_decoder():
    model, prompts = plain_model(), random_prompts(5, 9)
    ours = clean_stream.generate(model, prompts, max_new_tokens=7)
    theirs = autoregressive.generate(model, prompts, max_new_tokens=7)
    assert list(ours) == list(theirs) and ours.forwards == theirs.forwards
    assert ours.extra["layer_evaluations"] == [2 * 6, 2 * 6]  # the first token is the prompt's forward's


DECODERS = {
    "wedlm": (plain_model, decode_wedlm, {}),
    "alodlm": (looped_model, decode_alodlm, {"passes": LoopedPasses}),
}


@pytest.mark.parametrize("method", list(DECODERS))
@pytest.mark.parametrize("kind", ["stream", "ar"])
def test_forwards_and_layers_are_those_that_ran(method, kind):
    """Both ways count the forward over the prompt, and leave its layers out of the evaluations."""
    make, stream, knobs = DECODERS[method]
    model, (prompt,) = make(), random_prompts(6)
    blocks = [*model.layers.values(), *(model.core.layers.values() if hasattr(model, "core") else ())]
    slots, forwards = [], []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: slots.append(args[0].shape[1])) for block in blocks
    ]
    # Embeddings are asked for again between passes, without positions: the first block is not.
    first = model.layers["0"]
    hooks.append(first.register_forward_pre_hook(lambda _, args: forwards.append(args[0].shape[1])))
    if kind == "ar":
        result = clean_stream.generate(model, [prompt], max_new_tokens=9, **knobs)
    else:
        result = stream(model, [prompt], max_new_tokens=9, tau=1.0)
    for hook in hooks:
        hook.remove()
    assert result[0].forwards == result.forwards == len(forwards) and forwards[0] == 6
    in_prompt = 6 * (2 if method == "wedlm" else 1 + 3 * 1 + 1)
    assert sum(slots) == result.extra["layer_evaluations"][0] + in_prompt
    evaluations = result.extra["layer_evaluations"][0]
    assert result.extra["layer_evaluations_per_token"] == pytest.approx(evaluations / 9)
    assert result.extra["gflop_per_token"] > result.extra["prefill_gflop_per_token"] > 0


def test_refusals_and_no_rows():
    model = looped_model()
    with pytest.raises(UserError, match="max_new_tokens must be at least 1"):
        clean_stream.generate(model, [[1]], max_new_tokens=0, passes=LoopedPasses)
    empty = clean_stream.generate(model, [], max_new_tokens=3, passes=LoopedPasses)
    assert list(empty) == [] and empty.extra["layer_evaluations"] == []
