"""Parts of a run that stay open from its first process to its last: servers, ranks, policies.

Each is a context that closes what it opened; `run` nests them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from telescope_core.base.errors import ConfigError, TelescopeError, TemplateLossError
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import Split
from telescope_core.gateway import Gateway
from telescope_core.processes import EnvironmentPool
from telescope_core.records import RunFolder
from telescope_core.records.servers import ServerRole, ServerState
from telescope_train.backends import layout_of
from telescope_train.backends.protocol import BackendSettings
from telescope_train.backends.transfer import Wire
from telescope_train.chat.message_form import MessageForm
from telescope_train.chat.probe import declared_uses, probe_template
from telescope_train.chat.renderer import Renderer, load_renderer
from telescope_train.cluster.colocation import (
    FreesMemory,
    GpuSharing,
    ResidentGpu,
    SharedGpu,
    sleep_level,
)
from telescope_train.cluster.network import Network
from telescope_train.cluster.node_meters import metered_nodes
from telescope_train.cluster.ray_cluster import HeadProcesses
from telescope_train.cluster.supervision import cancel
from telescope_train.cluster_session import ClusterSession
from telescope_train.config.inference_section import AUTO_TRANSPORT
from telescope_train.config.schema import EnvironmentEntry, TrainConfig
from telescope_train.evals.num_examples import check_num_examples
from telescope_train.evals.servers import EvalCalls, EvalServers
from telescope_train.inference.client import TokenClient
from telescope_train.inference.fleet import ServerGroup, ServerPorts, server_settings
from telescope_train.inference.opponents import KeptVersions, OpponentServers
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import RolloutServers, ServerPool
from telescope_train.inference.server import SERVED_MODEL_NAME
from telescope_train.inference.servers import Server
from telescope_train.inference.sleep import (
    SharedGpuFleet,
    SleepingServers,
    bring_in_when_awake,
    sleep,
    wake,
)
from telescope_train.inference.supervisor import Supervisor
from telescope_train.models.device import Device
from telescope_train.models.served_adapter import served_adapter
from telescope_train.observability.meters import Meters, show_nobody
from telescope_train.observability.prometheus import ServerStanding
from telescope_train.observability.recording import Recording
from telescope_train.observability.terminal import LiveView
from telescope_train.observability.timeline import RankSpans, Timeline
from telescope_train.plan.gpus import share_of_rank
from telescope_train.plan.prepared import Prepared
from telescope_train.recording import run_logs
from telescope_train.rollouts.attempts import Attempts, LimitedPool
from telescope_train.rollouts.mix import refuse_rewards, train_size
from telescope_train.trainer.ray_ranks import RayRanks
from telescope_train.weights.publish import WeightPublisher
from telescope_train.weights.transport import load_transport

_TELL_EVERY_S = 1.0
"""Seconds between two looks at what starting processes are doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of a run besides the driver."""

    servers: ServerGroup
    ranks: RayRanks
    failed_servers: Mapping[int, str] = field(default_factory=dict[int, str])
    """Number of each server that has not started -> the reason."""
    secret: str = field(default="", repr=False)
    """Secret of the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policies for training and for evals, and their connections to servers."""

    pool: ServerPool
    publisher: WeightPublisher
    source: TokenPolicySource
    attempts: Attempts
    recording: Recording
    rank_spans: RankSpans
    clients: Sequence[TokenClient]
    """The clients of all servers."""
    gpu_sharing: GpuSharing
    """Turns of ranks and servers on a shared GPU."""
    eval_servers: EvalServers
    eval_source: TokenPolicySource
    opponents: OpponentServers
    """Servers with older versions of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The parts of a run that are open while the loop works."""

    prepared: Prepared
    folder: RunFolder
    view: LiveView
    processes: Processes
    policies: Policies
    head: HeadProcesses


async def open_renderer(prepared: Prepared, folder: RunFolder, view: LiveView) -> Renderer:
    """Load tokenizer and chat template; show and record its effects on sampled turns.

    Raises ConfigError if it cannot write what an environment needs, such as tools, if prompts have
    pictures, if there is nothing to train on, if the algorithm cannot take the rewards, or if an
    eval asks for more examples than there are.
    """
    config = prepared.config
    opened = prepared.environments.opened
    described = await asyncio.gather(*(one.describe() for one in opened.clients))
    for note in await check_num_examples(config.evals.evals, opened.evals):
        view.note(note)
    await asyncio.gather(
        *(_refuse_untrainable(one, opened.training[one.name]) for one in config.environments)
    )
    refuse_rewards(config, {name: await one.describe() for name, one in opened.training.items()})
    renderer = load_renderer(config.model, uses=declared_uses(config, described))
    report = probe_template(renderer)
    view.phase(report.text)
    folder.note_chat_template(report.row())
    return renderer


async def _refuse_untrainable(entry: EnvironmentEntry, client: EnvironmentClient) -> None:
    """Raise ConfigError if nothing can be trained on, or if the first example has a picture."""
    train_size(entry, await client.describe())
    try:
        prompt = (await client.example(Split(entry.split), 0)).prompt
    except TelescopeError:
        return  # An example that cannot be read says so to who plays it.
    try:
        for message in () if isinstance(prompt, str) else prompt:
            MessageForm().plain(message)
    except TemplateLossError as error:
        raise ConfigError(f"environment {entry.name}: {error}") from None


@asynccontextmanager
async def open_gateway(prepared: Prepared) -> AsyncIterator[Gateway]:
    """Listen for environments whose programs use HTTP; done first, because a port may be taken.

    Without `gateway_host`, environments on other nodes reach it at this node's address in Ray.
    """
    inference = prepared.config.inference
    network = Network(is_local=prepared.environments.on_cluster is None)
    gateway = Gateway(
        model=SERVED_MODEL_NAME,
        host=inference.gateway_host or network.address(),
        port=inference.gateway_port,
    )
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.close()


@asynccontextmanager
async def open_processes(
    prepared: Prepared,
    folder: RunFolder,
    session: ClusterSession,
    traces_endpoint: str | None,
    *,
    view: LiveView,
) -> AsyncIterator[Processes]:
    """Start servers and ranks on their nodes; they are healthy when the context begins.

    Servers that have not started are named: one of those that rollouts ask is enough to begin.
    """
    view.phase("starting inference servers and trainer ranks")
    config = prepared.config
    rooms = await session.find_room(prepared)
    settings = server_settings(
        config,
        device=prepared.device,
        dtype=prepared.dtype,
        max_model_len=prepared.max_model_len,
        log_folder=folder.logs_path.absolute(),
        traces_endpoint=traces_endpoint,
        secret=session.secret,
    )
    ports = ServerPorts.from_config(config, session.network)
    servers = ServerGroup.start(settings, rooms.servers.places(), ports, config)
    ranks = RayRanks(
        rooms.ranks,
        run_logs(config, folder),
        network=session.network,
        timeout_s=config.ray.worker_progress_timeout_s,
        layout=layout_of(rank_settings(prepared)),
    )
    try:
        async with _activities_shown(servers, ranks, view):
            # One that dies after it was healthy is noticed by who keeps them, once all have
            # started.
            num_needed = config.num_rollout_servers
            healthy = servers.wait_until_healthy(num_needed=num_needed)
            loaded = ranks.open(rank_settings(prepared), num_threads=threads_of(prepared))
            if config.inference.shares_gpu:
                failed = await one_after_another(
                    healthy,
                    ranks.prepare(),
                    loaded,
                    servers,
                    session.secret,
                    shared_with=ranks,
                    takes_turns=config.inference.colocate is True,
                )
            else:
                failed, _ = await asyncio.gather(healthy, loaded)
        yield Processes(servers=servers, ranks=ranks, failed_servers=failed, secret=session.secret)
    finally:
        await servers.close()
        await ranks.close()


@asynccontextmanager
async def _activities_shown(
    servers: ServerGroup, ranks: RayRanks, view: LiveView
) -> AsyncIterator[None]:
    """Show about once a second what each process that starts is doing, within the context."""

    async def show() -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            view.waits_for(
                [
                    *(("server", activity) for activity in servers.activities.values()),
                    *(("rank", activity) for activity in await ranks.activities()),
                ]
            )

    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        await cancel([showing])
        view.waits_for([])


async def one_after_another(
    healthy: Awaitable[Mapping[int, str]],
    prepared: Awaitable[None],
    loaded: Awaitable[None],
    group: ServerGroup,
    secret: str,
    *,
    shared_with: FreesMemory,
    takes_turns: bool,
) -> Mapping[int, str]:
    """Start servers, then ranks on the same GPU; returns the servers that failed, and why.

    `prepared`: what ranks do without the GPU, while the servers start. `shared_with`: these ranks.
    `takes_turns`: servers sleep while ranks load, as ranks may need their memory for that.
    """
    # vLLM measures what is free while it starts: nobody else may load a model then.
    failed, _ = await asyncio.gather(healthy, prepared)
    if not takes_turns:
        await loaded
        return failed
    clients = [TokenClient(url, identity=name, secret=secret) for url, name in group.reached]
    try:
        # At level 1, because nobody could send them their first weights.
        await asyncio.gather(*(sleep(client, level=1) for client in clients))
        await loaded
        # What their rehearsed step needed is in torch's cache.
        await shared_with.free_cached_memory()
        await asyncio.gather(*map(wake, clients))
    finally:
        for client in clients:
            await client.close()
    return failed


@asynccontextmanager
async def open_policies(
    prepared: Prepared,
    folder: RunFolder,
    processes: Processes,
    recording: Recording,
    *,
    renderer: Renderer,
    gateway: Gateway,
    warn: Callable[[str], None],
) -> AsyncIterator[Policies]:
    """Connect environments to the servers; `warn` is called when something goes wrong."""
    clients = [
        TokenClient(
            one.base_url,
            identity=one.identity,
            secret=processes.secret,
            expects_routes=prepared.config.trainer.routing_replay,
        )
        for one in processes.servers.reached
    ]
    num_rollout_servers = prepared.config.num_rollout_servers
    kept = KeptVersions.from_settings(prepared.config.inference)
    first_eval_server = len(clients) - prepared.config.evals.eval_num_servers
    pool = ServerPool(clients[:num_rollout_servers], on_event=folder.log_server, is_kept=True)
    opponents = OpponentServers(
        [
            # Kept: a match waits for its opponent to come back, as it does for the policy.
            ServerPool([one], on_event=folder.log_server, is_kept=True, role=ServerRole.OPPONENT)
            for one in clients[num_rollout_servers:first_eval_server]
        ],
        kept,
    )
    eval_servers = EvalServers(pool, _eval_pool(clients[first_eval_server:], folder))
    pools = [pool, *opponents.pools, *([] if eval_servers.own is None else [eval_servers.own])]
    # In the order of their numbers in the run.
    all_servers = [(one, server) for one in pools for server in one.servers]
    for number, reason in processes.failed_servers.items():
        of, server = all_servers[number]
        of.lose(server, reason)
    log, calls = recording.events, recording.calls
    if recording.shown is not None:
        recording.shown.servers = lambda: [_standing(server) for _, server in all_servers]
    rank_spans = RankSpans(lambda: processes.ranks.timed, recording.timeline)
    _note_replaced_workers(prepared, recording.timeline, warn)
    attempts = Attempts.from_config(
        prepared.config, log, num_servers=len(pool.clients), calls=calls
    )
    try:

        def source(servers_of: Callable[[str], RolloutServers]) -> TokenPolicySource:
            return TokenPolicySource(
                pool,
                renderer,
                max_model_len=prepared.max_model_len,
                interleaved=prepared.config.rollout.interleaved_rollouts,
                gateway=gateway,
                servers_of=servers_of,
                older_of=opponents.pool_of if opponents.pools else None,
            )

        publisher = WeightPublisher(
            pool,
            processes.ranks,
            in_flight=prepared.config.scheduling.in_flight_update,
            sends_adapter=served_adapter(prepared.config) is not None,
            wire=weight_wire(prepared, folder),
            others=pools[1:],
        )
        yield Policies(
            pool=pool,
            publisher=publisher,
            source=source(lambda rollout_id: LimitedPool(pool, attempts, rollout_id)),
            attempts=attempts,
            recording=recording,
            rank_spans=rank_spans,
            clients=clients,
            gpu_sharing=_gpu_sharing(prepared, processes, pool),
            eval_servers=eval_servers,
            eval_source=source(lambda rollout_id: EvalCalls(eval_servers, calls, rollout_id)),
            opponents=opponents,
        )
    finally:
        # Environments first: they hold the rollouts that would still ask.
        for client in prepared.environments.opened.clients:
            await client.close()
        for client in clients:
            await client.close()
        await rank_spans.ask_at_end()
        log.flush()


def _gpu_sharing(prepared: Prepared, processes: Processes, pool: ServerPool) -> GpuSharing:
    if prepared.config.inference.colocate == "resident":
        return ResidentGpu(processes.ranks)
    if prepared.config.inference.colocate is not True:
        return GpuSharing()
    level = sleep_level(prepared.config)
    return SharedGpu(SleepingServers(pool, processes.servers, level=level), processes.ranks)


def _note_replaced_workers(
    prepared: Prepared, timeline: Timeline, warn: Callable[[str], None]
) -> None:
    def replaced(name: str, reason: str) -> None:
        warn(f"a worker is replaced: {reason}")
        timeline.moment("worker replaced", f"environment {name}", reason)

    for client in prepared.environments.opened.clients:
        if isinstance(client, EnvironmentPool):
            client.on_replaced = partial(replaced, client.name)


def _eval_pool(clients: Sequence[TokenClient], folder: RunFolder) -> ServerPool | None:
    # Not `is_kept`: a server that comes back has no weights until the next evals, so that requests
    # of these would wait for ever.
    role = ServerRole.EVAL
    return ServerPool(clients, on_event=folder.log_server, role=role) if clients else None


def supervising(resources: Resources) -> Sequence[Coroutine[Any, Any, None]]:
    """Return the coroutines of the supervisors, which restart lost servers."""
    policies, warn = resources.policies, resources.view.warn
    fleet = SharedGpuFleet(resources.processes.servers, policies.gpu_sharing)
    pool, own = policies.pool, policies.eval_servers.own
    bring_in = bring_in_when_awake(policies.publisher.give, policies.gpu_sharing)
    works = [Supervisor(pool, fleet, bring_in, warn=warn).run()]
    for place, one in enumerate(policies.opponents.pools):
        first = len(pool.servers) + place
        supervisor = Supervisor(
            one,
            fleet,
            policies.publisher.bring_in,
            warn=warn,
            first=first,
            beside=policies.opponents.pools,
        )
        works.append(supervisor.run())
    if own is not None:

        async def wait_for_evals(server: Server) -> None:
            await server.until(ServerState.SERVING, ServerState.LOST)

        first = len(pool.servers) + len(policies.opponents.pools)
        own_supervisor = Supervisor(
            own, fleet, wait_for_evals, warn=warn, first=first, is_needed=False
        )
        works.append(own_supervisor.run())
    return works


def timing_ranks(resources: Resources) -> Coroutine[Any, Any, None]:
    """Return the coroutine that fetches the spans of the ranks for the timeline."""
    return resources.policies.rank_spans.run()


def run_meters(resources: Resources) -> Meters | None:
    """Return the reader of the meters of machines and servers; None if they are not read."""
    policies, section = resources.policies, resources.prepared.config.observability
    if not section.system_metrics_collection_interval_seconds:
        return None
    shown = policies.recording.shown
    return Meters(
        metered_nodes(resources.folder.path),
        lambda: policies.clients,
        policies.recording.meter,
        interval_s=section.system_metrics_collection_interval_seconds,
        show=show_nobody if shown is None else shown.meters,
    )


def _standing(server: Server) -> ServerStanding:
    return ServerStanding(
        address=server.client.base_url,
        is_serving=server.state is ServerState.SERVING,
        version=server.version,
        life=server.life,
    )


def rank_settings(prepared: Prepared) -> BackendSettings:
    """Return the settings for opening trainer ranks."""
    settings = BackendSettings.from_config(prepared.config, device=prepared.device)
    share = share_of_rank(prepared.config, prepared.gpus)
    return replace(settings, longest_sequence=prepared.max_model_len, gpu_share=share)


def weight_wire(prepared: Prepared, folder: RunFolder) -> Wire:
    """Return the settings of weight transfers in this run."""
    config, section = prepared.config, prepared.config.weights
    name = transport_of(config, prepared.device)
    return Wire(
        transport=name,
        bucket_bytes=section.weight_broadcast_bucket_mb * 2**20,
        workers_per_server=config.inference.processes_per_server,
        is_staged=section.weight_broadcast_staging != "none" or load_transport(name).is_stored,
        folder=str(folder.path.absolute() / "weights"),
        model=config.model.model,
    )


def threads_of(prepared: Prepared) -> int:
    """Return the number of threads of each trainer rank on CPU."""
    return max(1, int(prepared.config.ray.ray_trainer_cpus_per_worker))


def transport_of(config: TrainConfig, device: Device) -> str:
    """Return the name of the transport between ranks and servers on `device`."""
    name = config.weights.weight_transport
    if name != AUTO_TRANSPORT:
        return name
    if device != "cuda":
        return "gloo"
    return "ipc" if config.inference.shares_gpu else "nccl"
