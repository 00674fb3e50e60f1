"""What can go wrong, as exceptions: each says what, where and what to do, in one sentence."""


class PykvError(Exception):
    """The root of all errors that pykv raises on purpose; the CLI prints it as one line."""

    exit_code = 1


class GGUFError(PykvError):
    """A file is not a GGUF model that this pykv can read."""


class UnsupportedError(PykvError):
    """The file is sound, but holds something that this pykv does not know how to run."""


class FormatError(PykvError):
    """Values or bytes that do not fit a block format."""


class TokenizerError(PykvError):
    """A vocabulary that cannot be used, or text that it cannot take."""


class TemplateError(PykvError):
    """A chat template is missing, broken, or refuses the conversation."""


class ConfigError(PykvError):
    """A setting is out of range, or two settings contradict each other."""

    exit_code = 2


class CacheFullError(PykvError):
    """The context is full: no room for the tokens that were to be added."""


class OutOfMemoryError(PykvError):
    """What was asked for does not fit the memory that is free."""


class DeviceError(PykvError):
    """A GPU, its driver or its compiler failed."""


class NumericsError(PykvError):
    """NaN or infinity where a finite number was expected."""


class DownloadError(PykvError):
    """A model could not be fetched, or what arrived is not what was expected."""


class PolicyError(PykvError):
    """An eviction policy cannot do what was asked of it."""


class CancelledError(PykvError):
    """Work was stopped on request."""

    exit_code = 130
