"""The documents of a step dealt to ranks, groups of ranks and micro batches, without communication.

A plan is a pure function of the step's lengths: every rank computes the same one by itself.
"""

from megapack.planning.step_plan import CriticalPath, StepPlan, plan_step

__all__ = ["CriticalPath", "StepPlan", "plan_step"]
