"""The exceptions a caller may catch, in one place at the bottom of the import order.

Everything a user wrote wrongly is a `ConfigError` (a `ValueError`); the others say what did not hold: room, a drive,
the bytes of the training state, an update of a step before, state to go on from, or another rank.  Each message is one
short paragraph that names the thing, the number found, the number needed and the field to change.
"""


class ConfigError(ValueError):
    """The configuration or the data is wrong; nothing was started.  Exit status 2."""


class DoesNotFit(ValueError):
    """The plan needs more than the machine has; nothing was started.  Exit status 3."""


class DiskFailed(OSError):
    """A drive did not do what it was asked.

    The message carries errno text, operation, path, offset, wanted and found bytes, and the parameter's name.
    """


class DamagedState(RuntimeError):
    """Bytes read back are not the bytes written (checksum or length): the training state cannot be trusted."""


class UpdateFailed(RuntimeError):
    """An update of an earlier step failed after that step had returned; the message names the step."""


class CannotGoOn(RuntimeError):
    """State on disk that is whole cannot become that of this run as it lies there; the message says why."""


class RankFailed(RuntimeError):
    """Another rank has ended, did something else, or did not come in time; the message names rank and operation."""
