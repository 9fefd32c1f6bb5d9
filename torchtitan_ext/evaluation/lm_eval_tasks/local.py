"""What the YAML files beside this one call: lm-eval loads this file by its path."""

from __future__ import annotations

from functools import partial

from torchtitan_ext.evaluation import local_tasks

arc_easy = partial(local_tasks.choices, "arc_easy")
arc_challenge = partial(local_tasks.choices, "arc_challenge")
piqa = partial(local_tasks.choices, "piqa")
openbookqa = partial(local_tasks.choices, "openbookqa")
winogrande = partial(local_tasks.choices, "winogrande")
gsm8k = local_tasks.gsm8k
gsm8k_examples = local_tasks.Examples
gsm8k_results = local_tasks.gsm8k_results
humaneval = local_tasks.humaneval
humaneval_results = local_tasks.humaneval_results
reasoning_gym = local_tasks.reasoning_gym
reasoning_gym_results = local_tasks.reasoning_gym_results
