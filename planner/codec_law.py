"""An estimate of a codec's error from measured ones of the same unit kind, for codecs that were not measured.

Rounding errors are proportional to the step, so an error follows from that of a relative by the number of levels
(bits: twice per bit, measured 1.95 to 2.2 between 8 and 4), the usual largest magnitude of a group of that size (of
normal values), and factors of the options measured on SmolLM2-135M (docs/measurements/prior.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from hilore.runtime.codecs.form import GroupForm, parse_form
from hilore.runtime.codecs.tokens import form_behind

# Mean of the largest magnitude among n normal values.
_LARGEST = {32: 2.43, 64: 2.68, 128: 2.92, 256: 3.14}
# Relative rounding errors of formats against integers with the same group, in levels: measured on normal values.
_LIKE_LEVELS = {"nf4": 8.6, "fp4": 7.3, "e4m3": 31.0, "e5m2": 15.5}
_STOCHASTIC = 1.5
_ASYMMETRIC = 0.85
_CENTRED = 0.85
_ROTATED = 0.9


def estimated_error(measured: Mapping[str, float], codec: str) -> float | None:
    """Percent, from the measured codec that shares most of its options; None for codecs that have no levels.

    What tokens gain from bits by their weight depends on the rollouts: nothing is assumed of it.
    """
    form = form_behind(codec)
    if form is None or not form.group:
        return None
    known = [known for name in measured if (known := parse_form(name)) is not None and known.kind == "int"]
    if not known:
        return None
    nearest = min(known, key=lambda other: (_options_apart(form, other), abs(form.bits - other.bits), other.name))
    return measured[nearest.name] * _relative_step(form) / _relative_step(nearest)


def _options_apart(form: GroupForm, other: GroupForm) -> int:
    pairs = (
        (form.centred, other.centred),
        (form.rotated, other.rotated),
        (form.asymmetric, other.asymmetric),
        (form.stochastic, other.stochastic),
        (form.outliers, other.outliers),
    )
    return sum(left != right for left, right in pairs)


def _relative_step(form: GroupForm) -> float:
    levels = _LIKE_LEVELS.get(form.kind) or (2 ** (form.bits - 1) - 1)
    step = _LARGEST[form.group] / levels
    for option, factor in (
        (form.stochastic, _STOCHASTIC),
        (form.asymmetric, _ASYMMETRIC),
        (form.centred, _CENTRED),
        (form.rotated, _ROTATED),
    ):
        step *= factor if option else 1
    return step
