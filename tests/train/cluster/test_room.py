"""Room on a real cluster of three nodes: every strategy, too little of it, and a lost node."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

PROGRAM = """
import asyncio, json
from functools import partial

import ray
from ray.cluster_utils import Cluster

from telescope_core.errors import ConfigError
from telescope_train.cluster.nodes import ask_nodes, all_nodes, living_nodes
from telescope_train.cluster.placement import Bundle, RankRoom, RoomRequest, reserve

SIZE = {"object_store_memory": 80 * 2**20}
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": HEALTH, **SIZE},
)
others = [cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{i}", **SIZE) for i in (2, 3)]
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
found = {}


def asked(number, strategy):
    return RoomRequest("ranks", "trainer_num_workers", [Bundle(cpus=1.0)] * number, strategy)


async def main():
    for strategy, number in (("PACK", 3), ("STRICT_PACK", 2), ("STRICT_SPREAD", 3)):
        room = await asyncio.to_thread(reserve, asked(number, strategy), deadline_s=20)
        nodes = room.nodes()
        wanted = [place["scheduling_strategy"] for place in room.places()]
        found[strategy] = [nodes[one.placement_group_bundle_index] for one in wanted]
        room.give_back()
    try:
        await asyncio.to_thread(reserve, asked(3, "STRICT_PACK"), deadline_s=1)
    except ConfigError as error:
        found["too little"] = str(error)
    reserve_pair = partial(reserve, asked(2, "STRICT_SPREAD"), deadline_s=30)
    room = RankRoom(await asyncio.to_thread(reserve_pair), reserve_pair)
    before = room.nodes()
    await room.renew()
    found["kept"] = room.nodes() == before
    lost = next(one for one in others if one.node_id in before)
    was = [node for node in living_nodes() if node.id == lost.node_id]
    cluster.remove_node(lost, allow_graceful=False)
    while any(node.id == lost.node_id for node in await asyncio.to_thread(living_nodes)):
        await asyncio.sleep(0.2)
    await room.renew()
    found["elsewhere"] = lost.node_id not in room.nodes() and len(set(room.nodes())) == 2
    answers = await ask_nodes([*living_nodes(), *was], ray.util.get_node_ip_address)
    found["answers"] = all(node.address == said for node, said in answers.items())
    found["number of answers"] = len(answers)
    found["label"] = was[0].label


try:
    asyncio.run(asyncio.wait_for(main(), 500))
finally:
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_room_is_found_by_strategy_and_elsewhere_after_a_loss() -> None:
    # Ray leaves a note on the newest cluster in its folder, which others would follow.
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={
                **os.environ,
                "RAY_TMPDIR": folder,
                "RAY_memory_monitor_refresh_ms": "0",
            },
            capture_output=True,
            text=True,
            timeout=2900,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, second, third = found["PACK"]
    assert len({first, second, third}) == 2
    assert second in (first, third), "those of a node are next to each other"
    assert len(set(found["STRICT_PACK"])) == 1
    assert len(set(found["STRICT_SPREAD"])) == 3
    assert "no room for 3 ranks (3 CPUs, 0 GPUs, all on one node) within 1 s" in found["too little"]
    assert "(127.0.0.3) with 2 CPUs" in found["too little"]
    assert found["kept"]
    assert found["elsewhere"]
    assert found["answers"]
    assert found["number of answers"] == 2
    assert "(127.0.0." in found["label"]
