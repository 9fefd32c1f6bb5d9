"""What ranks find out about each other at the start, from their reports."""

from __future__ import annotations

import contextlib
import errno
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import config as front
from torchtitan_ext import startup
from torchtitan_ext.errors import UserError
from torchtitan_ext.startup import Report, judge
from torchtitan_ext.trainer import default_config


def reports(*changes: dict[str, str], error: str = "") -> list[Report]:
    """One rank for each change of the common facts, two ranks a host."""
    common = {"torch": "2.14.1", "torchtitan_ext/trainer.py": "aaa", "[training] steps": "10"}
    return [
        Report(rank=rank, host=f"host{rank // 2}", facts=common | change, error=error)
        for rank, change in enumerate(changes)
    ]


def verdict(found: list[Report], *, world: int = 4) -> str:
    return judge(found, world=world, timeout_s=300)


def config(*args: str):
    return front.parse(["--model.name", "ar", *args], make_default=default_config)


def test_equal_ranks_are_let_through():
    assert verdict(reports({}, {}, {}, {})) == ""


def test_another_version_is_named_with_its_ranks_and_hosts():
    text = verdict(reports({}, {}, {"torch": "2.15.0"}, {"torch": "2.15.0"}))
    assert "torch is 2.14.1 on ranks 0-1 (host0), 2.15.0 on ranks 2-3 (host1)" in text
    assert "steps" not in text and "trainer.py" not in text


def test_another_source_file_and_another_config_are_named():
    text = verdict(reports({}, {}, {}, {"torchtitan_ext/trainer.py": "bbb", "[training] steps": "12"}))
    assert "torchtitan_ext/trainer.py on rank 3 (host1) is not that of rank 0 (host0)" in text
    assert "[training] steps is 10 on ranks 0-2 (host0, host1), 12 on rank 3 (host1)" in text


def test_a_file_that_only_some_have_differs():
    text = verdict(reports({}, {}, {}, {"torchtitan_ext/new.py": "ccc"}))
    assert "torchtitan_ext/new.py on rank 3 (host1) is not that of rank 0" in text


def test_many_differences_are_counted():
    text = verdict(reports({}, {}, {}, {f"[x] k{i}": "1" for i in range(20)}))
    assert text.count("[x]") == startup.SHOWN and text.endswith("and 15 more")


def test_ranks_that_do_not_come_are_named():
    text = verdict(reports({}, {}, {}, {})[:2])
    assert text.startswith("only 2 of 4 ranks started within 300 s") and "ranks 2-3 did not" in text


def test_the_same_refusal_of_many_ranks_is_said_once():
    assert verdict(reports({}, {}, {}, {}, error="cannot be written")) == "cannot be written"


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_spans(ranks):
    text = startup._ranks(sorted(ranks))
    read: set[int] = set()
    for span in text.split(" ", 1)[1].split(", "):
        first, _, last = span.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=6))
def test_a_difference_is_found_wherever_it_is(values):
    found = reports(*({"torch": value} for value in values))
    assert bool(verdict(found, world=len(values))) == (len(set(values)) > 1)


def test_facts_cover_sources_versions_and_config():
    first, second = startup.facts(config()), startup.facts(config("--training.steps", "77"))
    changed = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    assert changed == {"[training] steps"}
    assert {"torch", "torchtitan", "Python", "torchtitan_ext/trainer.py"} <= first.keys()
    assert "torchtitan_ext/methods/ar/__init__.py" in first


def test_a_host_that_trains_on_its_processor_is_named(monkeypatch):
    """Its driver has failed: its ranks would wait in another backend than the others."""
    before = {"device": startup.facts(config())["device"]}
    monkeypatch.setattr(startup.utils, "device_type", "other")
    text = verdict(reports(before, before, *[{"device": startup.facts(config())["device"]}] * 2))
    assert text.endswith(f"device is {before['device']} on ranks 0-1 (host0), other on ranks 2-3 (host1)")


@pytest.mark.parametrize(("processes", "refused"), [(2, False), (3, True)])
def test_a_host_with_fewer_devices_than_processes(processes, refused, monkeypatch):
    monkeypatch.setattr(startup.utils, "device_type", "cuda")
    monkeypatch.setattr(startup.utils, "device_module", SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = r"3 processes .* \(NGPU\), which shows them 2 cuda devices \(CUDA_VISIBLE_DEVICES = '0,1'\)"
    with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
        startup.check_devices()


def test_a_report_survives_the_store():
    report = Report(rank=3, host="hühner", facts={"a": "1"}, error="x")
    assert startup._from_json(startup._to_json(report).encode()) == report


# --- the dump folder -------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    startup.check_writable(config("--job.dump_folder", str(tmp_path / "a" / "b"), "--checkpoint.enable"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a" / "checkpoint").mkdir(parents=True)
    startup.check_writable(config("--job.dump_folder", str(tmp_path / "a"), "--checkpoint.enable"))
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "checkpoint"]


def test_a_file_in_the_way_of_the_dump_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"\[job\] dump_folder = .*file/out.* cannot be written on .*Not a dir"
    ):
        startup.check_writable(config("--job.dump_folder", str(tmp_path / "file" / "out")))


def read_only(folder: Path, monkeypatch) -> None:
    real = tempfile.NamedTemporaryFile

    def refusing(*, dir, **kwargs):
        if Path(dir) == folder:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(dir=dir, **kwargs)

    # The tests may run as root, whom permission bits do not stop.
    monkeypatch.setattr(startup, "tempfile", SimpleNamespace(NamedTemporaryFile=refusing))


@pytest.mark.parametrize("which", ["out", "out/checkpoint"])
def test_a_read_only_folder_is_refused_in_one_line(which, tmp_path, monkeypatch):
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    read_only(tmp_path / which, monkeypatch)
    args = ["--job.dump_folder", str(tmp_path / "out"), "--checkpoint.enable"]
    with pytest.raises(UserError) as error:
        startup.check_writable(config(*args))
    text = str(error.value)
    assert "Read-only file system" in text and str(tmp_path / which) in text and "\n" not in text
    # A run of one process says it itself.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="Read-only"):
        startup.check(config(*args))


def test_a_checkpoint_folder_that_is_not_used_is_not_asked(tmp_path, monkeypatch):
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    read_only(tmp_path / "out" / "checkpoint", monkeypatch)
    startup.check_writable(config("--job.dump_folder", str(tmp_path / "out")))


# --- one folder for all nodes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--checkpoint.enable"], "./outputs/checkpoint"),
        (["--checkpoint.enable", "--checkpoint.folder", "saved"], "./outputs/saved"),
        (["--checkpoint.enable", "--checkpoint.load_only"], ""),
        (["--checkpoint.enable", "--job.dump_folder", "s3://bucket/run"], ""),
        ([], ""),
    ],
)
def test_which_folder_must_be_shared(args, expected):
    assert startup.shared_folder(config(*args)) == expected


def test_a_file_that_is_seen_late_is_seen(tmp_path):
    folder = tmp_path / "new" / "checkpoint"
    made = startup.make_folder(str(folder))
    assert made == [folder, folder.parent]
    timer = threading.Timer(0.5, (folder / "marker").touch)
    timer.start()
    assert startup.sees(str(folder), "marker", limit_s=30)
    timer.join()
    # A remembered "no such file" is overruled by the server, asked for a new one of that name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup.os.path, "exists", lambda path: False)
        assert startup.sees(str(folder), "marker", limit_s=0)
    assert [p.name for p in folder.iterdir()] == ["marker"]


def test_a_file_that_is_not_there_is_not_seen_and_nothing_is_left(tmp_path):
    assert not startup.sees(str(tmp_path / "new" / "checkpoint"), "marker", limit_s=0)
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_cannot_look_says_why():
    first, second, third = (Report(rank=r, host=f"host{r}", facts={}, folder="out") for r in range(3))
    text = startup.unshared(first, [second, third], {1: "Read-only file system"})
    assert text.endswith("is not there on host1 (Read-only file system), host2 (no answer)")
    assert startup.unshared(first, [second, third], {1: "yes", 2: "yes"}) == ""
