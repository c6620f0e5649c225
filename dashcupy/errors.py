"""The errors that dashcupy raises: every one says what was given, what is allowed, what to do."""


class DashcupyError(Exception):
    """Base class: ``except DashcupyError`` catches all that this package raises on purpose."""


class InvalidInputError(DashcupyError, ValueError):
    """An argument is wrong in shape, dtype, device, strides, alignment or value."""


class UnsupportedError(DashcupyError, NotImplementedError):
    """The request is meaningful, but cannot be met here; never replaced by something weaker."""


class CompileError(DashcupyError, RuntimeError):
    """NVRTC refused a kernel, or no usable NVRTC was found."""


class DeviceError(DashcupyError, RuntimeError):
    """No usable GPU or driver, or the driver refused a call."""


class HangError(DashcupyError, RuntimeError):
    """A debug build gave up waiting for a turn in the sum of dq."""
