"""The lm-eval model: text to tokens, windows, truncation, generation, what it refuses."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from tests.unit import lm_eval_models
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import likelihood
from torchtitan_ext.evaluation.likelihood import Pair
from torchtitan_ext.evaluation.lm_eval_model import ExtLM

TEXTS = [("The cat", " sat on"), ("A", "b"), ("", "nothing before"), ("Once upon a time ", "there was")]


def lm(name: str, **options) -> ExtLM:
    return ExtLM(lm_eval_models.loaded(name), **options)


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def likelihoods(model: ExtLM, *texts: tuple[str, str]) -> list[tuple[float, bool]]:
    return model.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)


def test_lm_eval_knows_it_by_name():
    assert get_model("torchtitan_ext") is ExtLM


@pytest.mark.parametrize("name", ["ar", "alodlm", "mdlm"])
def test_loglikelihood_of_texts(name):
    model = lm(name, batch_size=3, mc_samples=2)
    bos = [model.prefix_token_id]
    encode = model.loaded.tokenizer.encode
    start = bos if model.add_bos else []
    pairs = [
        Pair(start + encode("The cat"), encode(" sat on")),
        Pair(start + encode("A"), encode("b")),
        Pair(bos, encode("nothing before")),
        Pair(start + encode("Once upon a time"), encode(" there was")),  # the space belongs to what follows
    ]
    wanted = likelihood.scores(
        model.loaded.model, pairs, method=model.loaded.method, batch_size=1, draws=model.draws
    )
    found = likelihoods(model, *TEXTS)
    for (nats, greedy), score in zip(found, wanted, strict=True):
        assert nats == pytest.approx(score.nats, abs=2e-4) and greedy == score.greedy
    assert likelihoods(lm(name, batch_size=1, mc_samples=2), *TEXTS) == [
        (pytest.approx(nats, abs=2e-4), greedy) for nats, greedy in found
    ]


def test_bos_as_asked_for():
    with_bos, without = lm("ar", add_bos=True), lm("ar", add_bos=False)
    bos = with_bos.loaded.tokenizer.bos_id
    if bos is None:
        pytest.skip("no BOS")
    assert with_bos.tok_encode("ab") == [bos, *without.tok_encode("ab")]
    assert with_bos.tok_encode("ab", add_special_tokens=False) == without.tok_encode("ab")
    assert with_bos.tok_encode(f"{with_bos.loaded.tokenizer.bos_token}ab").count(bos) == 1


@pytest.mark.parametrize("name", ["ar", "mdlm"])
def test_contexts_are_cut_on_the_left_and_that_is_told_once(name, caplog, monkeypatch):
    model = lm(name, max_length=12, mc_samples=2, add_bos=False)
    room = 13 if name == "ar" else 12
    long = "abcdefghijklmnopqrstuvwxyz"
    logger = logging.getLogger("torchtitan")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        found = likelihoods(model, (long, "xyz"), (long * 2, "xyz"))
    assert found[0][0] == pytest.approx(found[1][0], abs=2e-4)
    kept = likelihoods(lm(name, mc_samples=2, add_bos=False), (long[-(room - 3) :], "xyz"))
    assert kept[0][0] == pytest.approx(found[0][0], abs=2e-4)
    assert sum("cut on the left" in record.message for record in caplog.records) == 1
    with pytest.raises(UserError, match="leaves no room for its context"):
        likelihoods(model, ("a", long))


@pytest.mark.parametrize("name", ["ar", "mdlm"])
def test_rolling_windows_predict_every_token_once(name, monkeypatch):
    model = lm(name, max_length=8, mc_samples=1, batch_size=2)
    seen: list[Pair] = []
    inner = likelihood.scores

    def spy(built, pairs, **options):
        seen.extend(pairs)
        return inner(built, pairs, **options)

    monkeypatch.setattr(likelihood, "scores", spy)
    texts = ["a text of some length", "short", ""]
    found = model.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True
    )
    tokens = [token for text in texts for token in model.tok_encode(text)]
    assert [token for pair in seen for token in pair.continuation] == tokens
    assert all(len(pair.context) + len(pair.continuation) <= model._room for pair in seen)
    nats = [s.nats for s in inner(model.loaded.model, seen, method=model.loaded.method,
                                  batch_size=9, draws=model.draws)]  # fmt: skip
    assert sum(found) == pytest.approx(sum(nats), abs=1e-3)
    assert found[1] < 0 and (found[2] == 0 or model.add_bos)


@pytest.mark.parametrize("name", ["ar", "pause", "t2mlr", "tidar", "alodlm", "mdlm", "tdlm", "blocks"])
def test_generation_is_the_decoders_cut_at_stop_strings(name):
    contexts = ["Hello", "A longer context", "x", "yet another one"]
    arguments = [(text, {"until": ["\n"], "max_gen_toks": 6}) for text in contexts]
    found = lm(name, batch_size=3).generate_until(requests("generate_until", *arguments), disable_tqdm=True)
    alone = lm(name, batch_size=1).generate_until(requests("generate_until", *arguments), disable_tqdm=True)
    assert found == alone and len(found) == 4
    model = lm(name)
    loaded = model.loaded
    for text, said in zip(contexts, found, strict=True):
        (row,) = decoder_for(loaded.method)(
            loaded.model,
            [model.tok_encode(text)],
            max_new_tokens=6,
            stop_ids=loaded.stop_ids,
            bos_id=loaded.tokenizer.bos_id,
        )
        assert said == loaded.tokenizer.decode(row.new_tokens).split("\n")[0]
    # A stop string that comes up ends the text before it.
    stop = next(said for said in found if len(said) > 1)[1]
    cut = lm(name).generate_until(
        requests("generate_until", *((t, {"until": [stop], "max_gen_toks": 6}) for t in contexts)),
        disable_tqdm=True,
    )
    assert cut == [said.split(stop)[0] for said in found]


def test_conversations_end_with_the_assistants_beginning_or_are_left_open():
    model = lm("ar")
    talk = [{"role": "user", "content": "a?"}]
    assert model.apply_chat_template(talk) == "<|user|>\na?\n<|assistant|>\n"
    begun = [*talk, {"role": "assistant", "content": "def "}]
    # The prefix of a task's answers (gen_prefix).
    opened = model.apply_chat_template(begun, add_generation_prompt=False)
    assert opened == "<|user|>\na?\n<|assistant|>\ndef "


def test_the_default_chat_template_is_the_only_one():
    model = lm("ar")
    assert model.chat_template(False) is None and model.chat_template(True) == model.chat_template("default")
    with pytest.raises(UserError, match="--apply_chat_template tool_use: only the default template"):
        model.chat_template("tool_use")


def test_sampling_depends_on_the_seed_the_prompt_and_its_repetition_alone():
    how = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8, "until": []}
    arguments = [("abc", how), ("d", how), ("abc", how)]
    found = lm("ar", batch_size=1, seed=3).generate_until(requests("generate_until", *arguments), True)
    assert (
        lm("ar", batch_size=8, seed=3).generate_until(requests("generate_until", *arguments), True) == found
    )
    assert found[0] != found[2]  # a second draw of the same prompt
    (other,) = lm("ar", seed=4).generate_until(requests("generate_until", arguments[0]), True)
    assert other != found[0]


def test_generation_with_several_kinds_of_arguments_keeps_the_order():
    arguments = [("a", {"max_gen_toks": 2}), ("b", {"max_gen_toks": 5}), ("c", {"max_gen_toks": 2})]
    found = lm("ar").generate_until(requests("generate_until", *arguments), disable_tqdm=True)
    for given, said in zip(arguments, found, strict=True):
        assert lm("ar").generate_until(requests("generate_until", given), disable_tqdm=True) == [said]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "mdlm"}, "is a checkpoint of method 'ar', not of 'mdlm'"),
        ({"batch_size": "auto"}, "batch_size must be a whole number of at least 1, got 'auto'"),
        ({"max_length": 10**6}, "the model's context has"),
        ({"recurrence": "exat"}, "unknown recurrence 'exat'; did you mean 'exact'"),
        ({"decode": "tokens_per_forward:2"}, "unknown key in --decode-options 'tokens_per_forward'"),
        ({"mc_sample": 4}, "unknown key in --model_args 'mc_sample'; did you mean 'mc_samples'"),
        ({"mc_samples": 0}, "mc_samples must be a whole number of at least 1"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        lm("ar", **options)


def test_refused_before_the_weights_are_read(tmp_path):
    folder = lm_eval_models.write(tmp_path / "step-2", "mdlm")
    with pytest.raises(UserError, match="is a checkpoint of method 'mdlm', not of 'ar'"):
        ExtLM(folder, method="ar")
    with pytest.raises(UserError, match="unknown dtype 'float23'; did you mean 'float32'"):
        ExtLM(folder, dtype="float23")
    with pytest.raises(UserError, match="checkpoint=FOLDER is missing"):
        ExtLM()
    assert ExtLM(folder, decode="policy:threshold;tau:0.5").options == {"policy": "threshold", "tau": 0.5}


def test_generation_arguments_that_do_not_fit():
    model = lm("ar", max_length=32)
    for given, message in (
        ({"num_beams": 4, "max_gen_toks": 2}, "generation argument num_beams = 4"),
        ({"max_gen_toks": 32}, "max_gen_toks is 32, but the model's context has 32 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            model.generate_until(requests("generate_until", ("a", given)), disable_tqdm=True)
    (text,) = model.generate_until(
        requests("generate_until", ("a" * 99, {"num_beams": 1, "max_gen_toks": 2})), disable_tqdm=True
    )
    assert isinstance(text, str)
