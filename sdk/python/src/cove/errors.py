"""Errors of the Cove API, one class per code of the catalogue api/errors.json.

Every error carries `code` (stable), `hint` (what you can do about it), `field`
(the request field, for InvalidArgument), `op` (the operation that failed),
`reason` (the case of the code, where callers must tell) and `retry_after` (seconds, where the server named a time).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Optional

if TYPE_CHECKING:
    from .models import Result


class CoveError(Exception):
    """Base of every error this package raises."""

    CODE: ClassVar[str] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        code: Optional[str] = None,
        hint: str = "",
        field: str = "",
        op: str = "",
        retry_after: Optional[float] = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.CODE
        self.hint = hint
        self.field = field
        self.op = op
        self.reason = reason
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InvalidArgument(CoveError):
    """A field is wrong; `field` names it."""

    CODE = "invalid_argument"


class NotFound(CoveError):
    """No such sandbox, process, file or key."""

    CODE = "not_found"


class CommandNotFound(NotFound):
    """No such program in the sandbox, so nothing ran. A shell says the same by the exit code 127."""


class ImageNotFound(NotFound):
    """No such image here or in the registry."""

    CODE = "image_not_found"


class AlreadyExists(CoveError):
    """The name or id is taken by something different."""

    CODE = "already_exists"


class Unauthenticated(CoveError):
    """No API key or a wrong one."""

    CODE = "unauthenticated"


class PermissionDenied(CoveError):
    """The key or the file mode does not allow it."""

    CODE = "permission_denied"


class NoCapacity(CoveError):
    """Full now; `retry_after` says when to ask again."""

    CODE = "no_capacity"


class QuotaExceeded(CoveError):
    """The tenant's own bound is reached; `retry_after` says when to ask again."""

    CODE = "quota_exceeded"


class TooLarge(CoveError):
    """A request or object above a limit."""

    CODE = "too_large"


class FailedPrecondition(CoveError):
    """The thing is in the wrong state for this."""

    CODE = "failed_precondition"


class SandboxEnded(FailedPrecondition):
    """The sandbox is over; its end cause says why."""

    CODE = "sandbox_ended"


class Conflict(CoveError):
    """Lost a race with another writer; try again."""

    CODE = "conflict"


class DiskFull(CoveError):
    """The sandbox or the host has no space left."""

    CODE = "disk_full"


class Unavailable(CoveError):
    """Cannot be served now; safe to retry."""

    CODE = "unavailable"


class TransportError(Unavailable):
    """The server could not be reached, or the connection to it broke.

    `sent` is False when the request surely never reached the server, so that
    even a call that must not run twice can be sent again.
    """

    def __init__(self, message: str, *, sent: bool, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sent = sent


class DeadlineExceeded(CoveError, TimeoutError):
    """The caller's own deadline passed."""

    CODE = "deadline_exceeded"


class Canceled(CoveError):
    """The caller left."""

    CODE = "canceled"


class Unsupported(CoveError):
    """This driver or image cannot do that."""

    CODE = "unsupported"


class Corrupt(CoveError):
    """Content failed verification."""

    CODE = "corrupt"


class UnsafeArchive(Corrupt):
    """A directory of the sandbox holds an entry that would reach outside the local directory, or a special file."""


class Internal(CoveError):
    """A defect of Cove."""

    CODE = "internal"


class CommandError(CoveError):
    """A command did not exit with 0; raised by Result.check() only."""

    CODE = "command_failed"

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


BY_CODE: dict[str, type[CoveError]] = {
    cls.CODE: cls
    for cls in (
        InvalidArgument,
        NotFound,
        ImageNotFound,
        AlreadyExists,
        Unauthenticated,
        PermissionDenied,
        NoCapacity,
        QuotaExceeded,
        TooLarge,
        SandboxEnded,
        FailedPrecondition,
        Conflict,
        DiskFull,
        Unavailable,
        DeadlineExceeded,
        Canceled,
        Unsupported,
        Corrupt,
        Internal,
    )
}
"""The class of each code a server can answer with; checked against api/errors.json by a test."""

BY_REASON: dict[str, type[CoveError]] = {"command_not_found": CommandNotFound}
"""The class of a reason that has one of its own, below that of its code."""


def make(
    code: str,
    message: str,
    *,
    hint: str = "",
    field: str = "",
    op: str = "",
    retry_after: Optional[float] = None,
    reason: str = "",
) -> CoveError:
    """The error of a code. A code of a newer server stays readable in a plain CoveError."""
    cls = BY_REASON.get(reason) or BY_CODE.get(code, CoveError)
    return cls(message, code=code, hint=hint, field=field, op=op, retry_after=retry_after, reason=reason)
