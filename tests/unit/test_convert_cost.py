"""What a conversion costs, by count: tensor bytes held at once, files opened, models built, files flushed."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.unit.test_convert_roundtrip import assert_same_bytes, tensors_of
from torchtitan_ext.backbones import HFAdapter, build_config, lookup
from torchtitan_ext.checkpoint import convert, hf_folder
from torchtitan_ext.checkpoint import stored as stored_tensors
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.stored import StoredTensors
from torchtitan_ext.errors import UserError

FLAVOR = "smollm2-debug"


class Halves(DefaultSavePlanner):
    """Saves each tensor as two items, as two processes do that hold half of its rows each."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[half for item in plan.items for half in self._halves(item)])

    def _halves(self, item: WriteItem) -> list[WriteItem]:
        assert item.tensor_data is not None
        size = item.tensor_data.size
        if not size or size[0] < 2:
            return [item]
        rows = size[0] // 2
        parts = []
        for first, count in ((0, rows), (rows, size[0] - rows)):
            offsets, sizes = torch.Size([first, *[0] * (len(size) - 1)]), torch.Size([count, *size[1:]])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
            parts.append(
                WriteItem(
                    index=MetadataIndex(item.index.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                )
            )
        return parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self.state_dict[write_item.index.fqn]
        if write_item.type != WriteItemType.SHARD:
            return tensor
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return tensor.narrow(0, chunk.offsets[0], chunk.sizes[0]).clone()


def save(state: dict[str, torch.Tensor], folder: Path, *, split: bool) -> Path:
    planner = Halves() if split else None
    dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return folder


def checkpoint(folder: Path, *, split: bool) -> dict[str, torch.Tensor]:
    model = build_config(lookup(FLAVOR), attention="dense").build()
    model.init_states()
    state = dict(model.state_dict())
    save(state, folder, split=split)
    (folder / "config.toml").write_text(f'[model]\nname = "ar"\nflavor = "{FLAVOR}"\n')
    return state


class Held:
    """Tensors that were read or allocated for reading, and the most bytes of them alive at once."""

    def __init__(self) -> None:
        self.most = 0
        self._known: list[weakref.ref[torch.Tensor]] = []

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known += [weakref.ref(tensor) for tensor in tensors if tensor.device.type == "cpu"]
        alive = [tensor for known in self._known if (tensor := known()) is not None]
        self.most = max(self.most, sum({tensor.data_ptr(): tensor.nbytes for tensor in alive}.values()))


@pytest.fixture
def held(monkeypatch) -> Held:
    held = Held()
    read, load, load_all = torch.load, dcp.load, StoredTensors.load

    def seen_item(*args, **kwargs):
        tensor = read(*args, **kwargs)
        held.see([tensor])
        return tensor

    def seen_targets(state_dict, **kwargs):
        held.see(state_dict.values())
        load(state_dict, **kwargs)

    def seen_shard(self, names, **kwargs):
        tensors = load_all(self, names, **kwargs)
        held.see(tensors.values())
        return tensors

    monkeypatch.setattr(torch, "load", seen_item)
    monkeypatch.setattr(dcp, "load", seen_targets)
    monkeypatch.setattr(StoredTensors, "load", seen_shard)
    return held


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
def test_an_export_holds_less_than_two_shards(split, dtype, held, tmp_path):
    state = checkpoint(tmp_path / "dcp", split=split)
    width = 2 if dtype else 4
    shard = 2 * width * max(tensor.numel() for tensor in state.values())
    back = convert_to_hf(tmp_path / "dcp", tmp_path / "back", dtype=dtype, max_shard_bytes=shard)
    files = sorted(back.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) > 2 and sum(sizes[:2]) > 1.5 * shard, "too small to tell two shards from one"
    assert shard / 2 < held.most <= 2 * shard
    written = tensors_of(back)
    for name, tensor in HFAdapter(build_config(lookup(FLAVOR), attention="dense"), None).to_hf(state).items():
        assert torch.equal(written[name], tensor.to(written[name].dtype)), name


def sharded(folder: Path) -> Path:
    """A Hugging Face folder of several files."""
    checkpoint(folder / "step-1", split=False)
    return convert_to_hf(folder / "step-1", folder / "hf", max_shard_bytes=100_000)


def kinds() -> dict[str, torch.Tensor]:
    """Tensors of which each is stored in another way."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(7, 5, generator=generator)
    return {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "scalar": torch.tensor(3.5),
        "int64": torch.arange(9),
        "transposed": base.t(),
        "part": base[2:5],
        "empty": torch.empty(0, 4),
    }


@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
def test_mapped_tensors_are_what_dcp_loads(split, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensors, "_PIECE", 4)
    tensors = kinds()
    stored = StoredTensors(save(tensors, tmp_path / "dcp", split=split))
    slow = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    dcp.load(slow, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in stored.load(tensors).items():
        assert tensor.dtype == slow[name].dtype and tensor.shape == slow[name].shape, name
        assert tensor.tolist() == slow[name].tolist() == tensors[name].tolist(), name
    for name, tensor in stored.load(tensors, dtype=torch.bfloat16).items():
        assert tensor.dtype == torch.bfloat16 and tensor.shape == slow[name].shape, name
        assert tensor.tolist() == slow[name].bfloat16().tolist(), name
    mapped = {name for name in tensors if stored.mapped(name) is not None}
    assert mapped == ({"scalar"} if split else set(tensors) - {"transposed", "empty"})


def test_an_import_opens_each_file_once_and_copies_nothing_on_the_way(tmp_path, monkeypatch):
    source = sharded(tmp_path)
    opened: Counter[str] = Counter()
    given: dict[str, torch.Tensor] = {}

    def counted(path, **kwargs):
        opened[Path(path).name] += 1
        return safe_open(path, **kwargs)

    def saved(state_dict, **kwargs):
        given.update(state_dict)
        return dcp_save(state_dict, **kwargs)

    def built(*args, **kwargs):
        raise AssertionError("a model without parameters of its own is built to draw them")

    safe_open, dcp_save = hf_folder.safe_open, dcp.save
    monkeypatch.setattr(hf_folder, "safe_open", counted)
    monkeypatch.setattr(dcp, "save", saved)
    monkeypatch.setattr(convert, "_fresh", built)
    folder = convert_from_hf(source, tmp_path / "dcp")
    files = {path.name for path in source.glob("*.safetensors")}
    # Once for the header, once for the tensors.
    assert len(files) > 2 and opened == dict.fromkeys(files, 2)
    # DCP clones a tensor whose storage is larger than the tensor, and keeps it.
    assert given and all(t.untyped_storage().nbytes() == t.nbytes for t in given.values())
    monkeypatch.undo()
    assert_same_bytes(source, convert_to_hf(folder, tmp_path / "back"))


def test_checksums_are_left_out_of_the_checkpoint_alone(tmp_path, monkeypatch):
    source = sharded(tmp_path)
    during = []

    def failing(*args, **kwargs):
        during.append(torch.serialization.get_crc32_options())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp, "save", failing)
    usual = torch.serialization.get_crc32_options()
    for before in (not usual, usual):
        torch.serialization.set_crc32_options(before)
        with pytest.raises(UserError, match="No space left"):
            convert_from_hf(source, tmp_path / "dcp")
        assert torch.serialization.get_crc32_options() is before
    assert during == [False, False]


def test_weights_are_on_the_disk_before_they_take_an_earlier_results_place(tmp_path, monkeypatch):
    checkpoint(tmp_path / "dcp", split=False)
    back = tmp_path / "back"
    flushed: set[int] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        assert not back.exists()
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    convert_to_hf(tmp_path / "dcp", back, max_shard_bytes=100_000)
    files = list(back.glob("*.safetensors"))
    assert len(files) > 2 and {path.stat().st_ino for path in files} <= flushed

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UserError, match="was not written: .*Input/output error"):
        convert_to_hf(tmp_path / "dcp", back, max_shard_bytes=100_000)
    assert {path.name for path in back.glob("*.safetensors")} == {path.name for path in files}
