"""Short names for what JSON can hold, equal where the values are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from hilore.runtime.plan import Plan


def digest(data: Any) -> str:
    """16 hexadecimal digits of JSON values."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def plan_digest(plan: Plan) -> str:
    """What a plan does with every unit, whatever it was solved for."""
    return digest([asdict(region) for region in plan.regions])
