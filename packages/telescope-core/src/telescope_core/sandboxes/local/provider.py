"""The provider `local`: bubblewrap, resource limits, seccomp, control groups and Landlock.

It runs programs as an ordinary user: root changes to one first. If a layer on which others depend
is missing, it refuses with advice; it never runs a program outside a sandbox.
"""

import asyncio
import itertools
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from telescope_core.sandboxes.local import seccomp
from telescope_core.sandboxes.local.bubblewrap import InnerLimits, variables_of
from telescope_core.sandboxes.local.cgroups import (
    ControlGroup,
    Controllers,
    usable_controllers,
)
from telescope_core.sandboxes.local.interpreter import compiled, find_interpreter
from telescope_core.sandboxes.local.sandbox import LocalSandbox
from telescope_core.sandboxes.local.started import Ingredients, Started, Template, start, started_by
from telescope_core.sandboxes.protocol import (
    ANY_SECONDS,
    Limit,
    ResourceAmount,
    SandboxError,
    SandboxSpec,
    SandboxUnavailableError,
    require_limits,
)

DEFAULT_MEMORY_MB = 512
DEFAULT_DISK_MB = 64
DEFAULT_PROCESSES = 64
_INSTALL = "as root on Debian or Ubuntu: apt-get install bubblewrap"
_MB = 1 << 20
_GRACE_S = 30
_LEAST_MEMORY_MB = 16
_MOST_PROCESSES = 1 << 22
_numbers = itertools.count(1)


class LocalProvider:
    """Sandboxes on this machine."""

    name = "local"

    def __init__(
        self,
        *,
        python: str | None = None,
        read_only: tuple[str, ...] = (),
        writable: tuple[str, ...] = (),
        use_control_groups: bool = True,
        use_template: bool = True,
    ) -> None:
        """`python` is the interpreter inside; None takes one that every user can run.

        `read_only` are further paths of this machine that programs may read, and `writable` empty
        folders besides `/tmp` that programs may write, each with the room of `disk_mb`. Sandboxes
        with such folders are not forked from a template. Without control groups, memory is limited
        by each process's address space and by watching the sum. If no template is possible,
        bubblewrap starts each sandbox separately.
        """
        self._python = python
        self._read_only = read_only
        self._writable = writable
        self._controllers = (
            usable_controllers() if use_control_groups else Controllers(version=2, folders={})
        )
        self._ingredients: Ingredients | None = None
        self._preparing = asyncio.Lock()
        self._open: set[LocalSandbox] = set()
        self._uses_template = use_template and not writable
        self._template: Template | None = None

    @property
    def limits(self) -> Mapping[Limit, str]:
        """Limits that it can set on this machine, each with the means."""
        group = f"control group (version {self._controllers.version})"
        folders = self._controllers.folders
        watched = "address space of each process, and a watch of what they hold together"
        given = {
            Limit.MEMORY: group if "memory" in folders else watched,
            Limit.DISK: "size of the file system in memory; counts as memory too",
            Limit.PROCESSES: "RLIMIT_NPROC in a user namespace of its own",
            Limit.TIME_TO_LIVE: "a timer that kills the first process",
            Limit.NETWORK_NONE: "a network namespace of its own",
            Limit.NETWORK_ENDPOINT: "the same, with a listening socket that this process answers",
        }
        if "cpu" in folders:
            given[Limit.CPUS] = group
        return given

    def require(self, specs: Iterable[SandboxSpec]) -> None:
        """Raise SandboxLimitError that names the limits this machine cannot set; starts nothing."""
        for spec in specs:
            require_limits(self.name, spec, self.limits, _amounts())

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """Start a sandbox; raises SandboxUnavailableError if this machine cannot have one."""
        self.require([spec])
        ingredients = await self._prepared()
        return await self._create(ingredients, spec)

    async def close(self) -> None:
        """Close every sandbox that is still open, and the template."""
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._open)))
        template, self._template = self._template, None
        if template is not None:
            await asyncio.shield(template.close())

    async def _prepared(self) -> Ingredients:
        """Return the parts from which sandboxes are started, after a trial start."""
        async with self._preparing:
            if self._ingredients is None:
                found = await asyncio.to_thread(self._find)
                if not await self._works_with_template(found):
                    self._uses_template = False
                    try:
                        tried = await self._create(found, SandboxSpec())
                    except SandboxError as error:
                        raise SandboxUnavailableError(f"{error}. {_ADVICE}") from error
                    await tried.close()
                self._ingredients = found
        return self._ingredients

    async def _works_with_template(self, ingredients: Ingredients) -> bool:
        """Return whether a sandbox can be forked; minor obstacles can prevent a template."""
        if not self._uses_template or ingredients.is_hidden_in_forks:
            return False
        try:
            tried = await self._create(ingredients, SandboxSpec())
        except SandboxError:
            template, self._template = self._template, None
            if template is not None:
                await template.close()
            return False
        await tried.close()
        return True

    async def _start(
        self, ingredients: Ingredients, limits: InnerLimits, on_pid: Callable[[int], None]
    ) -> Started:
        """Start a sandbox from the template, or by bubblewrap alone."""
        if not self._uses_template:
            return await started_by(asyncio.create_task(start(ingredients, limits, on_pid)))
        template = self._template
        if template is None or not template.is_running:
            template = await self._renewed(ingredients, template)
        try:
            return await started_by(asyncio.create_task(template.fork(limits, on_pid)))
        except SandboxError:
            if template.is_running:
                raise
            # It ended while this was asked of it, perhaps for having nothing to do.
            template = await self._renewed(ingredients, template)
            return await started_by(asyncio.create_task(template.fork(limits, on_pid)))

    async def _renewed(self, ingredients: Ingredients, former: Template | None) -> Template:
        """Return a template other than `former`; concurrent callers get the same one."""
        if self._template is None or self._template is former:
            self._template = Template(ingredients)
            if former is not None:
                await former.close()
        return self._template

    def _find(self) -> Ingredients:
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                "local sandboxes are made of what the kernel of Linux offers, and this is "
                f"{platform.system()}; take another provider, such as docker"
            )
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxUnavailableError(
                f"local sandboxes need bubblewrap, and there is no bwrap in PATH; {_INSTALL}"
            )
        if os.getuid() == 0 and shutil.which("setpriv") is None:
            raise SandboxUnavailableError(
                "local sandboxes never run as root, and there is no setpriv to become another "
                "user with; install util-linux, or run as an ordinary user"
            )
        kind = platform.machine()
        if not seccomp.is_known(kind):
            raise SandboxUnavailableError(
                f"local sandboxes have no system call filter for {kind!r}; expected x86_64 or "
                "aarch64. Take another provider, such as docker"
            )
        for path in self._read_only:
            if not os.path.exists(path):
                raise SandboxUnavailableError(
                    f"local sandboxes are to read {path!r} (read_only), and there is no such "
                    "path on this machine; create it, or correct the path"
                )
        interpreter = find_interpreter(self._python)
        here = Path(__file__)
        return Ingredients(
            program=program,
            interpreter=interpreter,
            supervisor=compiled(interpreter, here.with_name("supervisor.py").read_bytes()),
            template=compiled(interpreter, here.with_name("zygote.py").read_bytes()),
            filter=seccomp.program_for(kind),
            read_only=self._read_only,
        )

    async def _create(self, ingredients: Ingredients, spec: SandboxSpec) -> LocalSandbox:
        memory_bytes = (spec.memory_mb or DEFAULT_MEMORY_MB) * _MB
        max_processes = spec.max_processes or DEFAULT_PROCESSES
        has_group = "memory" in self._controllers.folders
        inner = InnerLimits(
            disk_bytes=(spec.disk_mb or DEFAULT_DISK_MB) * _MB,
            # The supervisor is one of them.
            max_processes=max_processes + 1,
            address_bytes=0 if has_group else memory_bytes,
            time_to_live_s=math.ceil(spec.time_to_live_s) + _GRACE_S,
            writable=self._writable,
        )
        group: ControlGroup | None = None
        try:
            if self._controllers.folders:
                group = ControlGroup(
                    self._controllers,
                    next(_numbers),
                    memory_bytes=memory_bytes if has_group else None,
                    cpus=spec.cpus,
                )
            on_pid = group.add if group else _left_where_it_is
            started = await self._start(ingredients, inner, on_pid)
        except OSError as error:
            raise SandboxError(
                f"the control group of a local sandbox could not be made: {error}"
            ) from error
        except BaseException:
            if group is not None:
                await asyncio.shield(group.removed())
            raise
        sandbox = LocalSandbox(
            started,
            group,
            spec,
            watched_bytes=0 if has_group else memory_bytes,
            environment=variables_of(ingredients.interpreter),
            measures=self._measures(started),
            on_closed=self._open.discard,
        )
        self._open.add(sandbox)
        return sandbox

    def _measures(self, started: Started) -> dict[str, str]:
        measures = {limit.value: means for limit, means in self.limits.items()}
        landlock = "in force" if started.has_landlock else "not in this kernel"
        beginning = "a fork of a template" if self._uses_template else "bubblewrap for each"
        return {
            **measures,
            "system calls": "seccomp filter",
            "landlock": landlock,
            "start": beginning,
        }


def _amounts() -> Mapping[Limit, ResourceAmount]:
    """Return the amounts of this machine; a limit above them would have no effect."""
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MB
    memory = "the memory of this machine in MiB"
    return {
        Limit.CPUS: ResourceAmount(
            most=os.cpu_count() or 1,
            why_most="the processors of this machine",
            least=0.01,
            why_least="the least that a control group can be given",
        ),
        Limit.MEMORY: ResourceAmount(
            most=memory_mb,
            why_most=memory,
            least=_LEAST_MEMORY_MB,
            why_least="without which no program starts",
        ),
        Limit.DISK: ResourceAmount(most=memory_mb, why_most=f"{memory}, which holds the files"),
        Limit.PROCESSES: ResourceAmount(
            most=_MOST_PROCESSES, why_most="the most that Linux counts"
        ),
        Limit.TIME_TO_LIVE: ANY_SECONDS,
    }


def _left_where_it_is(pid: int) -> None:
    """Do nothing: the process stays outside of control groups."""


_ADVICE = (
    "Local sandboxes need bubblewrap 0.8 or newer and user namespaces: see that "
    "kernel.unprivileged_userns_clone is 1 and user.max_user_namespaces above 0, that AppArmor "
    "lets bwrap have them (kernel.apparmor_restrict_unprivileged_userns), and that a container "
    "around this process allows them; else take another provider, such as docker"
)
