"""The TOML section [dataloader.task]; a table ``task`` in [[dataloader.sources]] has the same keys."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_ext.errors import UserError

Group = Literal[3, 4, 5]
Style = Literal["plain", "question"]

_AT_LEAST = {
    "key_length": 0,
    "max_length": 1,
    "fixed_length": 0,
    "depth": 1,
    "chains": 1,
    "moves": 1,
    "limit": 1,
    "nodes": 1,
    "path_length": 1,
    "path_spread": 0,
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "samples": 0,
}


@dataclass(kw_only=True, slots=True)
class TaskSection:
    """What the samples of a synthetic task look like."""

    group: Group = 5
    """group_retrieval: n of the symmetric group S_n, which has n! elements."""

    key_length: int = 4
    """group_retrieval: characters K of a dictionary entry; 0: no dictionary, pure state tracking."""

    alphabet: int = 62
    """group_retrieval: size of the alphabet of the entries, 2 to 62."""

    max_length: int = 32
    """group_retrieval: the number of actions N is uniform in 1 to this."""

    fixed_length: int = 0
    """group_retrieval: every sample has exactly this number of actions; 0: see max_length."""

    depth: int = 5
    """variable_assignment: copies between the queried variable and its number."""

    chains: int = 3
    """variable_assignment: chains of variables, of which one is queried."""

    moves: int = 24
    """bounded_counter: moves of a sample, each up or down by one."""

    limit: int = 9
    """bounded_counter: the counter's greatest value; its least is 0."""

    nodes: int = 60
    """prosqa_hard: nodes of the graph."""

    path_length: int = 8
    """prosqa_hard: mean number of edges from the start to the right choice."""

    path_spread: int = 2
    """prosqa_hard: that number is uniform in path_length - path_spread to path_length + path_spread."""

    min_terms: int = 2
    """chain_sum: the number of terms is uniform in this to max_terms."""

    max_terms: int = 4
    """chain_sum: see min_terms."""

    min_digits: int = 1
    """chain_sum: the number of digits, equal for the terms of a sample, is uniform in this to max_digits."""

    max_digits: int = 2
    """chain_sum: see min_digits."""

    style: Style = "plain"
    """chain_sum: ``plain`` is the expression and an equals sign, ``question`` has the library's wording."""

    samples: int = 0
    """Size of a finite data set, such as a validation set; 0: endless."""

    def __post_init__(self) -> None:
        """Errors: UserError for a knob out of its range."""
        if self.group not in get_args(Group):
            raise UserError(f"group is {self.group!r}, allowed: 3, 4, 5")
        if not 2 <= self.alphabet <= 62:
            raise UserError(f"alphabet is {self.alphabet}, expected 2 to 62")
        if self.style not in get_args(Style):
            raise UserError(f"style is {self.style!r}, allowed: {', '.join(get_args(Style))}")
        for key, least in _AT_LEAST.items():
            if getattr(self, key) < least:
                raise UserError(f"{key} is {getattr(self, key)}, expected {least} or more")
