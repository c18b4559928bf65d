"""Every error that the runtime raises on purpose.

Each carries its data as attributes, so that a trainer can react without parsing text. A message says what is
wrong, where (file:line or unit name), the two values that disagree, and what to do next.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class HiloreError(Exception):
    """Base of all errors of this project; keyword arguments become attributes.

    ``exit_code`` is what the command line returns for it (docs/design.md, "Exit codes").
    """

    exit_code = 2

    def __init__(self, message: str, **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.data = data

    def __getattr__(self, name: str) -> object:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(name)


class BindError(HiloreError):
    """A plan's regions or units are not those of the model; nothing was installed."""


class FingerprintError(BindError):
    """The plan was made for another configuration. Attributes: ``field``, ``planned``, ``found``."""


class PlanFileError(HiloreError):
    """A plan file (or a set of them) cannot be used. Attributes: ``path``."""


class UnsupportedModelError(BindError):
    """The model contains something that a plan cannot work with; the message names the setting to change."""


class AgreementError(BindError):
    """Ranks have different plans, or one did not come. Attributes: ``plans`` or ``missing`` (ranks)."""


class ExposureError(HiloreError):
    """A loss coefficient is NaN or infinite, or an input it needs is missing."""


class SavedTensorMutated(HiloreError, RuntimeError):
    """A tensor that backward needs was changed in place. Attributes: ``unit``, ``saved_version``, ``version``."""


class PlanSwitchError(HiloreError):
    """The plan was to change in the middle of a forward."""


class ReplayMismatchError(HiloreError, CheckpointError):
    """A replay saved other tensors than its forward did. Attributes: ``region``."""


class CodecError(HiloreError):
    """No codec has this name, or a payload cannot be decoded. Attributes: ``codec``."""


class CodecRefused(CodecError):
    """A codec cannot take this tensor at all (not floating, sparse). Attributes: ``codec``, ``dtype``."""


class HiloreWarning(UserWarning):
    """Something works, but slower or with less than was asked for; said once."""


class InternalError(HiloreError):
    """A check of ours on ourselves failed: a bug, not the user's doing."""

    exit_code = 1
