"""Make a plan from a spec and a target: stencils, geometry of blocks, resources, cost.

The planner is pure: it needs neither torch nor a GPU, and writes no files.
"""

from .choice import BACKENDS, Backend
from .plan import Plan, plan
from .targets import TARGETS, Target, get_target, target_for_capability

__all__ = ["BACKENDS", "TARGETS", "Backend", "Plan", "Target", "get_target", "plan", "target_for_capability"]
