"""The address and the network interface of a process in a run.

Decided in the process itself, on its own node. gloo would otherwise take the address that the name
of the machine resolves to, which is 127.0.0.1 in many containers, and NCCL the first interface.
"""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import psutil
import ray

from telescope_core.base.addresses import reached_directly
from telescope_train.config.inference_section import LOOPBACK

ANY_ADDRESS = ("0.0.0.0", "::")
"""Hosts that mean all addresses of a machine."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that tell torch's libraries which interface to use."""
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


class Network(NamedTuple):
    """Addresses by which the processes of a run reach each other."""

    is_local: bool
    """Whether all of them run on one machine, so that they use its loopback."""
    driver: str = ""
    """The address of the driver's node; empty = this machine."""

    def address(self) -> str:
        """Return the address at which others reach this process."""
        return LOOPBACK if self.is_local else str(ray.util.get_node_ip_address())

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that libraries on this node need; variables that are set stay."""
        name = interface_of(self.address(), addresses_by_interface())
        if name is None:
            return {}
        wanted = dict[str, str].fromkeys(INTERFACE_VARIABLES, name)
        # On one machine NCCL uses its GPUs' own links, and finds itself.
        if not self.is_local:
            # NCCL takes a name for the beginning of names: eth1 would be eth10 to eth19 as well.
            wanted[NCCL_VARIABLE] = f"={name}"
        return {one: value for one, value in wanted.items() if one not in environ}

    def reached_directly(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make programs bypass proxies for this node and the driver's."""
        hosts = {self.address(), self.driver} - {""}
        return reached_directly(environ, tuple(sorted(hosts)))

    def apply(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set all of these variables in this process, before it creates a process group."""
        environ = os.environ if environ is None else environ
        environ.update(self.variables(environ) | self.reached_directly(environ))


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the addresses of this machine by network interface."""
    found = psutil.net_if_addrs()
    return {name: [one.address for one in addresses] for name, addresses in found.items()}


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Return the interface with `address`; None if there is none, as with address translation."""
    for name, addresses in interfaces.items():
        # A local IPv6 address comes with its interface behind a percent sign.
        if address in [one.partition("%")[0] for one in addresses]:
            return name
    return None
