"""Synthetic tasks: endless, seeded data sets whose sample i depends on the seed and i alone."""

from torchtitan_ext.data.tasks.bounded_counter import BoundedCounter
from torchtitan_ext.data.tasks.build import TASKS, TaskSource, build_task, make_task, used_knobs
from torchtitan_ext.data.tasks.chain_sum import ChainSum
from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.group_retrieval import GroupRetrieval
from torchtitan_ext.data.tasks.interface import Task, TextTask, TokenTask
from torchtitan_ext.data.tasks.prosqa import ProsQA
from torchtitan_ext.data.tasks.variable_assignment import VariableAssignment

__all__ = [
    "TASKS",
    "BoundedCounter",
    "ChainSum",
    "GroupRetrieval",
    "ProsQA",
    "Task",
    "TaskSection",
    "TaskSource",
    "TextTask",
    "TokenTask",
    "VariableAssignment",
    "build_task",
    "make_task",
    "used_knobs",
]
