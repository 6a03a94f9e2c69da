"""Where processes go: neighbors on the same node, on free ports, over the interface of the node."""

import pytest

from telescope_core.base.addresses import is_loopback
from telescope_core.errors import ConfigError
from telescope_train.cluster import network, placement
from telescope_train.cluster.network import Network, interface_of
from telescope_train.cluster.placement import (
    Bundle,
    RoomRequest,
    bundles_of,
    in_order_of_nodes,
    reserve,
)
from telescope_train.cluster.ports import listening, listening_from
from telescope_train.config.schema import TrainConfig
from telescope_train.trainer.ray_ranks import RankPlace, in_order_of_places


def test_bundles_of_a_node_are_next_to_each_other():
    assert in_order_of_nodes(["b", "a", "b", "a", "c"]) == [0, 2, 1, 3, 4]
    assert in_order_of_nodes(["a"] * 3) == [0, 1, 2]
    assert in_order_of_nodes([]) == []


def test_ranks_are_numbered_by_node_and_then_by_gpu():
    places = [RankPlace("a", (3,)), RankPlace("b", (1,)), RankPlace("a", (0,)), RankPlace("b", ())]
    assert in_order_of_places(places) == [2, 0, 3, 1]
    on_cpu = [RankPlace(node, ()) for node in "aabb"]
    assert in_order_of_places(on_cpu) == [0, 1, 2, 3]


def test_a_server_of_several_gpus_is_one_bundle_of_one_node():
    config = TrainConfig.model_validate(
        {
            "run": {"name": "one", "number_of_steps": 1},
            "model": {"model": "/models/one"},
            "environments": [{"name": "countdown"}],
            "inference": {
                "inference_num_workers": 2,
                "inference_tensor_parallel_size": 4,
                "inference_data_parallel_size": 2,
            },
            "trainer": {"trainer_num_workers": 3},
        }
    )
    on_gpus = [bundle.resources() for bundle in bundles_of(config, "cuda")]
    assert on_gpus == [{"CPU": 1.0, "GPU": 8}] * 2 + [{"CPU": 1.0, "GPU": 1}] * 3
    assert [bundle.resources() for bundle in bundles_of(config, "cpu")] == [{"CPU": 1.0}] * 5


def test_a_cluster_without_a_living_node_is_not_asked_to_grow(monkeypatch):
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: object())
    monkeypatch.setattr(placement, "_has_room_in_time", lambda *_: False)
    returned = []
    monkeypatch.setattr(placement.Room, "give_back", lambda room: returned.append(room))
    asked = RoomRequest("trainer ranks", "trainer_num_workers", [Bundle(cpus=1.0)], "PACK")
    for nodes, message in (([], "no node"), ([object()], "Add nodes.*trainer_num_workers")):
        monkeypatch.setattr(placement, "living_nodes", lambda nodes=nodes: nodes)
        monkeypatch.setattr(placement, "nodes_text", lambda: "one node")
        with pytest.raises(ConfigError, match=message):
            reserve(asked, deadline_s=1.0)
    assert len(returned) == 2, "what was asked for is not left asked for"


def test_the_interface_is_the_one_with_the_address():
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fe80::1%eth0"]}
    assert interface_of("10.0.0.5", found) == "eth0"
    assert interface_of("fe80::1", found) == "eth0"
    assert interface_of("34.0.0.1", found) is None


def test_libraries_are_told_the_interface_and_what_is_set_stays():
    here = Network(is_local=True)
    assert here.address() == "127.0.0.1"
    found = here.variables({})
    assert set(found) == {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
    assert len(set(found.values())) == 1
    assert "GLOO_SOCKET_IFNAME" not in here.variables({"GLOO_SOCKET_IFNAME": "eth7"})


def test_nccl_gets_one_interface_of_several_that_begin_alike(monkeypatch):
    interfaces = {"eth1": ["10.0.0.5"], "eth10": ["10.1.0.5"], "eth1.7": ["10.7.0.5"]}
    monkeypatch.setattr(network, "addresses_by_interface", lambda: interfaces)
    monkeypatch.setattr(network.ray.util, "get_node_ip_address", lambda: "10.0.0.5")
    found = Network(is_local=False).variables({})
    # "=" before a name asks NCCL for exactly that one; without it, for all that begin so.
    assert found.pop("NCCL_SOCKET_IFNAME") == "=eth1"
    assert set(found.values()) == {"eth1"}
    taken = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert "NCCL_SOCKET_IFNAME" not in Network(is_local=False).variables(taken)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("10.0.0.1", False), ("::", False), ("127.example", False)),
    ],
)
def test_what_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected


def test_ports_of_servers_do_not_meet():
    with listening("127.0.0.1") as other:
        taken = other.getsockname()[1]
        with listening_from("127.0.0.1", taken, every=3) as found:
            port = found.getsockname()[1]
    assert port > taken
    assert (port - taken) % 3 == 0
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*inference_host"):
        listening_from("192.0.2.1", 8100, every=1)
