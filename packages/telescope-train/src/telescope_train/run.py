"""`run_training`: one run from a checked config to a summary, on processes placed by Ray."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

from telescope_core.collector import rare_collections
from telescope_core.errors import ConfigError, ProcessDiedError, TelescopeError
from telescope_core.protocols import EnvironmentClient
from telescope_core.records import RunFolder
from telescope_core.reports.train_report import write_train_report
from telescope_core.types import WeightVersion
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.chat.probe import probe_template
from telescope_train.chat.renderer import Renderer, load_renderer
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.checkpoints.resume import ResumePoint, open_run_folder, resume_point
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.cluster.ray_cluster import Bundle, placed, ray_cluster, reserve
from telescope_train.cluster.supervision import supervised
from telescope_train.config.schema import TrainConfig
from telescope_train.diagnostics.engine_check import check_engine
from telescope_train.diagnostics.step_rules import diagnoses
from telescope_train.evals.live import AFTER, BEFORE, LiveEvals
from telescope_train.gateway import Gateway
from telescope_train.inference.fleet import ServerGroup, server_settings
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.recorded import RecordedEnvironment
from telescope_train.inference.server import SERVED_MODEL_NAME, STARTUP_DEADLINE_S, ServerSettings
from telescope_train.loop import LoopParts, train
from telescope_train.models.device import compute_dtype, machine_device
from telescope_train.models.facts import read_model_facts
from telescope_train.observability.terminal import LiveView, print_resume, print_summary
from telescope_train.plan.plan import make_plan, max_model_len
from telescope_train.rollouts.environments import OpenedEnvironments, open_environments
from telescope_train.rollouts.mix import Mix, make_sampler, training_environments
from telescope_train.rollouts.sampler import RolloutSampler
from telescope_train.step.credit import CreditRules, RewardRange
from telescope_train.step.throughput import Machine
from telescope_train.summary import make_summary
from telescope_train.trainer.ranks import RayRanks
from telescope_train.weights.publish import WeightPublisher


def run_training(config: TrainConfig) -> dict[str, Any]:
    """Train as `config` says and return the summary, which the run folder holds too.

    Raises before anything is written when the config cannot work on this machine; a failure
    later marks the run folder as failed and leaves everything in it readable.
    """
    plan = make_plan(config)
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    environments = open_environments(config)
    point = resume_point(config)
    folder = open_run_folder(config, point)
    if point is not None:
        print_resume(point.checkpoint.step, str(point.checkpoint.path), point.changed)
    run = _Run(config, folder, environments, point)
    try:
        cluster = ray_cluster(config.ray, run.bundles(), debug=config.run.debug)
        with cluster, rare_collections():
            asyncio.run(run.main())
    except BaseException as error:
        folder.fail(_reason(error))
        raise
    summary = make_summary(config, folder)
    folder.write_summary(summary)
    folder.finish()
    write_train_report(folder)
    print_summary(summary)
    return summary


class _Run:
    """What one run holds while it lasts."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        environments: OpenedEnvironments,
        point: ResumePoint | None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.opened = environments.clients
        self.environments = _recorded(environments.training)
        self.eval_environments = _recorded(environments.evals)
        self.checkpoint = point.checkpoint if point is not None else None
        self.device = machine_device()
        self.facts = read_model_facts(config.model.model)
        self.max_model_len = max_model_len(config, self.facts)

    def bundles(self) -> list[Bundle]:
        """Return what each process needs: servers first, then trainer ranks."""
        ray, gpus = self.config.ray, 1 if self.device == "cuda" else 0
        servers = self.config.inference.inference_num_workers
        ranks = self.config.trainer.trainer_num_workers
        return [Bundle(cpus=ray.ray_inference_cpus_per_worker, gpus=gpus)] * servers + [
            Bundle(cpus=ray.ray_trainer_cpus_per_worker, gpus=gpus)
        ] * ranks

    async def main(self) -> None:
        """Start everything, train, save, and end everything whatever happens."""
        names = [entry.name for entry in self.config.environments]
        async with AsyncExitStack() as stack:
            before = self.folder.metrics() if self.checkpoint is not None else ()
            view = stack.enter_context(
                LiveView(self.config.run.number_of_steps, names, rows_before=before)
            )
            renderer = self._renderer(view)
            view.phase("starting inference servers and trainer ranks")
            gateway = Gateway(
                model=SERVED_MODEL_NAME,
                host=self.config.inference.gateway_host,
                port=self.config.inference.gateway_port,
            )
            await gateway.start()
            stack.push_async_callback(gateway.close)
            servers, ranks = self._start_processes()
            stack.push_async_callback(servers.close)
            await asyncio.gather(
                supervised(servers.wait_until_healthy(STARTUP_DEADLINE_S), [servers.watch()]),
                ranks.open(BackendSettings.from_config(self.config), num_threads=self._num_threads),
            )
            pool = ServerPool(servers.base_urls)
            stack.push_async_callback(pool.close)
            for client in self.opened:
                stack.push_async_callback(client.close)
            policies = TokenPolicySource(
                pool,
                renderer,
                max_model_len=self.max_model_len,
                interleaved=self.config.rollout.interleaved_rollouts,
                gateway=gateway,
            )
            await supervised(
                self._train(view, pool, ranks, policies), [servers.watch(), ranks.watch()]
            )

    def _renderer(self, view: LiveView) -> Renderer:
        """Load tokenizer and chat template; show and write down what it does to sampled turns."""
        renderer = load_renderer(self.config.model)
        report = probe_template(renderer)
        view.phase(report.text)
        self.folder.note_chat_template(report.row())
        return renderer

    def _start_processes(self) -> tuple[ServerGroup, RayRanks]:
        bundles = self.bundles()
        room = reserve(bundles, deadline_s=self.config.ray.ray_placement_timeout_s)
        places = [placed(room, index, bundle) for index, bundle in enumerate(bundles)]
        num_servers = self.config.inference.inference_num_workers
        settings = server_settings(self._first_server(), num_servers=num_servers)
        return (
            ServerGroup.start(settings, places[:num_servers]),
            RayRanks.start(
                places[num_servers:], sharing=self.config.trainer.fsdp_context_parallel_size
            ),
        )

    def _first_server(self) -> ServerSettings:
        inference, model = self.config.inference, self.config.model
        transport = self.config.weights.weight_transport
        return ServerSettings(
            model_path=model.model,
            host=inference.inference_host,
            port=inference.inference_base_port,
            log_path=(self.folder.logs_path / "inference-0.log").absolute(),
            device=self.device,
            num_threads=max(1, int(self.config.ray.ray_inference_cpus_per_worker)),
            dtype=self._compute_dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=inference.max_num_seqs,
            gpu_memory_utilization=inference.gpu_memory_utilization,
            weight_transport="gloo" if transport == "auto" else transport,
            trust_remote_code=model.trust_remote_code,
        )

    @property
    def _compute_dtype(self) -> str:
        return compute_dtype(self.config.model.mixed_precision_dtype, self.device)

    @property
    def _hidden_size(self) -> int:
        return self.facts.hidden_size or 1024

    @property
    def _num_threads(self) -> int:
        return max(1, int(self.config.ray.ray_trainer_cpus_per_worker))

    async def _train(
        self, view: LiveView, pool: ServerPool, ranks: RayRanks, policies: TokenPolicySource
    ) -> None:
        config = self.config
        publisher = WeightPublisher(pool, ranks, in_flight=config.scheduling.in_flight_update)
        await publisher.connect()
        mix = await training_environments(config, self.environments, self.eval_environments)
        evals = LiveEvals(
            config=config,
            environments=self.eval_environments,
            policies=policies,
            folder=self.folder,
            concurrency=config.inference.max_num_seqs,
        )
        first_version = await self._restore(ranks, publisher)
        packing = self._packing(mix, ranks)
        await self._prove(view, ranks, policies, mix, packing)
        if config.evals.eval_before_training and not first_version:
            await evals.run(config.evals.evals, BEFORE, on_progress=view.phase)
        sampler = make_sampler(config, mix, policies, num_servers=len(pool.clients))
        parts = LoopParts(
            config=config,
            rules=self._credit_rules(mix),
            packing=packing,
            sampler=sampler,
            trainer=ranks,
            publisher=publisher,
            folder=self.folder,
            machine=Machine(
                facts=self.facts,
                seq_len=config.trainer.seq_len,
                hidden_size=self._hidden_size,
                gpu_name=ranks.gpu_name,
                ranks_per_shard=config.trainer.fsdp_context_parallel_size,
            ),
            first_version=first_version,
        )
        checkpointer = self._checkpointer(ranks, sampler)
        said: set[str] = set()

        async def after_step(step: int, row: dict[str, float]) -> None:
            view.update(row)
            for metric, diagnosis in diagnoses(row).items():
                if metric not in said:
                    said.add(metric)
                    view.note(f"{metric}: {diagnosis}")
            await evals.run(evals.due(step), f"step-{step}", on_progress=view.phase)
            await checkpointer.after_step(step)

        view.phase("training")
        try:
            await train(parts, after_step=after_step)
            view.phase("saving the checkpoint")
            await checkpointer.finish(config.run.number_of_steps)
        finally:
            await checkpointer.close()
            await sampler.close()
        if config.evals.eval_after_training:
            await evals.run(config.evals.evals, AFTER, on_progress=view.phase)

    def _packing(self, mix: Mix, ranks: RayRanks) -> Packing:
        return Packing(
            seq_len=self.config.trainer.seq_len,
            num_ranks=ranks.num_ranks,
            hidden_size=self._hidden_size,
            max_tokens=max(one.sampling.max_tokens for one in mix.playing.values()),
        )

    async def _prove(
        self,
        view: LiveView,
        ranks: RayRanks,
        policies: TokenPolicySource,
        mix: Mix,
        packing: Packing,
    ) -> None:
        """Run the last self-test, show all of them and write them down."""
        sampling = {name: one.sampling for name, one in mix.playing.items()}
        agreement = await check_engine(
            policies, sampling, packing, ranks.logprobs, dtype=self._compute_dtype
        )
        tests = [*ranks.self_tests, agreement]
        view.phase("self-tests passed: " + ", ".join(test.text for test in tests))
        self.folder.write_self_tests([asdict(test) for test in tests])

    def _credit_rules(self, mix: Mix) -> CreditRules:
        return CreditRules(
            algorithm=load_algorithm(self.config.algorithm.algorithm),
            config=self.config,
            sampling={name: one.sampling for name, one in mix.playing.items()},
            vocab_size=self.facts.vocab_size or len(load_tokenizer(self.config.model.model)),
            declared={
                name: RewardRange(one.reward_min, one.reward_max)
                for name, one in mix.descriptions.items()
            },
        )

    async def _restore(self, ranks: RayRanks, publisher: WeightPublisher) -> WeightVersion:
        """Give ranks and servers the weights to begin with; returns their version."""
        if self.checkpoint is None:
            return 0
        await ranks.load_checkpoint(self.checkpoint.state_path.absolute())
        await publisher.publish(self.checkpoint.step)
        return self.checkpoint.step

    def _checkpointer(self, ranks: RayRanks, sampler: RolloutSampler) -> Checkpointer:
        """Put the sampler where the checkpoint left it; returns what saves the run."""
        # As noted when the run began: telescope.lock may have changed under it since.
        saved = replace(SavedRun.of(self.config), environments=self.folder.info().environments)
        if self.checkpoint is None:
            return Checkpointer(saved, ranks, sampler)
        sampler.restore(self.checkpoint.sampler_state())
        return Checkpointer(saved, ranks, sampler, resumed_from=self.checkpoint.path)


def _recorded(clients: Mapping[str, EnvironmentClient]) -> dict[str, EnvironmentClient]:
    return {name: RecordedEnvironment(client) for name, client in clients.items()}


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, TelescopeError):
        kind = "a process died" if isinstance(error, ProcessDiedError) else "stopped"
        return f"{kind}: {error}"
    return f"{type(error).__name__}: {error}"
