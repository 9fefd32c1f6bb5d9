"""The models of exported folders as transformers' PreTrainedModel.

``forward`` is one forward of the loaded model over whole sequences, without a cache:

- t2mlr, looped, tidar, wedlm, alodlm, and block_diffusion with clean_attention = "causal": causal logits
  of the next token. ``labels`` give transformers' shifted next-token loss. t2mlr runs the iterates it was
  trained with (``exact=True``: as many as the sequence has tokens, as in decoding); alodlm all K passes
  with nothing committed between them; looped with pause tokens reads each token's last pause.
- mdlm, tdlm (both directions) and block_diffusion with clean_attention = "block" (own and earlier blocks):
  logits that fill masks, as the backbone gives them: token i is read at i, or for models of the Dream
  family (config section: prediction = "shifted") at i - 1. ``labels`` are the tokens themselves, unshifted:
  the loss is the mean over positions whose input is the mask token; a training objective's weights, which
  depend on the noise level, are not in it. A tdlm forward remembers nothing of earlier ones: it is the
  first forward of a response.

Shape suffixes: B = batch, L = sequence length, M = positions that are read, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

from torchtitan_ext import registry
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import ModelChoice, model_spec
from torchtitan_ext.checkpoint.hf import generation, loading, positions
from torchtitan_ext.checkpoint.hf.config import CONFIGS, METHOD_NAMES, MethodConfig
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.checkpoint.remote import describe
from torchtitan_ext.data.tokenizers import find_hf, find_tiktoken
from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX

_PREFIX = "model."


class MethodForCausalLM(PreTrainedModel, GenerationMixin):
    """A method's model; ``.model`` is the package's own module."""

    config_class: type[MethodConfig] = MethodConfig
    config: MethodConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: MethodConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        self.method = type(config).method
        self.model = _fresh(config) if model is None else model
        self.register_state_dict_post_hook(_as_module_names)
        self.post_init()

    def init_weights(self) -> None:
        """Nothing: the weights are loaded, or drawn when the model is built."""

    # --- loading and saving ------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: MethodConfig | None = None,
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: Any = None,
        subfolder: str = "",
        **kwargs: Any,
    ) -> MethodForCausalLM:
        """The model of an exported folder, in evaluation mode.

        ``dtype``: None or "auto": as config.json says. ``device_map``: one device, or "auto".
        Errors: UserError for tensors that are not exactly the model's, a changed config, or arguments
        that would have to be ignored.
        """
        where = f"{cls.__name__}.from_pretrained"
        hub = {name: kwargs.pop(name) for name in loading.HUB if name in kwargs}
        loading.refuse_adapter(kwargs.pop("adapter_kwargs", None), where=where)
        loading.refuse_unused(kwargs, where=where)
        if args:
            raise UserError(f"{where} takes no positional arguments after the folder, got {args!r}")
        folder = loading.folder_of(pretrained_model_name_or_path, hub) / subfolder
        if config is None:
            config = cls.config_class.from_pretrained(folder)
        loading.check_config(config, folder)
        wanted = loading.dtype_of(dtype if dtype is not None else torch_dtype, config)
        loaded = load_model(folder, dtype=wanted, device=loading.device_of(device_map))
        config.dtype = wanted
        model = cls(config, model=loaded.model.requires_grad_(True))
        if hasattr(loaded.model, "freeze"):  # only a part of a tdlm model is trained
            loaded.model.freeze()  # pyrefly: ignore[not-callable]
        model.generation_config = _generation_config(folder, model.generation_config, loaded)
        return model.eval()

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        max_shard_size: int | str = hf_folder.DEFAULT_SHARD_BYTES,
        safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write config.json, generation_config.json and safetensors, as an export has them.

        Files of the folder that are none of these stay. ``state_dict``: tensors to be written in the
        place of this model's, by its names.
        Errors: UserError for pickled weights, pushing to a hub, or tensors that are not the model's.
        """
        loading.refuse_unused(
            {name: value for name, value in kwargs.items() if value not in (None, False)},
            where=f"{type(self).__name__}.save_pretrained",
        )
        if not safe_serialization:
            raise UserError("safe_serialization = False is not supported: weights are safetensors")
        if not is_main_process:
            return
        limit = hf_folder.parse_bytes(str(max_shard_size))
        given = self.state_dict() if state_dict is None else state_dict
        # A recurrent core's blocks have the names there that the backbone's have.
        plain = getattr(self.model, "initial_name", str)
        tensors = self._exported({plain(name.removeprefix(_PREFIX)): given[name] for name in given})
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".partial-") as name:
            partial = Path(name)
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            hf_folder.require_space(target, sum(sizes.values()))
            hf_folder.write_weights(
                partial,
                sizes,
                load=lambda names: {name: tensors[name] for name in names},
                max_shard_bytes=limit,
            )
            self._save_configs(partial, dtype=next(iter(tensors.values())).dtype)
            for old in [*target.glob("model*.safetensors"), target / hf_folder.INDEX]:
                old.unlink(missing_ok=True)
            for path in sorted(partial.iterdir()):
                hf_folder.apply_umask(path)
                path.replace(target / path.name)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As usual; the names may also be those of the files that :meth:`save_pretrained` writes.

        transformers' Trainer gives these to go on from a checkpoint, and takes any other for missing.
        """
        own = self.state_dict()
        if any(name not in own for name in state_dict):
            names = {theirs: _PREFIX + ours for theirs, ours in self._file_names().items()}
            state_dict = {names.get(name, name): tensor for name, tensor in state_dict.items()}
            embedding, head = _PREFIX + EMBEDDING, _PREFIX + HEAD
            if self.config.size.tied and embedding in state_dict:
                state_dict.setdefault(head, state_dict[embedding])
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _file_names(self) -> dict[str, str]:
        """Names in a folder -> names in ``self.model``; a tied head has none there."""
        spec = _spec(self.config)
        adapter: Any = spec.state_dict_adapter
        # The adapter renames without looking at values, so names can stand for the tensors.
        return adapter(spec.model, None).to_hf({name: name for name in self.model.state_dict()}, added="keep")

    def _exported(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The folder's names and the tensors on the CPU."""
        expected = set(self.model.state_dict())
        hf_folder.refuse(expected - set(state_dict), set(state_dict) - expected, where="save_pretrained")
        return {theirs: state_dict[ours].detach().cpu() for theirs, ours in self._file_names().items()}

    def _save_configs(self, folder: Path, *, dtype: torch.dtype) -> None:
        config = copy.deepcopy(self.config)
        config.dtype = dtype
        values = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
        hf_folder.write_json(folder / "config.json", values)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        describe.copy_modelling(folder, config=values)

    # --- forward -----------------------------------------------------------------------

    @property
    def fills_masks(self) -> bool:
        """Whether forward's logits fill masks, or predict next tokens."""
        config: Any = self.model.config
        return config.size.attention == "bidirectional" or getattr(config, "clean_attention", "") == "block"

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        exact: bool = False,
        return_dict: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput | tuple[torch.Tensor, ...]:
        """Logits [B, L, V] and, with ``labels``, the loss; see the module's docstring.

        ``attention_mask``: [B, L], padding on either side; logits of padding mean nothing.
        ``position_ids``: of packed documents, restarting at 0, in the place of ``attention_mask``.
        ``logits_to_keep``: only those of the last positions; 0: all. ``num_items_in_batch``: divides the
        sum of the losses, in the place of the number of labels.
        Errors: UserError for arguments that would have to be ignored, such as a cache.
        """
        for name, value in kwargs.items():
            if value not in (None, False):
                raise UserError(f"{type(self).__name__}.forward: {name} is not supported (got {type(value)})")
        if labels is not None and logits_to_keep:
            raise UserError("labels need the logits of all positions; leave logits_to_keep out")
        real_BL = positions.padding_mask(attention_mask, input_ids)
        if position_ids is None or not bool(real_BL.all()):
            positions_BL = positions.positions_of(real_BL)
        else:
            positions_BL = positions.check_position_ids(position_ids, input_ids)
        logits_BLV = self._logits(input_ids, positions_BL, real_BL, keep=logits_to_keep, exact=exact)
        loss = None
        if labels is not None:
            loss = self._loss(logits_BLV, labels, input_ids, count=num_items_in_batch)
        if return_dict is False:
            return (logits_BLV,) if loss is None else (loss, logits_BLV)
        return CausalLMOutput(loss=loss, logits=logits_BLV)  # pyrefly: ignore[bad-argument-type]

    def _logits(
        self,
        tokens_BL: torch.Tensor,
        positions_BL: torch.Tensor,
        real_BL: torch.Tensor,
        *,
        keep: int,
        exact: bool,
    ) -> torch.Tensor:
        config: Any = self.model.config
        batch, length = tokens_BL.shape
        extra = self._temporal(tokens_BL, positions_BL, real_BL)
        width = 1 + getattr(config, "pause_tokens", 0)
        if width > 1:
            tokens_BL, positions_BL = positions.with_pauses(
                tokens_BL, positions_BL, pauses=width - 1, pause_id=config.pause_token_id
            )
        if int(positions_BL.max()) >= config.max_seq_len:
            raise UserError(f"a sequence is longer than the model's context of {config.max_seq_len} tokens")
        if keep or width > 1:
            last_L = torch.arange(length, device=tokens_BL.device)[-keep:] * width + width - 1
            rows_B1 = torch.arange(batch, device=tokens_BL.device)[:, None] * length * width
            extra["readout_M"] = (rows_B1 + last_L).flatten()
        if exact and not hasattr(self.model, "exact"):
            raise UserError(f"exact = True is for t2mlr, not {self.method}")
        with self.model.exact(length) if exact else contextlib.nullcontext():  # pyrefly: ignore
            logits = self.model(
                tokens_BL,
                positions=positions_BL,
                attention_masks=positions.attention_of(config, positions_BL),
                **extra,
            )
        return logits.view(batch, -1, logits.shape[-1])

    def _temporal(
        self, tokens_BL: torch.Tensor, positions_BL: torch.Tensor, real_BL: torch.Tensor
    ) -> dict[str, Any]:
        """The memory of a tdlm forward without a past: its masks alone are in it."""
        config: Any = self.model.config
        if getattr(config, "window", None) != "current" or not hasattr(config, "temporal"):
            return {}  # an empty memory gives no correction
        memory_of = importlib.import_module(f"{registry.method(self.method).__name__}.decode").memory_of
        memory = memory_of(self.model)
        masked_BL = (tokens_BL == config.mask_token_id) & real_BL
        if config.shift == "moved":  # nothing stands before a document's first token
            masked_BL = masked_BL & (positions_BL > 0)
        memory.begin(masked_BL)
        return {"temporal": memory}

    def _loss(
        self, logits_BLV: torch.Tensor, labels_BL: torch.Tensor, tokens_BL: torch.Tensor, *, count: Any
    ) -> torch.Tensor:
        config: Any = self.model.config
        labels_BL = labels_BL.to(logits_BLV.device)
        if self.fills_masks:
            masked_BL = tokens_BL == config.mask_token_id
            if not bool(masked_BL.any()):
                raise UserError(
                    f"labels of a {self.method} model are for masked inputs, and no input is the mask token "
                    f"{config.mask_token_id}; mask some tokens and give the tokens themselves as labels"
                )
            labels_BL = labels_BL.masked_fill(~masked_BL, IGNORE_INDEX)
        if not self.fills_masks or getattr(config, "prediction", "own") == "shifted":
            logits_BLV, labels_BL = logits_BLV[:, :-1], labels_BL[:, 1:]
        total = F.cross_entropy(
            logits_BLV.flatten(0, 1).float(),
            labels_BL.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="mean" if count is None else "sum",
        )
        return total if count is None else total / count

    # --- generation --------------------------------------------------------------------

    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Continue prompts with the method's own decoder; see :func:`.generation.generate`."""
        return generation.generate(self, inputs, generation_config, **kwargs)

    # --- what transformers' tools ask for ----------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.tok_embeddings  # pyrefly: ignore[bad-return]

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.model.lm_head  # pyrefly: ignore[bad-return]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Errors: always; the vocabulary is part of the folder's config."""
        raise UserError(f"{type(self).__name__}: the vocabulary cannot be resized")


class MaskedForCausalLM(MethodForCausalLM):
    """A method with a mask token."""

    def diffusion_generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """:meth:`generate` under the name that diffusion models have for it."""
        return self.generate(inputs, generation_config, **kwargs)


def _generation_config(folder: Path, config: GenerationConfig, loaded: LoadedModel) -> GenerationConfig:
    """The folder's, or what its config.json says; with a tokenizer it ends where our tools end."""
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder)
    if find_hf(folder) or find_tiktoken(folder):
        stops = sorted(loaded.stop_ids)
        config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
        if config.bos_token_id is None:
            config.bos_token_id = loaded.tokenizer.bos_id
    return config


def _as_module_names(module: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """model.layers.7.x -> model.core.layers.7.x for the blocks of a core, in a state dict that is being made.

    Tools that put modules into the model (peft) look for their parameters under the modules' names.
    """
    for i in getattr(getattr(module.model, "core", None), "layers", {}):
        own = f"{prefix}{_PREFIX}layers.{i}."
        for key in [key for key in state_dict if key.startswith(own)]:
            state_dict[f"{prefix}{_PREFIX}core.layers.{i}.{key[len(own) :]}"] = state_dict.pop(key)


def _spec(config: MethodConfig) -> Any:
    """The spec of a config, by way of a folder that holds nothing else."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
        choice = ModelChoice(name=type(config).method, flavor="hf", section=config.section)
        return model_spec(choice, assets=Path(name))


def _fresh(config: MethodConfig) -> nn.Module:
    """A model with initial weights."""
    model = _spec(config).model.build()
    model.init_states()
    return model


def _model_class(method: str) -> type[MethodForCausalLM]:
    base = MethodForCausalLM if method in ("looped", "t2mlr") else MaskedForCausalLM
    body = {
        "config_class": CONFIGS[method],
        "__module__": __name__,
        "__doc__": f"A {method} model; see the module's docstring.",
    }
    return type(f"{METHOD_NAMES[method]}ForCausalLM", (base,), body)


MODELS: dict[str, type[MethodForCausalLM]] = {method: _model_class(method) for method in CONFIGS}
"""Method -> model class."""

globals().update({cls.__name__: cls for cls in MODELS.values()})
