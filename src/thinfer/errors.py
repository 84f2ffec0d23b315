"""One exception tree: every failure a user can meet has a class, and every class has an exit code."""


class ThinferError(Exception):
    """A failure with one clear message that names the remedy.

    The command line prints the message on stderr and exits with ``exit_code``; library callers catch the class.

    Example:
        >>> CheckpointError("model.gguf: truncated at byte 128; download it again").exit_code
        4
    """

    exit_code = 1


class UsageError(ThinferError):
    """An option or argument is wrong, or options exclude each other."""

    exit_code = 2


class CheckFailed(ThinferError):
    """A check ran to its end and its answer is no."""

    exit_code = 3


class CheckpointError(ThinferError):
    """A model file is missing, truncated or corrupt."""

    exit_code = 4


class UnsupportedError(ThinferError):
    """A tensor type, model type or tokenizer kind that is not supported; the message lists those that are."""

    exit_code = 5


class ArtifactError(ThinferError):
    """A thinfer.json or thinfer.safetensors that is stale, or made for other weights."""

    exit_code = 6


class ResourceError(ThinferError):
    """Too little memory, or a request longer than the context."""

    exit_code = 7


class PeerError(ThinferError):
    """An optional peer (another engine, run for comparison) is missing or failed."""

    exit_code = 8
