"""The command line of ``tools/plan.py`` without a subcommand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_ext import config as front
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import cluster, report
from torchtitan_ext.planning.hardware import assumed, gpu_named
from torchtitan_ext.trainer import default_config

GPUS_A_NODE = 8


@dataclass
class Options:
    """The planner's own flags; everything else is the config's."""

    nodes: str = ""
    gpu: str = ""
    gpus_per_node: str = str(GPUS_A_NODE)
    json: bool = False
    assume: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def split(argv: list[str]) -> Options:
    """The planner's flags (``--nodes 2``, ``--nodes=2``, ``--gpus_per_node 4``), and the rest."""
    options = Options()
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if word == "--json":
            options.json = True
        elif name.startswith("--") and key in ("nodes", "gpu", "gpus_per_node", "assume"):
            value = value if equals else next(words, "")
            if not value:
                raise UserError(f"command line: {name} needs a value")
            if key == "assume":
                options.assume += value.split(",")
            else:
                setattr(options, key, value)
        else:
            options.rest.append(word)
    return options


def _count(flag: str, text: str) -> int:
    if not text:
        raise UserError(f"command line: {flag} must be given")
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise UserError(f"command line: {flag} must be a whole number of at least 1, got {text!r}")
    return int(text)


def run(argv: list[str]) -> None:
    """Plan, and print the tables or one JSON object."""
    options = split(argv)
    nodes = _count("--nodes", options.nodes)
    gpus_a_node = _count("--gpus-per-node", options.gpus_per_node)
    if not options.gpu:
        raise UserError("command line: --gpu must be given")
    gpu, assumptions = gpu_named(options.gpu), assumed(options.assume)
    config = front.parse(options.rest, make_default=default_config)
    found = cluster.plan(config, nodes=nodes, gpus_a_node=gpus_a_node, gpu=gpu, assumptions=assumptions)
    if options.json:
        print(json.dumps(report.as_data(found, gpu_name=options.gpu, gpu=gpu, assumptions=assumptions)))
        return
    title = _title(options.rest, name=f"{config.model.name} {config.model.flavor}")
    print(report.as_text(found, title=title, gpu_name=options.gpu, gpu=gpu, assumptions=assumptions))


def _title(argv: list[str], *, name: str) -> str:
    """The method, its flavor and the file."""
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == "__job.config_file":
            return f"{name} ({Path(value if equals else argv[i + 1]).name})"
    return name
