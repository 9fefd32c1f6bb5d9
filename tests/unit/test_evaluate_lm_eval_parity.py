"""Against lm-eval's own model for Hugging Face folders, on the same folder and the same items.

``TORCHTITAN_EXT_SMOLLM2``: a folder with SmolLM2-135M-Instruct; ``TORCHTITAN_EXT_PARITY_ITEMS``: items of
each benchmark (default 20).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tests.paths import shared_data
from torchtitan_ext.evaluation.benchmarks import Settings, build_tasks
from torchtitan_ext.evaluation.lm_eval_model import ExtLM

FOLDER = os.environ.get("TORCHTITAN_EXT_SMOLLM2", "")
ITEMS = int(os.environ.get("TORCHTITAN_EXT_PARITY_ITEMS", "20"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(FOLDER, "config.json").is_file(), reason="no TORCHTITAN_EXT_SMOLLM2"),
]


@pytest.fixture(scope="module")
def ours() -> ExtLM:
    return ExtLM(FOLDER, batch_size=8)


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return HFLM(pretrained=FOLDER, dtype="float32", device="cpu", batch_size=8)


@pytest.mark.skipif(shared_data() is None, reason="no data")
@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "piqa", "openbookqa", "winogrande"])
def test_likelihoods_and_choices(ours, theirs, name):
    (task,) = build_tasks(Settings(tasks=(name,), data=str(shared_data())))
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=ITEMS, rank=0, world_size=1)
    requests = task.instances
    mine, reference = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (ours, theirs))
    assert len(mine) == len(requests) >= 2 * ITEMS
    worst = max(abs(a[0] - b[0]) for a, b in zip(mine, reference, strict=True))
    assert worst < 1e-3
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
    scores: list[dict] = []
    for item in range(ITEMS):
        places = [i for i, request in enumerate(requests) if request.doc_id == item]
        doc = requests[places[0]].doc
        told = [task.process_results(doc, [found[i] for i in places]) for found in (mine, reference)]
        assert told[0] == told[1]
        chosen = [max(places, key=lambda i, found=found: found[i][0]) for found in (mine, reference)]
        assert chosen[0] == chosen[1]
        scores.append(told[0])
    means = {
        key: sum(score[key] for score in scores) / ITEMS for key in ("acc", "acc_norm") if key in scores[0]
    }
    print(f"\n{name}: {ITEMS} items, {len(requests)} requests, largest difference {worst:.2e}, {means}")


def test_rolling_and_generation(ours, theirs):
    text = "The Eiffel Tower stands in Paris. It was built for the fair of 1889. " * 3
    rolling = [
        Instance("loglikelihood_rolling", {}, (text,), 0),
        Instance("loglikelihood_rolling", {}, ("Hi!",), 1),
    ]
    for mine, reference in zip(
        ours.loglikelihood_rolling(rolling, disable_tqdm=True),
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True),
        strict=True,
    ):
        assert mine == pytest.approx(reference, abs=1e-3)
    how = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    asked = [
        Instance("generate_until", {}, (t, how), 0) for t in ("The capital of France is", "One, two, three,")
    ]
    assert ours.generate_until(asked, disable_tqdm=True) == theirs.generate_until(asked, disable_tqdm=True)
    assert (ours.max_length, ours.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
