"""Initial weights that do not depend on how the model is sharded.

DTensor's random operations have no CPU tracker: on gloo every rank would draw
the same numbers into its own shard, so row i and row i + V/2 of an embedding
would start equal. Here each parameter is drawn in full, from a generator keyed
by the run's seed and the parameter's name, and each rank keeps its shard. The
weights are then the same for every world size and parallelism.
"""

import hashlib
from collections.abc import Callable, Collection

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module


def seed_from(*parts: object) -> int:
    """A 63-bit seed from any values, stable across processes and Python versions."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _keyed(initialise: Callable, *, seed: int) -> Callable:
    """``initialise`` on the full tensor under its own seed, then the local shard kept."""

    @torch.no_grad()
    def init(param: torch.Tensor) -> None:
        local = param.to_local() if isinstance(param, DTensor) else param
        full = torch.empty(param.shape, dtype=param.dtype, device=local.device)
        devices = [] if full.device.type == "cpu" else [full.device]
        with torch.random.fork_rng(devices=devices, device_type=full.device.type):
            torch.manual_seed(seed)
            initialise(full)
        if isinstance(param, DTensor):
            # src_data_rank=None: every rank cuts its shard from its own copy, no communication.
            full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.copy_(full)

    return init


def draw(model: nn.Module, names: Collection[str], *, seed: int) -> dict[str, torch.Tensor]:
    """The initial values of some of a model's tensors, by their state-dict names.

    ``model`` may be on the meta device; only what is asked for is allocated.
    """
    key_initialisers(model, seed=seed)
    rename: Callable[[str], str] = getattr(model, "initial_name", str)  # pyrefly: ignore[bad-assignment]
    drawn = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = rename(f"{module_name}.{name}" if module_name else name)
            if full_name in names:
                assert isinstance(module, Module) and module._param_init is not None
                drawn[full_name] = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._param_init[name](drawn[full_name])
    return drawn


def key_initialisers(model: nn.Module, *, seed: int) -> None:
    """Make the initialisers of a torchtitan model independent of its sharding.

    Call it after the model is parallelised and before ``init_weights``; the
    model's own initialisation (weight tying, buffers) then runs as it is.

    Raises:
        ValueError: a module has parameters but no ``param_init``, so that their
            values would depend on the order in which modules are initialised.
    """
    # A model that moves a backbone's blocks still draws them under the backbone's names, so that
    # a method and its baseline start from equal weights.
    rename: Callable[[str], str] = getattr(model, "initial_name", str)  # pyrefly: ignore[bad-assignment]
    for module_name, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own or not isinstance(module, Module):
            continue
        initialisers = module._param_init
        if initialisers is None:
            raise ValueError(f"{module_name or type(module).__name__} has parameters {own} but no param_init")
        module._param_init = {
            name: initialise
            if initialise is skip_param_init
            else _keyed(initialise, seed=seed_from(seed, rename(canonical_fqn(f"{module_name}.{name}"))))
            for name, initialise in initialisers.items()
        }
