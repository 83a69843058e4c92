"""Cove: isolated Linux sandboxes for reinforcement learning, coding agents and whatever else runs unread code.

    from cove import Sandbox

    with Sandbox.create(image="base", memory="512MiB") as sb:
        print(sb.exec("python3 -c 'print(6 * 7)'").stdout)

The server is COVE_URL with COVE_KEY, or the one on this machine. AsyncSandbox
has the same methods for asyncio.
"""

from ._callback import Response
from ._version import VERSION as __version__
from .callback import AsyncCallback, AsyncCallbackRequest, Callback, CallbackRequest
from .client import AsyncClient, Client, default_async_client, default_client
from .errors import (
    AlreadyExists,
    Canceled,
    CommandError,
    Conflict,
    Corrupt,
    CoveError,
    DeadlineExceeded,
    DiskFull,
    FailedPrecondition,
    ImageNotFound,
    Internal,
    InvalidArgument,
    NoCapacity,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    SandboxEnded,
    TooLarge,
    TransportError,
    Unauthenticated,
    Unavailable,
    UnsafeArchive,
    Unsupported,
)
from .files import AsyncFiles, Files
from .models import (
    Capacity,
    End,
    FileEvent,
    FileInfo,
    FileList,
    Image,
    Output,
    ProcessInfo,
    ProcessList,
    PullProgress,
    Resources,
    Result,
    SandboxInfo,
    ServerInfo,
    Stats,
    Task,
    VolumeMount,
)
from .network import Flow, Network, NetworkStatus, Rule
from .process import AsyncProcess, Process
from .recording import AsyncRecording, Recording
from .replay import Record, RecordedRequest, RecordingInfo, Replay, ReplayMiss, ReplayStatus
from .sandbox import AsyncSandbox, Sandbox
from .secret import AsyncSecret, Secret, SecretInfo
from .snapshot import AsyncSnapshot, Snapshot
from .state import (
    Forks,
    PrunedSnapshot,
    SnapshotInfo,
    SnapshotProgress,
    TemplateInfo,
    Tree,
    TreeNode,
    VolumeHolder,
    VolumeInfo,
)
from .template import AsyncTemplate, Template
from .volume import AsyncVolume, AsyncVolumeFiles, Volume, VolumeFiles
from .watch import AsyncWatch, Watch

__all__ = [
    "AlreadyExists",
    "AsyncCallback",
    "AsyncCallbackRequest",
    "AsyncClient",
    "AsyncFiles",
    "AsyncProcess",
    "AsyncRecording",
    "AsyncSandbox",
    "AsyncSecret",
    "AsyncSnapshot",
    "AsyncTemplate",
    "AsyncVolume",
    "AsyncVolumeFiles",
    "AsyncWatch",
    "Callback",
    "CallbackRequest",
    "Canceled",
    "Capacity",
    "Client",
    "CommandError",
    "Conflict",
    "Corrupt",
    "CoveError",
    "DeadlineExceeded",
    "DiskFull",
    "End",
    "FailedPrecondition",
    "FileEvent",
    "FileInfo",
    "FileList",
    "Files",
    "Flow",
    "Forks",
    "Image",
    "ImageNotFound",
    "Internal",
    "InvalidArgument",
    "Network",
    "NetworkStatus",
    "NoCapacity",
    "NotFound",
    "Output",
    "PermissionDenied",
    "Process",
    "ProcessInfo",
    "ProcessList",
    "PrunedSnapshot",
    "PullProgress",
    "QuotaExceeded",
    "Record",
    "RecordedRequest",
    "Recording",
    "RecordingInfo",
    "Replay",
    "ReplayMiss",
    "ReplayStatus",
    "Resources",
    "Response",
    "Result",
    "Rule",
    "Sandbox",
    "SandboxEnded",
    "SandboxInfo",
    "Secret",
    "SecretInfo",
    "ServerInfo",
    "Snapshot",
    "SnapshotInfo",
    "SnapshotProgress",
    "Stats",
    "Task",
    "Template",
    "TemplateInfo",
    "TooLarge",
    "TransportError",
    "Tree",
    "TreeNode",
    "Unauthenticated",
    "Unavailable",
    "UnsafeArchive",
    "Unsupported",
    "Volume",
    "VolumeFiles",
    "VolumeHolder",
    "VolumeInfo",
    "VolumeMount",
    "Watch",
    "__version__",
    "default_async_client",
    "default_client",
]
