"""A filter of system calls that programs do not need or that have been used to escape.

It is classic BPF, as bubblewrap reads it with `--seccomp`. Everything else stays allowed: the file
system, the network and processes are limited by other means.
"""

import errno
import struct

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWUSER, PID, NET, IPC, UTS, CGROUP and NS."""
_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6. Others, such as that of virtual machines' hosts, have no namespace."""
_SHARED = (
    *(425, 426, 427),
    *(428, 429, 430, 431, 432, 433, 442),
    *(438, 440),
)
"""io_uring; newer calls for mounts; pidfd_getfd and process_madvise."""
_DENIED = {
    "x86_64": (
        *(101, 103, 134, 135, 153, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 172, 173),
        *(175, 176, 179, 212, 227, 246, 248, 249, 250, 272, 298, 303, 304, 305, 308, 310, 311),
        *(312, 313, 320, 321, 323),
    ),
    "aarch64": (
        *(18, 39, 40, 41, 51, 58, 60, 89, 92, 97, 104, 105, 106, 112, 116, 117, 142, 170, 171),
        *(217, 218, 219, 224, 225, 241, 264, 265, 266, 268, 270, 271, 272, 273, 280, 282, 294),
    ),
}
"""ptrace, mounts, modules, kexec, keys, bpf, clocks, swap, perf, handles, namespaces and so on."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKET_PAIR = {"x86_64": 53, "aarch64": 199}
_CLONE3 = 435
_FIRST_OF_X32 = 0x40000000


def is_known(kind: str) -> bool:
    """Return whether there is a filter for a type of processor."""
    return kind in _ARCHITECTURES


def program_for(kind: str) -> bytes:
    """Return the filter for a type of processor that `is_known`."""
    denied = sorted({*_DENIED[kind], *_SHARED})
    lines = [
        _line(_LOAD_WORD, _ARCHITECTURE_AT),
        _line(_JUMP_EQUAL, _ARCHITECTURES[kind], if_true=1),
        _line(_RETURN, _KILL),
        _line(_LOAD_WORD, _NUMBER_AT),
        # On x86-64 these are the same calls by other numbers.
        *_refused(_JUMP_AT_LEAST, _FIRST_OF_X32, errno.ENOSYS),
        # The flags of clone3 are behind a pointer: libraries then fall back to clone.
        *_refused(_JUMP_EQUAL, _CLONE3, errno.ENOSYS),
    ]
    for number in denied:
        lines += _refused(_JUMP_EQUAL, number, errno.EPERM)
    lines += [
        _line(_JUMP_EQUAL, _CLONE[kind], if_false=4),
        _line(_LOAD_WORD, _FIRST_ARGUMENT_AT),
        *_refused(_JUMP_ANY_BIT, _NEW_NAMESPACES, errno.EPERM),
        _line(_RETURN, _ALLOW),
    ]
    lines += _only_families(_SOCKET[kind])
    lines += _only_families(_SOCKET_PAIR[kind])
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _only_families(number: int) -> list[bytes]:
    """Return instructions that refuse a call unless its first argument is an allowed family."""
    checks = [
        _line(_JUMP_EQUAL, family, if_true=len(_FAMILIES) - index)
        for index, family in enumerate(_FAMILIES)
    ]
    return [
        _line(_JUMP_EQUAL, number, if_false=len(checks) + 3),
        _line(_LOAD_WORD, _FIRST_ARGUMENT_AT),
        *checks,
        _line(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        _line(_RETURN, _ALLOW),
    ]


def _refused(jump: int, value: int, error: int) -> list[bytes]:
    return [_line(jump, value, if_false=1), _line(_RETURN, _ERROR | error)]


def _line(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
