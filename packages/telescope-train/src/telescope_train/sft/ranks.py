"""The trainer ranks of `telescope sft`: one in this process, or several processes on Ray."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from telescope_core.base.errors import ConfigError
from telescope_core.records.logs import Logs
from telescope_train.backends import layout_of
from telescope_train.backends.protocol import BackendSettings, Ranks
from telescope_train.cluster.network import Network
from telescope_train.cluster.placement import OWN_CLUSTER_S, Bundle, RankRoom, RoomRequest, reserve
from telescope_train.cluster.ray_cluster import ray_cluster
from telescope_train.config.ray_section import RaySection
from telescope_train.models.facts import UNKNOWN_FACTS, read_model_facts
from telescope_train.models.threads import threads_of
from telescope_train.sft.checkpoints import log_folder
from telescope_train.sft.config import SftConfig
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.ray_ranks import RayRanks
from telescope_train.trainer.worker import TrainerWorker


@asynccontextmanager
async def open_ranks(config: SftConfig, settings: BackendSettings) -> AsyncIterator[Ranks]:
    """Load the model on every rank; the ranks end with the context."""
    layout = layout_of(settings)
    num_threads = _threads(config, settings, layout.num_ranks)
    if layout.num_ranks == 1:
        ranks = LocalRanks(TrainerWorker(settings, num_threads=num_threads))
        try:
            yield ranks
        finally:
            await ranks.close()
        return
    section = RaySection(ray_address=config.ray_address)
    bundle = Bundle(cpus=1.0, gpus=1 if settings.device == "cuda" else 0)
    request = RoomRequest(
        "trainer ranks", "trainer_num_workers", [bundle] * layout.num_ranks, "PACK"
    )
    is_own = section.ray_address is None
    deadline_s = OWN_CLUSTER_S if is_own else section.ray_placement_timeout_s
    with ray_cluster(section, request.bundles, debug=False):
        room = reserve(request, deadline_s=deadline_s)
        several = RayRanks(
            RankRoom(room, lambda: reserve(request, deadline_s=deadline_s)),
            Logs(folder=(log_folder(config) / "logs").absolute(), is_debug=False),
            network=Network(is_local=is_own),
            timeout_s=section.worker_progress_timeout_s,
            layout=layout,
        )
        try:
            await several.open(settings, num_threads=num_threads)
            yield several
        finally:
            await several.close()
            room.give_back()


def _threads(config: SftConfig, settings: BackendSettings, num_ranks: int) -> int:
    """Return the number of threads of each rank without a GPU."""
    try:
        facts = read_model_facts(settings.model.model)
    except ConfigError:
        facts = UNKNOWN_FACTS  # what is wrong with it is said when it is loaded
    return threads_of(facts, num_ranks=num_ranks, is_alone=config.ray_address is None)
