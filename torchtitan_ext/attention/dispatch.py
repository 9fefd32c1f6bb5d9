"""One call for several kernels."""

from typing import Any

from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from torchtitan_ext.attention.dense import DenseAttention, build_dense_mask
from torchtitan_ext.attention.flex import PaddedFlexAttention, build_block_mask
from torchtitan_ext.attention.varlen import PackedAttention, build_varlen_mask
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.masks import Mask

BACKENDS: dict[str, tuple[Any, Any]] = {
    "dense": (DenseAttention, build_dense_mask),
    "flex": (PaddedFlexAttention, build_block_mask),
    "varlen": (PackedAttention, build_varlen_mask),
}


def resolve_backend(choice: str, device_type: str) -> str:
    """The kernel for a ``[model] attention`` choice on a device; ``auto`` is logged.

    Raises:
        UserError: an unknown choice, or one that cannot train on this device.
    """
    if choice == "auto":
        backend = "dense" if device_type == "cpu" else "flex"
        logger.info(f"[model] attention = 'auto': {backend!r} on {device_type}")
        return backend
    if choice not in BACKENDS:
        raise unknown("[model] attention", choice, [*BACKENDS, "auto"])
    if device_type == "cpu" and choice != "dense":
        reason = "FlexAttention has no backward" if choice == "flex" else "there is no varlen kernel"
        raise UserError(
            f"[model] attention = {choice!r} needs a GPU ({reason} on the CPU; allowed here: dense, auto)"
        )
    return choice


def inner_attention_config(backend: str, layer_id: int = 0) -> Module.Config:
    """Config of the inner attention module for a resolved backend."""
    if backend not in BACKENDS:
        raise unknown("attention backend", backend, BACKENDS)
    return BACKENDS[backend][0].Config(layer_id=layer_id)


def build_mask(mask: Mask, backend: str) -> Any:
    """The mask in the form the backend's kernel takes; built once a batch."""
    if backend not in BACKENDS:
        raise unknown("attention backend", backend, BACKENDS)
    return BACKENDS[backend][1](mask)


def backend_of(inner_attention: Module.Config) -> str | None:
    """Backend of an inner attention config, or None for one that is not ours."""
    for name, (cls, _) in BACKENDS.items():
        if isinstance(inner_attention, cls.Config):
            return name
    return None
