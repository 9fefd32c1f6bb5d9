"""Matrix products over one to four tokens on a CPU.

Such a product is a read of the weights, and SGEMM for so few columns reads them at less than half of
the rate that memory gives (MKL 2024 on AMD processors).  Two other ways to ask for the same product do not:
one row as a batch of two halves of the weight, two to four rows with the sides exchanged. Results
differ from ``F.linear`` by rounding alone.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 4
"""Most rows for which the sides are exchanged; from eight on that is slower."""


def narrow_linear(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + b`` for any number of rows, [..., I] -> [..., O]."""
    width = x.shape[-1]
    rows = x.numel() // width
    if not 0 < rows <= ROWS or (rows == 1 and weight_OI.shape[0] % 2):
        return F.linear(x, weight_OI, bias_O)
    x_RI = x.reshape(rows, width).contiguous()
    if rows == 1:
        # The strides say that the vector is a column. Where they leave it open, bmm copies the weight.
        column_2I1 = x_RI.as_strided((2, width, 1), (0, 1, width))
        out = torch.bmm(weight_OI.view(2, -1, width), column_2I1)
    else:
        out = torch.mm(weight_OI, x_RI.T).T.contiguous()
    out = out.view(*x.shape[:-1], -1)
    return out if bias_O is None else out + bias_O


@contextmanager
def narrow_products(model: nn.Module) -> Generator[None]:
    """Use :func:`narrow_linear` in every fp32 linear module on a CPU with MKL, for the time of the block."""
    places = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_served(module)]
    for module in places:
        module.forward = partial(_forward, module)
    try:
        yield
    finally:
        for module in places:
            del module.forward


def _is_served(module: nn.Linear) -> bool:
    weight = module.weight
    if not torch.backends.mkl.is_available():  # other libraries were not measured
        return False
    plain = type(weight) is nn.Parameter and weight.is_contiguous() and "forward" not in vars(module)
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    # Looked up at every call: a decoder may tie or move weights between two.
    return narrow_linear(x, module.weight, module.bias)
