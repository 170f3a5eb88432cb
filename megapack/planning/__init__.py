"""Load balancing: assign the documents of a step to ranks and micro batches.

A plan is a pure function of the step's lengths: every rank computes it without communication.
"""

from megapack.planning.assignments import ASSIGNMENTS
from megapack.planning.context_parallel import (
    RankMicroBatch,
    context_parallel_indices,
    rank_micro_batches,
)
from megapack.planning.online import PlannedMicroBatch, StepPlanner
from megapack.planning.simulation import AssignedStep, Cluster, StepTime, simulate_step
from megapack.planning.step_plan import CriticalPath, StepPlan, plan_step
from megapack.planning.trees import Tree, TreePlan, plan_trees

__all__ = [
    "ASSIGNMENTS",
    "AssignedStep",
    "Cluster",
    "CriticalPath",
    "PlannedMicroBatch",
    "RankMicroBatch",
    "StepPlan",
    "StepPlanner",
    "StepTime",
    "Tree",
    "TreePlan",
    "context_parallel_indices",
    "plan_step",
    "plan_trees",
    "rank_micro_batches",
    "simulate_step",
]
