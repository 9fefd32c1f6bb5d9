"""FlexAttention and varlen against dense, forward and backward, on a GPU.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import pytest
import torch

from torchtitan_ext import attention, masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

LENGTHS = [[128], [100, 57], [1, 300, 83], [513]]


def attend(backend, mask, q, k, v):
    module = attention.inner_attention_config(backend).build()
    return module(q, k, v, attention_masks=attention.build_mask(mask, backend), enable_gqa=True)


def positions_of(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None].repeat(2, 1).cuda()


def check_equals_dense(backend, mask):
    """Output and gradients of a kernel under a mask, in bfloat16 with grouped heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, mask.q_len)
    make = lambda heads: torch.randn(  # noqa: E731
        *shape, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()
    q, k, v = make(4), make(2), make(2)
    weight = torch.randn(*shape, 4, 64, generator=generator, device="cuda")
    results = {}
    for name in ("dense", backend):
        out = attend(name, mask, q, k, v)
        grads = torch.autograd.grad((out.float() * weight).sum(), (q, k, v))
        results[name] = (out, *grads)
    for got, expected in zip(results[backend], results["dense"], strict=True):
        torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_kernel_equals_dense(backend, kind, lengths):
    check_equals_dense(backend, masks.DOCUMENT_MASKS[kind](positions_of(lengths)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["doubled", "last_block", "dual_stream"])
def test_flex_equals_dense_on_doubled_sequences(kind, lengths):
    positions = positions_of(lengths).repeat(1, 2)
    if kind == "dual_stream":
        mask = masks.dual_stream(positions, block_size=32)
    else:
        layout = "block" if kind == "doubled" else "last_block"
        mask = masks.doubled_blocks(positions, block_size=8, layout=layout)
    check_equals_dense("flex", mask)
