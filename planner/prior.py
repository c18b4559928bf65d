"""Risk without calibration: what compression cost on one real model, per unit kind and codec.

``ERRORS``: relative L2 error of the update's gradient in percent with every layer's unit of that kind at L, the worst
measured on SmolLM2-135M in float32: in two runs on one microbatch (all other units kept exactly; all others recomputed
from what is decoded), and in a calibration on 32 others. docs/measurements/prior.md has the tables with their settings.
Other codecs are estimated from these (planner/codec_law.py). A plan solved from it says ``calibrated: false``.
"""

from __future__ import annotations

from collections.abc import Mapping

from hilore.planner.codec_law import estimated_error
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Bucket, Calibration, UnitRisk
from hilore.runtime.codecs import get_codec, loses
from hilore.runtime.codecs.tokens import form_behind

ERRORS: dict[str, dict[str, float]] = {
    "gate": {
        "int8-g64": 1.142,
        "int10-g32-s8-cm-h64": 0.167,
        "int8-g32-s8-cm-h64": 0.674,
        "int7-g32-s8-cm-h64": 1.197,
        "int6-g32-s8-cm-h64": 2.710,
        "int8-g128": 1.276,
        "fp8-e4m3": 3.706,
        "int4-g64": 22.130,
    },
    "up": {
        "int8-g64": 0.792,
        "int10-g32-s8-cm-h64": 0.119,
        "int8-g32-s8-cm-h64": 0.479,
        "int7-g32-s8-cm-h64": 1.003,
        "int6-g32-s8-cm-h64": 1.854,
        "int8-g128": 0.852,
        "fp8-e4m3": 2.567,
        "int4-g64": 13.460,
    },
    "attention": {
        "int8-g64": 1.484,
        "int10-g32-s8-cm-h64": 0.230,
        "int8-g32-s8-cm-h64": 0.894,
        "int7-g32-s8-cm-h64": 2.138,
        "int6-g32-s8-cm-h64": 3.653,
        "int8-g128": 1.741,
        "fp8-e4m3": 4.593,
        "int4-g64": 29.799,
    },
    "o": {
        "int8-g64": 0.590,
        "int10-g32-s8-cm-h64": 0.062,
        "int8-g32-s8-cm-h64": 0.256,
        "int7-g32-s8-cm-h64": 0.499,
        "int6-g32-s8-cm-h64": 0.936,
        "int8-g128": 0.787,
        "fp8-e4m3": 1.189,
        "int4-g64": 9.049,
    },
    "v": {
        "int8-g64": 0.884,
        "int10-g32-s8-h64": 0.179,
        "int8-g32-s8-h64": 0.772,
        "int7-g32-s8-h64": 1.438,
        "int6-g32-s8-h64": 2.779,
        "int8-g128": 1.150,
        "fp8-e4m3": 3.568,
        "int4-g64": 15.920,
    },
}
# What is offered where model.yaml names no codecs: none is beaten by another in bytes, error and time at once.
# 8 and 6 bits are where the choice lies (with 10 and 7 beside them the plan of a 3B model gained 0.01 % of a step more
# and took half as long again to solve); plain int8 is the fastest. Bits by token (tw8-...) are for model.yaml to ask
# for: what they gain only rollouts can tell, and encoding and decoding them takes a copy of the tensor.
_BITS = (8, 6)
_CENTRED = tuple(f"int{bits}-g32-s8-cm-h64" for bits in _BITS)
_NOT_CENTRED = tuple(f"int{bits}-g32-s8-h64" for bits in _BITS)
DEFAULT_CODECS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gate", "up", "attention", "o"),
        ("int8-g64", *_CENTRED),
    ),
    "v": ("int8-g64", *_NOT_CENTRED),
}
# Another model's weights and batches moved the figures by up to a quarter (docs/measurements/prior.md).
MARGIN = 1.25
# The last layer carries a fifth of the squared error, the others share the rest evenly.
LAST_LAYER_SHARE = 0.2
INTERACTION = 1.05
# Advantages normalised per group have a root mean square of about 1; a group with one success among eight of its own
# reaches 2.5 on that row.
PSI_REFERENCE = 1.0
PSI_EDGES = (0.5, 1.0, 2.5)
ASSUMED_FREQUENCIES = (0.25, 0.25, 0.25, 0.25)


def prior_codecs(kind: str, spec: ModelSpec) -> tuple[str, ...]:
    """Codecs to offer to a unit kind: the default ones where model.yaml names none, or those of it whose error on this
    kind is known or can be estimated, and which suit it. Lossless ones suit every kind; which outputs they can hold is
    seen when they are timed."""
    if spec.codecs is None:
        return DEFAULT_CODECS.get(kind, ())
    return tuple(codec for codec in spec.codecs if not loses(codec) or prior_error(kind, codec) is not None)


def prior_error(kind: str, codec: str) -> float | None:
    """Percent of the gradient's norm with every layer's unit of this kind at L, without margin; None for what is not
    to be offered."""
    measured, form = ERRORS.get(kind), form_behind(codec)
    # Tokens that attention looks at most have a small v, which channel means would spoil.
    if measured is None or (kind == "v" and form is not None and form.centred):
        return None
    return measured.get(codec) or estimated_error(measured, codec)


def codec_notes(spec: ModelSpec, bucket: Bucket) -> tuple[str, ...]:
    """Codecs of model.yaml that no unit of the bucket offers, and why."""
    offered = {cost.codec for one in bucket.classes for unit in one.units for cost in unit.codecs}
    missing = [codec for codec in spec.codecs or () if codec not in offered]
    lossless = [codec for codec in missing if get_codec(codec).lossless]
    notes = []
    if lossless:
        notes.append(
            f"codecs: {', '.join(lossless)} offered to no unit: no unit's output is what they can hold in fewer "
            "bytes (bfloat16, upcasts of it, masks, integers); casts and masks that a unit's own autograd saves are "
            "derived again and take no bytes at all"
        )
    if others := [codec for codec in missing if codec not in lossless]:
        notes.append(f"codecs: {', '.join(others)} offered to no unit: no unit kind here has a known error for it")
    return tuple(notes)


def calibration_from_prior(spec: ModelSpec, bucket: Bucket) -> Calibration:
    """The prior as a Calibration: kappa2 for every unit and codec that the bucket offers."""
    errors: dict[str, dict[str, float]] = {}
    for region_class in bucket.classes:
        for unit in region_class.units:
            for cost in unit.codecs:
                if not loses(cost.codec):
                    continue
                error = prior_error(unit.kind, cost.codec)
                assert error is not None, (unit.kind, cost.codec)
                errors.setdefault(unit.kind, {})[cost.codec] = error
    return calibration_from_errors(spec, bucket, errors, source="prior")


def calibration_from_errors(
    spec: ModelSpec, bucket: Bucket, errors: Mapping[str, Mapping[str, float]], *, source: str
) -> Calibration:
    """kappa2 of every unit and codec from errors per kind and codec (percent, all layers at L)."""
    risks = []
    last = len(bucket.regions) - 1
    for place, region in enumerate(bucket.regions):
        share = _share(place, last)
        for unit in bucket.classes[region.class_index].units:
            for cost in unit.codecs:
                if not loses(cost.codec):
                    continue
                error = errors[unit.kind][cost.codec] / 100 * MARGIN
                risks.append(UnitRisk(region.name, unit.name, cost.codec, error**2 * share))
    return Calibration(
        calibrated=False,
        source=source,
        delta_star=spec.calibration.reference_error,
        confidence=0.0,
        psi_reference=PSI_REFERENCE,
        psi_edges=PSI_EDGES,
        frequencies=ASSUMED_FREQUENCIES,
        interaction=INTERACTION,
        risks=tuple(risks),
    )


def _share(place: int, last: int) -> float:
    """Share of the squared error that one region carries when every region's unit is at L."""
    if last == 0:
        return 1.0
    at_the_end = max(LAST_LAYER_SHARE, 1 / (last + 1))
    return at_the_end if place == last else (1 - at_the_end) / last
