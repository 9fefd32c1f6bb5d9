"""The TOML front: a file and the command line onto a tree of config dataclasses."""

from torchtitan_ext.config.front import load_toml, parse
from torchtitan_ext.config.toml_writer import save, to_dict, toml_text

__all__ = ["load_toml", "parse", "save", "to_dict", "toml_text"]
