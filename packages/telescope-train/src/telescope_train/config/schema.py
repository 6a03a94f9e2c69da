"""Every setting of `telescope train`: its name, type, range and description.

`telescope_train.plan.checks` decides which settings fit together. A leaf name is unique over all
sections, so it can be given without its section. Each field here is read somewhere in the trainer.
"""

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, JsonValue

from telescope_train.config.algorithm_section import AlgorithmSection
from telescope_train.config.fields import (
    Count,
    Dtype,
    Host,
    Index,
    NotNegative,
    Positive,
    Ratio,
    Section,
)
from telescope_train.config.inference_section import InferenceSection, WeightsSection
from telescope_train.config.trainer_section import MegatronSection, TrainerSection

Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Nodes for processes of a kind: few, many, one for all, or a separate one for each."""

EVAL_SAMPLES = 64
"""Most examples of an eval that does not say how many it plays."""


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("expected letters, digits, '.', '_' and '-', with a letter or digit first")
    return name


class RunSection(Section):
    """The name of the run, its folder and its length."""

    name: Annotated[str, AfterValidator(_plain_name)]
    """Name of the run and of its folder in `output_dir`: letters, digits, `.`, `_` and `-`."""
    output_dir: Annotated[str, Field(min_length=1)] = "runs"
    """Folder that holds the run folders."""
    seed: Index = 0
    """Seed of the order of examples and of every random generator of the trainer."""
    number_of_steps: Count
    """Number of batches to sample and train on; new weights are published after each."""
    debug: bool = False
    """Write debug messages to the logs: each draw, request, rollout, state of a server, and
    transfer of weights. Ray's own messages are shown too."""


class ModelSection(Section):
    """The model that is trained."""

    model: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face model, or its id on the Hugging Face Hub."""
    model_dtype: Dtype = "float32"
    """Type of the weights that the optimizer updates."""
    mixed_precision_dtype: Dtype | None = None
    """Type used in forward and backward passes; null = bfloat16 on CUDA, float32 on CPU."""
    fp32_lm_head: bool = True
    """Compute logits in float32 where layers compute in less, in the trainer and in the servers;
    false = round them to the type of the layers."""
    chat_template: str | None = None
    """Replacement of the chat template of the model's tokenizer: a Jinja file, the text of a
    template, or a shipped one by name: `chatml-keeps-thinking` or `deepseek-r1-keeps-thinking`."""
    enable_thinking: bool | None = None
    """Value of `enable_thinking` for chat templates that read it: whether the model should think;
    null = the template's default."""
    tool_call_parser: str = "auto"
    """Parser of the tool calls in sampled text; `auto` chooses it by the chat template, `none`
    leaves calls in the text."""
    reasoning_parser: str = "auto"
    """Parser that separates thinking from the answer; `auto` chooses it by the chat template,
    `none` leaves thinking in the text."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class EnvironmentEntry(Section):
    """One environment to train on; settings that are left out take the value of `[rollout]`."""

    name: Annotated[str, Field(min_length=1)]
    """Installed id with an optional `@version`, `file.py:Class`, `module:Class`, or a folder."""
    weight: float = 1.0
    """Share of the prompts relative to the other environments; above 0."""
    split: Literal["train", "eval"] = "train"
    """Examples to train on; `eval` = those that evals play, to see whether the reward rises even
    there. What such evals show is not held out."""
    reward_min: float | None = None
    """Reward that is scaled to 0; set it together with `reward_max`."""
    reward_max: float | None = None
    """Reward that is scaled to 1; set it together with `reward_min`."""
    group_size: Count | None = None
    """Rollouts per prompt."""
    max_tokens: Count | None = None
    """Tokens the policy may write per turn."""
    temperature: NotNegative | None = None
    """Sampling temperature."""
    env: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""
    env_workers: Count | None = None
    """Worker processes for this environment."""
    env_addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; if given, no worker is started here."""


class RolloutSection(Section):
    """The settings by which prompts become rollouts."""

    group_size: Count = 8
    """Rollouts per prompt; their rewards are compared with one another."""
    prompts_batch_size_for_trainer: Count = 16
    """Groups in the batch of one step."""
    temperature: NotNegative = 1.0
    """Sampling temperature; above 0."""
    max_tokens: Count = 256
    """Tokens the policy may write per turn."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn."""
    include_stop_str_in_output: bool = True
    """Leave the stop text that ended a turn in the answer, as it was sampled, so that the history
    of later turns is what was sampled; false = cut it off, as chat endpoints do."""
    interleaved_rollouts: bool = True
    """Reuse the sampled token ids of earlier turns; false = tokenize every prompt again."""
    seed_sampling: bool = False
    """Give each request a seed that follows from `seed` and its place in the run, so that equal
    weights sample equal tokens; the engine then draws for one request at a time, which is
    slower. Gradients are then added in one order too, see `stream_gradients`."""
    rollout_timeout_s: Positive = 300.0
    """Seconds that a rollout may take; one that is still being played then is scored as it stands,
    and trained on only without `filter_timeout`."""
    env_workers: Count = 1
    """Worker processes for each environment."""
    env_isolation: Literal["auto", "process", "none"] = "auto"
    """Processes of environments: `auto`, `process` = separate ones, which can be ended if their
    code does not return; `none` = the driver, which is ended if their code blocks the
    interpreter."""
    env_memory_limit_mb: Annotated[int, Field(ge=64)] | None = None
    """Memory limit of one environment process, MiB; null = no limit but the machine's memory."""
    discard_group_zero_advantage: bool = True
    """Leave out groups whose rollouts all got the same reward, because the gradient of their
    rewards is 0. They then count in no denominator of the loss, nor for KL and entropy in it."""
    should_accept_fn: str | None = None
    """`has_signal`, or `module:function`: judges each group; new draws replace rejected ones."""


class SchedulingSection(Section):
    """The lead of sampling over training, and the order of rollouts."""

    max_async_rollout: Index = 1
    """Steps that sampling may be ahead of training; 0 = exactly synchronous."""
    in_flight_update: Literal["pause", "continue", "abort"] = "pause"
    """Running requests when weights change: `pause` = they stop, compute their tokens again with
    the new weights, and continue, `continue` = they continue without that, and their log-probs come
    from mixed weights, `abort` = they are ended and sent again from where they were."""
    stream_gradients: Literal["auto"] | bool = "auto"
    """Train on finished groups while the rest of their batch is still being sampled, and take the
    optimizer step when it is complete; `auto` = unless a setting needs the whole batch first, or
    `seed_sampling` an order of the groups that does not depend on which ends first."""
    max_off_policy_steps: Annotated[int, Field(ge=-1)] = 8
    """Weight updates by which any token may be behind the weights that train it: a rollout beyond
    is stopped at once and played again in its place; -1 = no bound."""
    batch_order: Literal["drawn", "finished"] = "drawn"
    """Groups of a step: `drawn` = exactly those that were drawn for it, `finished` = those that
    ended first. The second waits for no straggler, and trains on short answers earlier than on long
    ones."""
    max_concurrent_prompts_per_server: Count = 32
    """Most groups for which an inference server works at the same time, counted in rollouts. A new
    group goes to the server with the fewest requests, and later turns go where their prefix is,
    unless that server is full."""
    enable_individual_sample_lanes: bool = True
    """Give each rollout a slot of its own; false = a slot for each group, whose rollouts begin
    together and which is free when all of them are."""
    free_lane_after_generation: bool = True
    """Hold a slot for each model call only, so that tools and rewards hold none; false = to the end
    of the rollout."""
    follow_kv_cache_use: bool = True
    """Work on fewer rollouts than `max_concurrent_prompts_per_server` allows while the cache of the
    servers has no room for more, so that they do not have to compute a rollout twice."""
    enable_prompt_prefetch: bool = True
    """Draw, render and tokenize prompts ahead of their turn."""
    prompt_prefetch_buffer_size: Count = 24
    """Prompts that are ready ahead of their turn."""
    max_open_rollouts: Count | None = None
    """Most rollouts that have begun and not ended, those included that are with their environment;
    null = 4 for each slot. With a slot for each group, at least the largest `group_size`."""


class CheckpointSection(Section):
    """Checkpoints: when and where they are saved, and from which one a run continues."""

    checkpoint_every: Index = 0
    """Steps between checkpoints; 0 = only at the end, so that a run that is killed cannot go on."""
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder for checkpoints, with one folder per run; null = `checkpoints` in the run folder."""
    checkpoint_save_training_state: bool = True
    """Save everything that a run needs to continue; false = weights alone, to export."""
    checkpoint_keep_last: Count | None = None
    """Number of the newest checkpoints to keep during the run, beside which `final` is kept too;
    null = all of them."""
    checkpoint_keep_every: Count | None = None
    """Also keep the checkpoints of steps that are a multiple of this."""
    resume_from_checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """Checkpoint to continue from: its folder, or `latest` for this run's newest."""
    resume_if_saved: bool = False
    """Go on from this run's newest checkpoint if it has one, else begin as without this setting,
    in the folder of the earlier try: for queues, which repeat one command."""
    allow_changed_environments: bool = False
    """Continue although an environment's code has changed; its rewards may not be comparable."""


class EvalEntry(Section):
    """One evaluation, on held-out examples by default."""

    name: Annotated[str, Field(min_length=1)]
    """Environment whose examples are used: named as in `[[environments]]`."""
    split: Literal["train", "eval"] = "eval"
    """Examples to play; `train` = those of training, which are not held out unless
    `separate_eval_samples` keeps them out of it."""
    eval_every: Index = 0
    """Steps between evaluations during training; 0 = none."""
    num_samples: Count | None = None
    """Number of examples; null = 64, or all if there are fewer."""
    separate_eval_samples: bool = False
    """Keep these examples, by their ids, out of training; if the environment has no eval split,
    they are its first training examples."""
    rollouts: Count = 4
    """Rollouts per example."""
    pass_k: Annotated[tuple[Count, ...], Field(min_length=1)] = (1,)
    """Values of k for pass@k, and for k above 2 also for maj@k; none above `rollouts`."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the likeliest tokens whose probabilities sum to this; 1 = from all."""
    top_k: Count | None = None
    """Sample only from this many of the likeliest tokens; null = from all."""
    min_p: Ratio = 0.0
    """Sample no token less likely than this share of the likeliest one; 0 = sample any."""
    repetition_penalty: Positive = 1.0
    """Makes tokens that occurred before less likely; 1 = no penalty, below 1 = likelier."""
    max_tokens: Count | None = None
    """Tokens the policy may write per turn; null = as in `[rollout]`."""
    env: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""
    env_addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; if given, no worker is started here."""


class EvalsSection(Section):
    """Evaluations on held-out examples, and their times."""

    eval_before_training: bool = False
    """Run every evaluation with the initial weights."""
    eval_after_training: bool = False
    """Run every evaluation with the final weights."""
    eval_num_servers: Index = 0
    """Number of the `inference_num_workers` servers that sample only evals while the run
    trains; evals before and after training use every server. 0 = evals share the servers with
    rollouts, and new weights wait until an evaluation has ended."""
    evals: tuple[EvalEntry, ...] = ()
    """The evaluations; `[[evals]]` at the top of a file is the same list."""


class ObservabilitySection(Section):
    """Meters, traces, and access to them."""

    system_metrics_collection_interval_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two readings of the meters of nodes, GPUs and inference servers; 0 = they are
    not read."""
    record_token_facts: bool = True
    """Write what the trainer finds of each token that it trains on beside the rollouts of the step:
    its log-prob, the entropy, and how hard it was pushed. It takes 5 to 8 bytes on disk per
    token."""
    track_gpu_events: bool = True
    """Time the parts of a step on a GPU by events in its stream, so that they are as long as they
    were there. Without, the timeline has no parts of a step on a GPU but those that wait for it."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port at which Prometheus finds metrics and meters; 0 = a free one, which is shown at the
    start; null = none."""
    prometheus_host: Host = "127.0.0.1"
    """Address of this machine at which Prometheus finds them: whoever reaches it can read them."""
    otlp_export_endpoint: Annotated[str, Field(pattern=r"^https?://.+")] | None = None
    """Collector that gets the spans of rollouts and model calls, and with `enable_vllm_tracing`
    those of servers, as OTLP over HTTP: its whole address, such as http://localhost:4318/v1/traces;
    null = none."""
    use_wandb: bool = False
    """Send metrics, settings, meters and some rollouts to Weights & Biases; offline with
    WANDB_MODE=offline."""
    wandb_project: Annotated[str, Field(min_length=1)] = "telescope"
    """Project there; the run is called there as it is here."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run there."""
    wandb_upload_logs: bool = True
    """With `use_wandb`: send the logs of all processes, compressed, every few minutes and at the
    end of the run, without debug messages."""
    wandb_upload_logs_detailed: bool = False
    """With `use_wandb`: write debug messages to the logs, as with `debug`, and send them too."""
    wandb_upload_logs_stdout: bool = False
    """With `use_wandb`: send what inference servers and environment workers print with the logs. It
    may hold what their code prints of rollouts."""
    use_tensorboard: bool = False
    """Write metrics, meters and some rollouts to `tensorboard` in the run folder."""
    trackers: tuple[str, ...] = ()
    """Further installed trackers, by the names of their entry points (`telescope.trackers`), such
    as trackio."""


class RaySection(Section):
    """The cluster on which the processes are placed."""

    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running Ray cluster; null = start one of the run's own on this machine, whatever
    other clusters are there."""
    ray_runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of all processes, such as `{ env_vars = { HF_HOME = "/data" } }`:
    processes on other nodes do not have the variables of this one."""
    ray_inference_placement_strategy: Strategy = "PACK"
    """Nodes of the servers: `PACK` = few, `SPREAD` = many, `STRICT_PACK` = one for all,
    `STRICT_SPREAD` = a separate one for each."""
    ray_trainer_placement_strategy: Strategy = "PACK"
    """Nodes of the trainer processes, likewise; ranks are numbered by node and GPU."""
    ray_environment_placement: Literal["driver"] | Strategy = "driver"
    """Place of the environment processes: `driver` = this machine, or nodes of the cluster,
    likewise. Then each node needs the environments installed, and the secrets that they declare in
    the variables of its Ray."""
    ray_placement_timeout_s: Positive = 300.0
    """Seconds in which a cluster that has no room, or does not start a process, may do nothing
    else for the run, at the start and after the loss of a node. A cluster of the run's own never
    gets more room, so nothing is waited for there."""
    worker_progress_timeout_s: Positive = 1800.0
    """Seconds without any progress after which a trainer process counts as dead. A call may take
    any time as long as batches, weights or files make progress."""
    max_trainer_restarts: Index = 3
    """Consecutive restarts of trainer processes that died, from the newest checkpoint, before the
    run ends; a completed step resets the count. 0 = the run ends at once."""
    ray_inference_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each inference server; without a GPU, also its number of threads."""
    ray_trainer_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each trainer process; without a GPU, also its number of threads."""
    ray_environment_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each environment process that is placed on the nodes of the cluster."""


class TrainConfig(Section):
    """All settings of one run, by section."""

    run: RunSection
    model: ModelSection
    environments: Annotated[tuple[EnvironmentEntry, ...], Field(min_length=1)]
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    scheduling: SchedulingSection = Field(default_factory=SchedulingSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    megatron: MegatronSection = Field(default_factory=MegatronSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    weights: WeightsSection = Field(default_factory=WeightsSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evals: EvalsSection = Field(default_factory=EvalsSection)
    observability: ObservabilitySection = Field(default_factory=ObservabilitySection)
    ray: RaySection = Field(default_factory=RaySection)

    @property
    def num_rollout_servers(self) -> int:
        """Servers that sample what is trained on: the first ones of the run."""
        others = self.inference.opponent_num_servers + self.evals.eval_num_servers
        return self.inference.inference_num_workers - others

    @property
    def largest_group(self) -> int:
        """Most rollouts that a group of any environment has."""
        return max(one.group_size or self.rollout.group_size for one in self.environments)

    @property
    def writes_debug(self) -> bool:
        """Whether debug messages are written: for a reader of the logs, or to be uploaded."""
        section = self.observability
        is_uploaded = section.use_wandb and section.wandb_upload_logs_detailed
        return self.run.debug or is_uploaded

    @property
    def num_optimizer_steps(self) -> int:
        """Number of optimizer steps of the run, if no minibatch is empty."""
        section = self.algorithm
        return self.run.number_of_steps * section.number_of_minibatches * section.ppo_epochs
