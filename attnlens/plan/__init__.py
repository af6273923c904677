"""Planning: from the needs of the analyses to what is captured, and what that takes."""

from attnlens.plan.derivation import LEAN_LENGTH, Abilities, Lean
from attnlens.plan.machine import readable_bytes
from attnlens.plan.parts import kv_heads
from attnlens.plan.planning import Plan, make_plan
from attnlens.plan.storeplan import StorePlan

__all__ = [
    "LEAN_LENGTH",
    "Abilities",
    "Lean",
    "Plan",
    "StorePlan",
    "kv_heads",
    "make_plan",
    "readable_bytes",
]
