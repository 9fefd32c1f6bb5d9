"""generate and diffusion_generate of opened exports give what the method's decoder gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.hf_exports import exported

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GenerationConfig, set_seed  # noqa: E402

import torchtitan_ext.checkpoint.hf as hf  # noqa: E402
from torchtitan_ext.checkpoint.load import load_model  # noqa: E402
from torchtitan_ext.decoding import SamplingParams, decoder_for  # noqa: E402
from torchtitan_ext.errors import UserError  # noqa: E402

PROMPTS = [[5, 17, 200, 3, 44], [9, 1], [7, 30, 31]]
NEW, PAD = 6, 258
KNOBS: dict[str, dict[str, Any]] = {
    "alodlm": {"window": 3, "tau": 1.0, "q": 0.9},
    "block_diffusion": {"policy": "confidence", "tokens_per_forward": 2},
    "looped-pause": {},
    "mdlm": {"policy": "threshold", "tau": 0.02, "block_size": 3},
    "t2mlr": {"prefill": "exact"},
    "tdlm": {"window": 1, "policy": "entropy", "tau": 5.0},
    "tidar": {"draft_length": 2},
    "wedlm": {"window": 2, "position_penalty": 0.5},
}
"""Cases, and other knobs than their section's."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Case -> (the package's own, transformers' model), made once."""
    made: dict[str, tuple[Any, Any]] = {}

    def get(case: str) -> tuple[Any, Any]:
        if case not in made:
            checkpoint, folder = exported(tmp_path_factory.mktemp(case), case)
            made[case] = load_model(checkpoint), AutoModelForCausalLM.from_pretrained(folder)
        return made[case]

    return get


def left_padded(prompts: list[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """What a tokenizer that pads on the left gives."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def ours(loaded: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "stop_ids": (), "bos_id": loaded.tokenizer.bos_id, **options}
    return [row.new_tokens for row in decoder_for(loaded.method)(loaded.model, prompts, **options)]


@pytest.mark.parametrize("case", sorted(KNOBS))
def test_new_tokens_are_those_of_the_methods_decoder(case, opened):
    loaded, model = opened(case)
    batch = left_padded(PROMPTS)
    width = batch["input_ids"].shape[1]
    common = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}
    out = model.generate(**batch, **common)
    assert out.dtype == torch.long and out.shape == (3, width + NEW)
    assert torch.equal(out[:, :width], batch["input_ids"])
    assert out[:, width:].tolist() == ours(loaded)
    # The method's knobs, by the call.
    knobs = KNOBS[case]
    assert model.generate(**batch, **common, **knobs)[:, width:].tolist() == ours(loaded, **knobs)
    # One row is that row of the batch.
    alone = model.generate(torch.tensor([PROMPTS[1]]), **common)
    assert alone[0, len(PROMPTS[1]) :].tolist() == out[1, width:].tolist()
    # Sampling, with our seeds.
    drawn = model.generate(**batch, **common, do_sample=True, temperature=2.0, top_k=40, top_p=0.95, seed=11)
    sampling = SamplingParams(temperature=2.0, top_k=40, top_p=0.95, seed=11)
    assert drawn[:, width:].tolist() == ours(loaded, sampling=sampling)
    # A stop token ends a row, which is then padded.
    stop = out[0, width + 2].item()
    stopped = model.generate(**batch, **{**common, "eos_token_id": [stop, 261]})
    expected = ours(loaded, stop_ids=(stop, 261))
    longest = max(map(len, expected))
    # In a window the stop token also decides which masks are filled, so it may come elsewhere.
    assert len(expected[0]) < NEW or case in ("alodlm", "wedlm")
    assert stopped[:, width:].tolist() == [row + [PAD] * (longest - len(row)) for row in expected]
    masked = case not in ("t2mlr", "looped-pause")
    assert hasattr(model, "diffusion_generate") == masked
    if masked:
        assert torch.equal(model.diffusion_generate(**batch, **common), out)


def test_generation_config_is_respected_and_the_call_goes_before_it(opened):
    loaded, model = opened("tidar")
    prompt = torch.tensor([PROMPTS[0]])
    given = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=1.5, top_k=0, pad_token_id=PAD)
    sampling = SamplingParams(temperature=1.5, seed=4)
    expected = ours(loaded, PROMPTS[:1], sampling=sampling, max_new_tokens=3)
    assert model.generate(prompt, given, seed=4)[0, 5:].tolist() == expected[0]
    greedy = ours(loaded, PROMPTS[:1], max_new_tokens=4)
    assert model.generate(prompt, given, do_sample=False, max_new_tokens=4)[0, 5:].tolist() == greedy[0]
    assert given.max_new_tokens == 3
    assert model.generate(prompt, max_length=9, eos_token_id=None).shape == (1, 9)
    assert model.generate(prompt, eos_token_id=None).shape == (1, 5 + 20)
    with pytest.raises(UserError, match="max_length = 5 leaves no room"):
        model.generate(prompt, max_length=5)


def test_the_generation_config_of_a_call_leaves_the_stop_tokens_to_the_model(opened):
    _, model = opened("tidar")
    prompt = torch.tensor([PROMPTS[0]])
    stop = model.generate(prompt, max_new_tokens=4)[0, 7].item()
    model.generation_config.eos_token_id = stop
    try:
        assert model.generate(prompt, GenerationConfig(max_new_tokens=9))[0, -1].item() == stop
        assert model.generate(prompt, max_new_tokens=9, eos_token_id=None).shape == (1, 14)
    finally:
        model.generation_config.eos_token_id = None


def test_sampling_follows_torchs_global_seed(opened):
    _, model = opened("wedlm")
    prompt = torch.tensor([PROMPTS[0]])

    def draw(seed: int) -> list[int]:
        set_seed(seed)
        return model.generate(prompt, do_sample=True, temperature=3.0, max_new_tokens=8).tolist()

    assert draw(0) == draw(0) != draw(1)
    # The default of top_k is transformers' 50.
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 8, "seed": 3}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, top_k=50, **options))


def test_several_sequences_a_prompt_and_the_report(opened):
    _, model = opened("tidar")
    out = model.generate(
        **left_padded(PROMPTS[:2]),
        max_new_tokens=4,
        num_return_sequences=2,
        do_sample=True,
        seed=0,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert isinstance(out, hf.GenerateOutput) and out.sequences.shape == (4, 5 + 4)
    assert out.sequences[:2, :5].tolist() == [PROMPTS[0]] * 2
    assert out.forwards == out.generation.forwards > 0


def test_padding_is_known_by_its_id_and_an_empty_prompt_starts_from_bos(opened):
    _, model = opened("tidar")
    batch = left_padded(PROMPTS)
    options = {"max_new_tokens": NEW, "eos_token_id": 261, "pad_token_id": PAD}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(batch["input_ids"], **options), expected)
    bos = model.generate(max_new_tokens=3, bos_token_id=7, eos_token_id=None)
    assert (
        bos[0].tolist()
        == model.generate(torch.tensor([[7]]), max_new_tokens=3, eos_token_id=None)[0, 1:].tolist()
    )


def test_a_strategy_by_name_and_a_streamer(opened):
    loaded, model = opened("tidar")
    prompt = torch.tensor([PROMPTS[0]])
    plain = decoder_for("ar")(loaded.model, PROMPTS[:1], max_new_tokens=NEW)[0].tokens

    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    out = model.generate(prompt, max_new_tokens=NEW, eos_token_id=None, strategy="ar", streamer=streamer)
    assert out[0].tolist() == plain == streamer.got and streamer.ended
    with pytest.raises(UserError, match="a streamer takes one row, got 3"):
        model.generate(**left_padded(PROMPTS), streamer=streamer)


def test_the_text_generation_pipeline(opened, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(261)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="w258", eos_token="w257", padding_side="left"
    )
    loaded, model = opened("t2mlr")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = pipe("w5 w17 w200", max_new_tokens=4, return_full_text=False, do_sample=False)
    expected = ours(loaded, [[5, 17, 200]], max_new_tokens=4, stop_ids=(257,))[0]
    got = [int(word[1:]) for word in answer["generated_text"].split()]
    assert got == [token for token in expected if token not in (257, 258)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "does not support num_beams = 4"),
        ({"repetition_penalty": 1.1}, r"does not support repetition_penalty = 1\.1"),
        ({"min_new_tokens": 3}, "does not support min_new_tokens"),
        ({"stop_strings": ["x"]}, "does not support stop_strings"),
        ({"logits_processor": [print]}, "does not support logits_processor"),
        ({"assistant_model": object()}, "does not support assistant_model"),
        ({"draft_lenght": 3}, "draft_lenght; did you mean 'draft_length'.*knobs: beta, draft_length"),
        ({"tau": 0.5}, "does not support tau"),
        ({"temperature": -1.0, "do_sample": True}, "temperature must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 10**6}, "longer than"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "pad prompts on the left"),
        ({"strategy": "stream"}, "stream"),
    ],
)
def test_what_generate_would_have_to_ignore_is_refused(options, message, opened):
    _, model = opened("tidar")
    with pytest.raises((UserError, ValueError), match=message):
        model.generate(torch.tensor([[1, 2, 3]]), **{"max_new_tokens": 2, **options})


def test_neutral_values_are_taken(opened):
    _, model = opened("tidar")
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "logits_processor": None}
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=3)
    assert torch.equal(model.generate(prompt, max_new_tokens=3, use_cache=True, **neutral), expected)
