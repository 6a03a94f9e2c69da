"""A Ray cluster of several machines on one: a network namespace each, joined by a bridge.

Each node has a loopback and an address of its own, so 127.0.0.1 of another one cannot be reached,
and its cable can be pulled. Folders named as `own` are its own too: what is written there is seen
by that node alone. Needs root and Linux; `what_is_missing` says what is not there.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HEALTH = (
    '{"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, '
    '"health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}'
)
"""Ray finds a silent node in seconds; by default that takes it more than a minute."""
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Another program of this machine may fill its memory, which is not what is tested.
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_S = 120


def what_is_missing() -> str:
    """Return what this machine lacks for network namespaces; empty if they can be made."""
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"the programs {', '.join(missing)} (packages iproute2, util-linux, mount)"
    if os.geteuid() != 0:
        return "root, to make network namespaces"
    name = f"tele-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the right to make network namespaces (ip netns add: {made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Nodes:
    """The nodes of a cluster, numbered from 1; the head is the first."""

    def __init__(self, num_cpus: Sequence[float], *, own: Sequence[Path] = ()) -> None:
        """`own`: folders that each node except the head has for itself."""
        self._names = [f"tele-{os.getpid()}-{number}" for number in range(1, len(num_cpus) + 1)]
        self._num_cpus = num_cpus
        self._own = [str(path) for path in own]
        # Ray's sockets have little room for the path of their folder.
        self.folder = Path(tempfile.mkdtemp(prefix="tele-", dir="/tmp"))
        self.token = "for-tests-only-0123456789abcdef"

    @property
    def address(self) -> str:
        """The address of Ray's head."""
        return f"{self.address_of(1)}:6379"

    def address_of(self, number: int) -> str:
        """Return the address of a node."""
        return f"10.77.0.{number}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node."""
        return ["ip", "netns", "exec", self._names[number - 1], *command]

    def variables(self, number: int) -> dict[str, str]:
        """Return the environment of processes of a node; each has a home of its own."""
        home = self.folder / f"home{number}"
        home.mkdir(exist_ok=True)
        return {**os.environ, **VARIABLES, "RAY_AUTH_TOKEN": self.token, "HOME": str(home)}

    def start(self) -> None:
        """Make the namespaces and start Ray in each."""
        head = self._names[0]
        for number, name in enumerate(self._names, start=1):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            if number == 1:
                _ip("-n", name, "link", "add", "br0", "type", "bridge")
                _ip("-n", name, "addr", "add", f"{self.address_of(1)}/24", "dev", "br0")
                _ip("-n", name, "link", "set", "br0", "up")
                continue
            end = ("peer", "name", "eth0", "netns", name)
            _ip("-n", head, "link", "add", f"v{number}", "type", "veth", *end)
            _ip("-n", head, "link", "set", f"v{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address_of(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        for number in range(1, len(self._names) + 1):
            self._start_ray(number)

    def cut(self, number: int) -> None:
        """Pull the cable of a node: nothing there dies, and nothing answers."""
        _ip("-n", self._names[0], "link", "set", f"v{number}", "down")

    def close(self) -> None:
        """End everything that runs in the namespaces, and remove them."""
        for name in self._names:
            listed = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_ray(self, number: int) -> None:
        how = ["--address", self.address]
        if number == 1:
            how = ["--head", "--port", "6379", "--include-dashboard", "false"]
            how += ["--temp-dir", str(self.folder / "ray"), "--system-config", HEALTH]
        command = [*RAY, "start", *how, "--node-ip-address", self.address_of(number)]
        command += ["--num-cpus", f"{self._num_cpus[number - 1]:g}", "--disable-usage-stats"]
        command += ["--object-store-memory", "80000000"]
        if number > 1 and self._own:
            # Mounts that only this node's processes see.
            mounts = "; ".join(f"mount -t tmpfs own {path}" for path in self._own)
            command = ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh", *command]
        log = self.folder / f"node{number}.log"
        # Daemons keep what they print to open, so that is a file.
        with log.open("w") as output:
            done = subprocess.run(
                self.command(number, command),
                env=self.variables(number),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=START_S,
                check=False,
            )
        assert done.returncode == 0, log.read_text()[-2000:]


@contextmanager
def running_nodes(num_cpus: Sequence[float], *, own: Sequence[Path] = ()) -> Iterator[Nodes]:
    """Have the nodes of a cluster for as long as the context lasts."""
    nodes = Nodes(num_cpus, own=own)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
