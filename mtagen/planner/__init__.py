"""From a spec and a target to a plan: stencils, tile geometry, resources, cost.

Pure: no torch, no GPU, no files written.
"""

from .choice import BACKENDS, Backend
from .plan import Plan, plan
from .targets import TARGETS, Target, get_target, target_for_capability

__all__ = ["BACKENDS", "TARGETS", "Backend", "Plan", "Target", "get_target", "plan", "target_for_capability"]
