"""The documents of a step dealt to ranks, groups of ranks and micro batches, without communication.

A plan is a pure function of the step's lengths: every rank computes the same one by itself.
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
    "context_parallel_indices",
    "plan_step",
    "rank_micro_batches",
    "simulate_step",
]
