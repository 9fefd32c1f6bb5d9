"""torchtitan's CheckpointManager that loads whole checkpoints only and explains itself."""

import contextlib
import errno
import os
import shutil
import threading
import tomllib
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import LR_SCHEDULER, MODEL, TRAIN_STATE
from torchtitan.tools import filesystem, utils
from torchtitan.tools.logging import logger

from torchtitan_ext.backbones import HFAdapter
from torchtitan_ext.checkpoint import assets, convert, hf_folder, whole
from torchtitan_ext.config import to_dict, toml_text
from torchtitan_ext.errors import UserError


def on_rank_zero(function: Callable[[], Any]) -> Any:
    """The function's result on rank 0, on every rank (all must agree on what to load).

    An error of rank 0 is raised on every rank: the others would wait for a
    result until the collective's timeout.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:  # whatever it is: raised below, on all ranks
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


class ExtCheckpointManager(CheckpointManager):
    """Skips damaged checkpoints, checks weights before loading, leaves nothing half-written."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        last_save_model_only: bool = False
        """Whether the last checkpoint holds only the model; such a run cannot be extended."""

        keep_latest_k: int = 10
        """Whole checkpoints to keep, at least 2; 0 keeps all. A partial or damaged one does not count, and
        an old one goes only after the new one is whole."""

        def __post_init__(self) -> None:
            if self.initial_load_path and not filesystem.is_remote(self.initial_load_path):
                self.initial_load_path = os.path.abspath(os.path.expanduser(self.initial_load_path))
            chosen = self.initial_load_model_only, self.initial_load_in_hf
            if not self.initial_load_path and self.initial_load_model_only:
                # A start without a path has no weights, or those beside the tokenizer in hf_assets_path;
                # torchtitan would warn at every rebuild of the config.
                self.initial_load_model_only = self.initial_load_in_hf = False
            CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only, self.initial_load_in_hf = chosen

    before_save: Callable[[], None] | None = None
    """Called on every rank before a checkpoint is written; may raise to prevent it."""

    _config_text: str | None = None
    _global_batch: int | None = None
    _saving: str = ""
    _going: set[Path]
    _assets_path: str = ""
    _method: str = "ar"
    _section: dict[str, Any]

    def __init__(self, config: Config, **kwargs: Any) -> None:
        if config.enable and config.async_mode == "async_with_pinned_mem" and utils.device_type == "cpu":
            raise UserError(
                "[checkpoint] async_mode = 'async_with_pinned_mem' needs an accelerator, and this machine "
                "has none; allowed here: 'disabled', 'async'"
            )
        self._going = set()
        super().__init__(config, **kwargs)
        if not self.enable or filesystem.is_remote(self.folder):
            return
        path = config.initial_load_path
        if path and not filesystem.is_remote(path) and not Path(path).is_dir():
            raise UserError(f"[checkpoint] initial_load_path = {path!r} is not a folder")
        if config.initial_load_in_hf and not path and not getattr(self.sd_adapter, "hf_assets_path", None):
            raise UserError(
                "[checkpoint] initial_load_in_hf = true needs initial_load_path, or [model] hf_assets_path "
                "with weights beside the tokenizer"
            )
        if not config.load_only:
            self._check_free_disk()

    def attach(self, config: Any, *, global_batch: int) -> None:
        """Give the resolved config and the assets that are kept beside every checkpoint.

        ``global_batch``: the rows of a step, which are kept as global_batch_size even where the user
        left that to the number of ranks: a resumed run may have other ranks.
        """
        tables = to_dict(config)
        tables["training"]["global_batch_size"] = self._global_batch = global_batch
        self._config_text = toml_text(tables)
        self._assets_path = config.hf_assets_path
        self._method = config.model.name
        own = getattr(config, self._method, None)
        self._section = {} if own is None else asdict(own)

    def _check_free_disk(self) -> None:
        """Refuse to start when not even one checkpoint fits.

        Weights, and two optimizer moments of those that are trained, for the parameters of this pipeline
        rank.
        """
        wrapper = self.states[MODEL]
        trained = [p for part in wrapper.model for p in part.parameters() if p.requires_grad]
        stored = [t for t in wrapper.state_dict().values() if isinstance(t, torch.Tensor)]
        needed = sum(t.numel() * t.element_size() for t in [*stored, *trained, *trained])
        parent = Path(self.folder)
        while not parent.exists():
            parent = parent.parent
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise UserError(
                f"no disk space for a checkpoint in {self.folder}: it needs about {needed / 2**30:.2f} GiB, "
                f"{free / 2**30:.2f} GiB are free"
            )

    # --- saving ------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.before_save is not None and self._should_save(curr_step, last_step):
            self.before_save()
        return super()._save(curr_step, last_step)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Save, with the resolved config and assets beside; on failure remove what was written.

        Raises:
            UserError: the disk is full or the folder cannot be written.
        """
        if filesystem.is_remote(checkpoint_id):
            return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        self._saving = checkpoint_id
        with self._undone_on_failure():
            to_hf = bool(kwargs.get("to_hf"))
            on_rank_zero(lambda: self._begin_folder(Path(checkpoint_id), to_hf=to_hf))
            with self._with_added() if to_hf else contextlib.nullcontext():
                result = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        # A model without its training state is no place to resume from, and pushes none out.
        purge = TRAIN_STATE in state_dict
        if isinstance(result, Future | AsyncSaveResponse):
            return self._then_published(result, Path(checkpoint_id), purge=purge)
        self._published(Path(checkpoint_id), purge=purge)
        return result

    def _then_published(
        self, result: Future[Any] | AsyncSaveResponse, folder: Path, *, purge: bool
    ) -> Future[None] | AsyncSaveResponse:
        """An asynchronous save that is done when it is whole and what it replaces is on its way out."""
        chained: Future[None] = Future()

        def done(upload: Future[Any]) -> None:
            try:
                upload.result()
                self._published(folder, purge=purge)
            except BaseException as error:
                # Raised in the training loop, which waits for this future before its next save.
                chained.set_exception(error)
            else:
                chained.set_result(None)

        if isinstance(result, AsyncSaveResponse):
            result.upload_completion.add_done_callback(done)
            return replace(result, upload_completion=chained)
        result.add_done_callback(done)
        return chained

    def _published(self, folder: Path, *, purge: bool) -> None:
        """Remove what the new whole checkpoint makes superfluous; rank 0, maybe in the save's thread."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        step = int(folder.name.removeprefix("step-"))
        keep = self.keep_latest_k if purge else 0
        try:
            whole.bring_back(folder.parent)
            for path in whole.superfluous(folder.parent, keep=keep, published=step):
                if not whole.finished(path):
                    logger.info(f"{path} is removed: its save did not finish")
                whole.doom(path)
            self._remove_doomed()
        except OSError as error:  # the new checkpoint is whole; the next save tries again
            logger.warning(f"Old checkpoints in {folder.parent} cannot be removed: {error}")

    def _remove_doomed(self) -> None:
        """Delete in the background: other ranks wait for this one."""
        doomed = set(whole.doomed(Path(self.folder)))
        going, self._going = doomed - self._going, doomed
        for path in sorted(going):
            if self.purge_thread is not None:
                self.purge_queue.put(str(path))
            else:
                threading.Thread(target=shutil.rmtree, args=(path, True), daemon=True).start()

    def _tidy(self) -> None:
        """Settle what a killed run left between two renames."""
        whole.bring_back(Path(self.folder))
        self._remove_doomed()

    def _purge_stale_checkpoints(self) -> None:
        # torchtitan counts the one that an asynchronous save has just begun; see _published.
        if filesystem.is_remote(self.folder):
            super()._purge_stale_checkpoints()

    def newest_whole(self) -> Path | None:
        """The newest whole checkpoint of this run, after the one being written is; None if there is none."""
        if not self.enable or filesystem.is_remote(self.folder):
            return None
        self.maybe_wait_for_saving()
        step, _ = whole.newest_whole(Path(self.folder))
        return Path(self._create_checkpoint_id(step)) if step >= 0 else None

    @contextlib.contextmanager
    def _with_added(self) -> Generator[None]:
        """Let a Hugging Face save write the method's own parameters too."""
        adapter: Any = self.sd_adapter
        before = getattr(adapter, "added", None)
        if before is None:  # torchtitan's own adapters
            yield
            return
        adapter.added = "keep"
        try:
            yield
        finally:
            adapter.added = before

    def _wait_for_saving(self) -> None:
        """Wait for an asynchronous save, whose failure is met here."""
        with self._undone_on_failure():
            super()._wait_for_saving()

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Generator[None]:
        """Remove the checkpoint being written if the operating system refuses, and say so in a line."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            what = _refused_write(error, Path(self._saving))
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._undo(Path(self._saving))
            if what is None:
                raise
            raise UserError(
                f"checkpoint {self._saving} could not be written: {what}; earlier checkpoints are untouched"
            ) from error

    def _undo(self, folder: Path) -> None:
        if whole.damage(folder) is not None:  # or else it is an earlier save, which could not be set aside
            shutil.rmtree(folder, ignore_errors=True)
        whole.bring_back(folder.parent)

    def _begin_folder(self, folder: Path, *, to_hf: bool) -> None:
        whole.set_aside(folder)
        folder.mkdir(parents=True)
        if self._config_text is not None:
            (folder / "config.toml").write_text(self._config_text)
        # A Hugging Face folder has them beside the weights.
        assets.copy(self._assets_path, folder if to_hf else folder / assets.FOLDER)
        if to_hf and isinstance(self.sd_adapter, HFAdapter):
            convert.write_config(
                folder,
                assets=folder,
                size=self.sd_adapter.size,
                dtype=self.export_dtype,
                name=self._method,
                section=self._section,
            )

    # --- loading -----------------------------------------------------------------------

    def _find_load_step(self, folder: str = "") -> int:
        """The newest whole checkpoint; damaged ones are passed over with a warning."""
        folder = folder or self.folder
        if filesystem.is_remote(folder):
            return super()._find_load_step(folder)
        step, skipped = on_rank_zero(lambda: whole.newest_whole(Path(folder)))
        for bad, reason in skipped:
            used = f"using step-{step}" if step >= 0 else "no whole checkpoint is left"
            logger.warning(
                f"Checkpoint {filesystem.join(folder, f'step-{bad}')} is damaged: {reason}; {used}"
            )
        return step

    def _load(self, step: int = -1) -> bool:
        local = not filesystem.is_remote(self.folder)
        if local and not self.load_only:
            on_rank_zero(self._tidy)
            step = on_rank_zero(lambda: self._where_to_go_on(step))
        if step != -1 and local:
            reason = on_rank_zero(lambda: whole.damage(Path(self._create_checkpoint_id(step))))
            if reason is not None:
                raise UserError(
                    f"[checkpoint] load_step = {step}: {self._create_checkpoint_id(step)} cannot be loaded: "
                    f"{reason}"
                )
        if self.exclude_from_loading and local and on_rank_zero(lambda: self._has_excluded(step)):
            self.exclude_from_loading = []
        loaded = super()._load(step)
        # The schedule knows its step now; the optimizers' groups have the rate of another until it moves.
        for scheduler in self.states[LR_SCHEDULER]:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        return loaded

    # What a command says of loading is for its first start. Started again, by a person, by the queue or by
    # the launcher, it goes on from its own newest checkpoint, or it would come to the same place for ever.

    def _made_by_this_command(self, step: int) -> bool:
        path = Path(self._create_checkpoint_id(step)) / "config.toml"
        return self._config_text is not None and path.is_file() and path.read_text() == self._config_text

    def _where_to_go_on(self, step: int) -> int:
        """``load_step``, or the newest whole checkpoint since this command went back to it."""
        folder = Path(self.folder)
        later = [s for s in whole.steps(folder) if s > step] if step != -1 else []
        for own in later:
            if self._made_by_this_command(own) and whole.damage(folder / f"step-{own}") is None:
                logger.warning(f"[checkpoint] load_step = {step} was followed before: on from step-{own}")
                return own
        if later:
            logger.warning(
                f"[checkpoint] load_step = {step}: newer checkpoints stay in {folder}, to step-{later[0]}, "
                "until this run comes to their steps; a start without load_step goes on from the newest"
            )
        return step

    def _has_excluded(self, step: int) -> bool:
        """Whether this command made the checkpoint, and has left ``exclude_from_loading`` out before."""
        if step == -1:
            step, _ = whole.newest_whole(Path(self.folder))
        if not self._made_by_this_command(step):
            return False
        logger.warning(f"[checkpoint] exclude_from_loading was followed before: step-{step} is loaded whole")
        return True

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load after comparing names and shapes, so that a mismatch is one clear line.

        Raises:
            UserError: missing, unexpected or differently shaped tensors.
        """
        resumed = os.path.dirname(checkpoint_id) == os.path.normpath(self.folder)
        if resumed and self.initial_load_path:
            logger.info(
                f"[checkpoint] initial_load_path = {self.initial_load_path!r} was not used: "
                f"resuming from {checkpoint_id}"
            )
        if not filesystem.is_remote(checkpoint_id):
            if resumed and (not dist.is_initialized() or dist.get_rank() == 0):
                self._compare_batch(Path(checkpoint_id))
            if from_hf:
                assert self.sd_adapter is not None
                hf_folder.check_against(self.sd_adapter, state_dict, Path(checkpoint_id))
            else:
                if not resumed:
                    state_dict = self._without_added(state_dict, Path(checkpoint_id))
                self._check_native(state_dict, Path(checkpoint_id), resumed=resumed)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _compare_batch(self, folder: Path) -> None:
        """Warn when the rows of a step are not those with which the checkpoint was made."""
        path = folder / "config.toml"
        if self._global_batch is None or not path.is_file():
            return
        try:
            before = tomllib.loads(path.read_text()).get("training", {}).get("global_batch_size", -1)
        except ValueError as error:
            logger.warning(
                f"{path} cannot be read ({error}): whether the global batch size is the same is not known"
            )
            return
        if before > 0 and before != self._global_batch:
            logger.warning(
                f"The global batch size changes from {before} to {self._global_batch} rows a step at this "
                f"resume ({folder}): learning rate and number of steps now mean another run. To keep it set "
                f"[training] global_batch_size = {before}; -1 is local_batch_size x data-parallel ranks"
            )

    def _without_added(self, state_dict: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Leave out parameters that the method adds and initial weights do not have; they stay as drawn."""
        is_added = getattr(self.sd_adapter, "is_added", None)
        if is_added is None or whole.damage(folder) is not None:
            return state_dict
        stored = whole.read_metadata(folder).state_dict_metadata
        fresh = [name for name in state_dict if name not in stored and is_added(name)]
        if fresh:
            logger.info(f"{folder} lacks {len(fresh)} parameters of the method, which start fresh: {fresh}")
        return {name: value for name, value in state_dict.items() if name not in fresh}

    def _check_native(self, state_dict: dict[str, Any], folder: Path, *, resumed: bool) -> None:
        reason = whole.damage(folder)
        if reason is not None and (instead := _instead(folder)):
            raise UserError(f"[checkpoint] initial_load_path = '{folder}' is {instead}")
        if reason is not None:
            raise UserError(f"checkpoint {folder} cannot be loaded: {reason}")
        native = (folder / ".metadata").is_file()  # or else the last save's Hugging Face folder
        stored = whole.read_metadata(folder).state_dict_metadata if native else {}
        if resumed and not any(key.startswith(TRAIN_STATE) for key in stored):
            raise UserError(
                f"checkpoint {folder} holds only model weights ([checkpoint] last_save_model_only), so this "
                "run cannot be resumed; start another from it with [checkpoint] initial_load_path"
            )
        model = self.states[MODEL].state_dict()
        missing = [name for name in model if name in state_dict and name not in stored]
        if missing:
            raise UserError(
                f"checkpoint {folder} lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}"
            )
        for name, tensor in model.items():
            entry = stored.get(name)
            if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
                raise UserError(
                    f"checkpoint {folder} does not fit the model: {name} has shape {list(entry.size)}, "
                    f"the model's is {list(tensor.shape)}"
                )


def _instead(folder: Path) -> str:
    """What a folder that is no checkpoint may be meant for; "" for a damaged one."""
    if whole.STEP_FOLDER.match(folder.name) is None and any(folder.glob("*.safetensors")):
        return "a Hugging Face folder: it needs [checkpoint] initial_load_in_hf = true"
    for parent in (folder, folder / "checkpoint"):
        step, _ = whole.newest_whole(parent)
        if step >= 0:
            return f"no checkpoint but holds some: the newest is {parent / f'step-{step}'}"
    return ""


def _refused_write(error: BaseException, folder: Path) -> str | None:
    """What the operating system refused in a (possibly collective) checkpoint failure, or None."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    causes = {rank: f[0] if isinstance(f, tuple) else f for rank, f in failures.items()}
    for rank, cause in [(None, error), *causes.items()]:
        where = "" if rank is None else f" on rank {rank}"
        if isinstance(cause, OSError):
            full = cause.errno == errno.ENOSPC
            return f"{'no disk space left' if full else cause.strerror or str(cause)}{where}"
        # torch.save's archive writer meets the refused write first and hides it behind an error of its own.
        if isinstance(cause, RuntimeError) and any(word in str(cause) for word in ARCHIVE_WRITER):
            full = _disk_is_full(folder)
            return (
                f"{'no disk space left' if full else 'a write failed (disk full, quota or I/O error)'}{where}"
            )
    return None


ARCHIVE_WRITER = ("inline_container", "PytorchStreamWriter")
"""What the errors of torch.save's archive writer contain."""


def _disk_is_full(folder: Path) -> bool:
    return folder.exists() and shutil.disk_usage(folder).free < 2**20
