"""Times from made-up work: each rate, overlap, and which links a group spans."""

from __future__ import annotations

from dataclasses import replace

import pytest

import torchtitan_ext  # noqa: F401
from torchtitan_ext.planning.cluster import largest_batch
from torchtitan_ext.planning.hardware import GPUS, Assumptions
from torchtitan_ext.planning.layers import Axis, Totals, Volume
from torchtitan_ext.planning.step import MICROBATCH, UPDATE
from torchtitan_ext.planning.timing import Cluster, link_of, seconds_of, times

ASSUMED = Assumptions(matmul=0.5, attention=0.25, memory=1, nvlink=1, infiniband=1, latency_us=0, overlap=1)
H100 = Cluster(gpu=GPUS["h100"], gpus_a_node=8, assumptions=ASSUMED)
GIB = 2**30


def of(totals, *, cluster=H100, microbatches=1, share=1.0, compiled=False, bf16=True):
    return times(
        totals, cluster, microbatches=microbatches, attention_share=share, compiled=compiled, bf16=bf16
    )


def test_rates():
    totals = Totals(block_flops=10**15, head_flops=10**14, attention_flops=10**14, traffic=10**12)
    found = of(totals, share=0.5)
    assert found.matmul == pytest.approx(1.1e15 / (989.5e12 * 0.5))
    assert found.attention == pytest.approx(0.5e14 / (989.5e12 * 0.25))
    assert found.other == pytest.approx(1e12 / 3.35e12)
    assert found.step == pytest.approx(found.matmul + found.attention + found.other)
    assert found.limit == "compute"
    assert of(totals, bf16=False).matmul == pytest.approx(2 * found.matmul, rel=1e-3)


def test_microbatches_repeat_all_but_the_update():
    totals = Totals(block_flops=10**15, traffic=10**12, update_traffic=10**11)
    one, four = of(totals), of(totals, microbatches=4)
    assert four.matmul == pytest.approx(4 * one.matmul)
    assert four.other - one.other == pytest.approx(3 * 1e12 / 3.35e12)


def test_the_host_may_be_the_limit_and_compilation_helps():
    totals = Totals(block_flops=10**12, operations=10_000)
    found = of(totals)
    assert found.step == found.host == pytest.approx(10_000 * ASSUMED.host_us * 1e-6)
    assert found.limit.startswith("host")
    assert of(totals, compiled=True).host == pytest.approx(found.host * ASSUMED.host_fused)


def test_links_and_rings():
    inside, across = tuple(range(8)), tuple(range(16))
    strided = (0, 8, 16, 24)
    assert [link_of(g, H100) for g in (inside, across, strided, (3,))] == [
        "NVLink",
        "InfiniBand",
        "InfiniBand",
        "none",
    ]
    one_gib = Volume(1, GIB)
    gather = Axis("all_gather", "dp_shard", inside, MICROBATCH)
    assert seconds_of(gather, one_gib, H100) == pytest.approx(GIB * 7 / 8 / 450e9)
    reduce = gather._replace(kind="all_reduce")
    assert seconds_of(reduce, one_gib, H100) == pytest.approx(2 * GIB * 7 / 8 / 450e9)
    # Eight ports of a node share what the other node needs; with one GPU a node there is one port.
    both = gather._replace(ranks=across)
    assert seconds_of(both, one_gib, H100) == pytest.approx(max(GIB * 15 / 16 / 450e9, GIB / 2 / (8 * 50e9)))
    lonely = gather._replace(ranks=strided)
    assert seconds_of(lonely, one_gib, H100) == pytest.approx(GIB * 3 / 4 / 50e9)
    assert seconds_of(gather._replace(ranks=(0,)), one_gib, H100) == 0
    slow = replace(H100, assumptions=replace(ASSUMED, latency_us=10))
    assert seconds_of(gather, Volume(5, 0), slow) == pytest.approx(5e-5)


def test_fsdp_hides_behind_computation_and_tensor_parallel_does_not():
    compute = Totals(block_flops=int(989.5e12 * 0.5))  # one second
    ring = tuple(range(8))
    gib_a_second = Volume(10, int(450e9 * 8 / 7))  # one second
    fsdp = replace(compute, volumes={Axis("all_gather", "dp_shard", ring, MICROBATCH): gib_a_second})
    tensor = replace(compute, volumes={Axis("all_reduce", "tp", ring, MICROBATCH): gib_a_second})
    once = replace(compute, volumes={Axis("all_reduce", "dp_shard", ring, UPDATE): gib_a_second})
    assert of(fsdp).exposed == pytest.approx(0.1)  # the first of ten
    assert of(tensor).exposed == pytest.approx(2.0) and of(tensor).limit == "communication"
    assert of(once, microbatches=3).exposed == pytest.approx(2.0)
    slow = replace(fsdp, block_flops=fsdp.block_flops // 4)
    assert of(slow).exposed == pytest.approx(0.75)


def test_largest_batch_is_that_of_the_fullest_point():
    totals = Totals(
        memory={
            ("a",): {"parameters": 100, "activations": 40, "logits and loss": 0, "inputs and masks": 0},
            ("b",): {"parameters": 20, "activations": 100, "logits and loss": 20, "inputs and masks": 0},
        }
    )
    assert largest_batch(totals, 4, capacity=140) == 4
    assert largest_batch(totals, 4, capacity=500) == 16
    assert largest_batch(totals, 4, capacity=99) == 0
