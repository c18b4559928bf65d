"""In the training job: load plans, attach them to the model, and let each microbatch's exposure choose.

``load_plans`` and ``attach`` are all that a trainer needs; docs/design.md, "Runtime", says how it works.
"""

from hilore.runtime.attach import attach
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import PlanSet, load_plans
from hilore.runtime.runtime import Runtime

__all__ = ["Plan", "PlanSet", "Runtime", "attach", "load_plans"]
