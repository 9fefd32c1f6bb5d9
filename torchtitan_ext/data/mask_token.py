"""The id of the mask token of a method that has one."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan_ext import backbones
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError


def resolve_mask_id(config: Any, *, given: int | None, where: str) -> int:
    """The mask id of a run: the given one, the backbone's, the tokenizer's, or the first free id.

    ``where`` names the key in messages, such as "[tidar] mask_token_id".
    Errors: UserError for an id outside the vocabulary, or no free id in it.
    """
    size = backbones.size_for(config.model.flavor, hf_assets_path=config.model.hf_assets_path or None)
    mask_id = size.mask_token_id if given is None else given
    if mask_id is None:
        mask_id = _of_tokenizer(config, vocabulary=size.vocab_size, where=where)
    if not 0 <= mask_id < size.vocab_size:
        raise UserError(
            f"{where} = {mask_id} is outside the model's vocabulary (allowed: 0 to {size.vocab_size - 1})"
        )
    return mask_id


def check_mask_id(config: Any, *, mask_id: int, where: str) -> None:
    """Refuse a mask id that stands for an ordinary token, unless [tokenizer] allows it.

    Errors: UserError that names the token and the nearest free id, or two different ids.
    """
    asked = config.tokenizer.mask_token_id
    if asked not in (None, mask_id):
        raise UserError(f"{where} = {mask_id}, but [tokenizer] mask_token_id = {asked}; leave one out")
    if _tokenizer(config).mask_id == mask_id:
        return
    changed = dataclasses.replace(config.tokenizer, mask_token=None, mask_token_id=mask_id)
    try:
        changed.build(tokenizer_path=config.model.hf_assets_path)
    except UserError as error:
        raise UserError(f"{where} = {mask_id}: {error}") from error


def _of_tokenizer(config: Any, *, vocabulary: int, where: str) -> int:
    tokenizer = _tokenizer(config)
    if tokenizer.mask_id is not None:
        return tokenizer.mask_id
    free = tokenizer.get_vocab_size()
    if free >= vocabulary:
        raise UserError(
            f"{where} must be given: the tokenizer has no mask token and fills the "
            f"vocabulary of {vocabulary} "
            "(an id in use needs [tokenizer] allow_mask_collision = 'allow')"
        )
    logger.info(f"{where}: {free}, the first id that the tokenizer does not use")
    return free


def _tokenizer(config: Any) -> Tokenizer:
    return config.tokenizer.build(tokenizer_path=config.model.hf_assets_path)
