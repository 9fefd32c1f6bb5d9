"""Own-token targets from next-token labels."""

from __future__ import annotations

import torch

from tests.unit.test_data_common import IGNORE, loader
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.targets import own_token_targets


def test_by_hand():
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    # The label at position 2 looks into the next piece of a cut document: position 3 starts anew.
    labels = torch.tensor([[IGNORE, 7, 8, 9, IGNORE, IGNORE]])
    assert own_token_targets(tokens, labels, positions).tolist() == [[IGNORE, IGNORE, 7, IGNORE, 9, IGNORE]]


def test_agrees_with_a_loop_on_real_rows():
    inputs, labels = next(iter(loader(DataLoader.Config(prefetch=0), batch=4, seq_len=96)))
    tokens, positions = inputs["input"], inputs["positions"]
    own = own_token_targets(tokens, labels, positions)
    for b in range(4):
        for i in range(96):
            wanted = i > 0 and positions[b, i] > 0 and labels[b, i - 1] != IGNORE
            assert own[b, i] == (tokens[b, i] if wanted else IGNORE)
    kept = own != IGNORE
    # Supervised own tokens are exactly the labels shifted by one, but for the last label of a row.
    assert int(kept.sum()) > 300
    assert torch.equal(own[:, 1:][kept[:, 1:]], labels[:, :-1][kept[:, 1:]])
