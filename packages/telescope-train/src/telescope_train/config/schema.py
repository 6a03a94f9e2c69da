"""Every setting of `telescope train`: names, types, ranges and what each is for.

Which settings fit together is decided in `checks`. A leaf name is unique over all sections,
so that it can be given without its section. Each field here is read somewhere in the trainer.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from telescope_train.config.algorithm_section import AlgorithmSection
from telescope_train.config.fields import (
    Count,
    Dtype,
    Index,
    NotNegative,
    Port,
    Positive,
    Section,
)
from telescope_train.config.trainer_section import TrainerSection


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("expected letters, digits, '.', '_' and '-', a letter or digit first")
    return name


class RunSection(Section):
    """What the run is called, where it is written and how long it is."""

    name: Annotated[str, AfterValidator(_plain_name)]
    """Name of the run and of its folder under `output_dir`: letters, digits, `.`, `_`, `-`."""
    output_dir: str = "runs"
    """Folder that holds the run folders."""
    seed: Index = 0
    """Seeds the order of examples and every random generator of the trainer."""
    number_of_steps: Count
    """Batches that are sampled, trained on and published."""
    debug: bool = False
    """Write debug messages to the logs of every process."""


class ModelSection(Section):
    """The model that is trained."""

    model: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face model, or its id on the Hugging Face Hub."""
    model_dtype: Dtype = "float32"
    """Type of the weights that the optimizer updates."""
    mixed_precision_dtype: Dtype | None = None
    """Type used in forward and backward; null = bfloat16 on CUDA, float32 on CPU."""
    chat_template: str | None = None
    """Jinja file that replaces the chat template of the model's tokenizer, or the name of a
    shipped one: `chatml-keeps-thinking`."""
    enable_thinking: bool | None = None
    """Tell a chat template that asks for it whether the model is to think; null = do not say."""
    tool_call_parser: str = "auto"
    """How tool calls are read from what is sampled: `auto` sees it from the chat template; `none`
    leaves them in the text."""
    reasoning_parser: str = "auto"
    """How thinking is told from the answer: `auto` sees it from the chat template; `none` leaves
    it in the text."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class EnvironmentEntry(Section):
    """One environment to train on; absent overrides take the value of `[rollout]`."""

    name: Annotated[str, Field(min_length=1)]
    """Installed id with an optional `@version`, or `module:Class`."""
    weight: float = 1.0
    """Share of the prompts relative to the other environments; above 0."""
    reward_min: float | None = None
    """Reward that counts as 0; given together with `reward_max`."""
    reward_max: float | None = None
    """Reward that counts as 1."""
    group_size: Count | None = None
    """Rollouts per prompt."""
    max_tokens: Count | None = None
    """Tokens the policy may write per turn."""
    temperature: NotNegative | None = None
    """Sampling temperature."""
    env: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""
    env_workers: Count | None = None
    """Processes that play it."""
    env_addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; none is started here then."""


class RolloutSection(Section):
    """How prompts are turned into rollouts."""

    group_size: Count = 8
    """Rollouts per prompt; their rewards are compared with one another."""
    prompts_batch_size_for_trainer: Count = 16
    """Groups in one optimizer step."""
    temperature: NotNegative = 1.0
    """Sampling temperature; above 0."""
    max_tokens: Count = 256
    """Tokens the policy may write per turn."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn."""
    interleaved_rollouts: bool = True
    """Reuse the sampled token ids of earlier turns; false = tokenize every prompt anew."""
    rollout_timeout_s: Positive = 300.0
    """Seconds a rollout may take, rewards included; then it counts as failed."""
    env_workers: Count = 1
    """Processes that play each environment."""
    env_isolation: Literal["auto", "process", "none"] = "auto"
    """Where environments run: in processes of their own, or in the driver; `auto` = installed ones
    in processes, `module:Class` in the driver."""
    env_memory_limit_mb: Annotated[int, Field(ge=64)] | None = None
    """Memory of one environment process, MiB; null = what the machine has."""
    discard_group_zero_advantage: bool = True
    """Leave out groups whose rollouts all got the same reward; they carry no gradient."""
    should_accept_fn: str | None = None
    """`has_signal`, or `module:function`: judges each group; new draws replace rejected ones."""


class SchedulingSection(Section):
    """How far sampling may run ahead of training."""

    max_async_rollout: Index = 1
    """Steps that sampling may be ahead; 0 = exactly synchronous."""
    in_flight_update: Literal["continue", "pause"] = "continue"
    """What running requests do while weights change: go on, or wait for the new weights."""
    max_concurrent_prompts_per_server: Count = 32
    """Groups in flight on one inference server."""


class InferenceSection(Section):
    """The vLLM servers that write rollouts."""

    inference_num_workers: Count = 1
    """Servers; one per GPU where there are GPUs."""
    inference_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address the servers listen on."""
    inference_base_port: Port = 8100
    """Port of the first server; the others take the ports after it."""
    gateway_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of this machine at which programs of environments reach the model."""
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the same; 0 = a free one."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM may use; without a GPU it has no meaning."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer together; null = the smaller of `seq_len` and the model's own."""
    max_num_seqs: Count = 256
    """Requests one server works on at a time."""


class WeightsSection(Section):
    """How new weights reach the servers."""

    weight_transport: str = "auto"
    """Name of an installed transport; `auto` takes the fastest that this machine can use."""


class CheckpointSection(Section):
    """When and where the state of the run is saved, and what a run continues from."""

    checkpoint_every: Index = 0
    """Steps between checkpoints; 0 = only at the end."""
    checkpoint_dir: str | None = None
    """Folder for checkpoints, one folder per run in it; null = `checkpoints` in the run folder."""
    checkpoint_save_training_state: bool = True
    """Save all that a run needs to continue; false = weights alone, for `telescope export`."""
    checkpoint_keep_last: Count | None = None
    """Newest checkpoints to keep while the run goes on; null = all of them."""
    checkpoint_keep_every: Count | None = None
    """Keep the checkpoints of steps that are a multiple of this as well."""
    resume_from_checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """Checkpoint to continue from: its folder, or `latest` for this run's newest."""
    allow_changed_environments: bool = False
    """Continue with other code of an environment than the run had; its rewards may not compare."""


class EvalEntry(Section):
    """One held-out evaluation."""

    name: Annotated[str, Field(min_length=1)]
    """Environment whose held-out examples are used: installed id, or `module:Class`."""
    eval_every: Index = 0
    """Steps between evaluations during training; 0 = none."""
    num_samples: Count = 64
    """Held-out examples."""
    separate_eval_samples: bool = False
    """Keep these examples, by their ids, out of training; an environment without an eval split
    gives its first training examples."""
    rollouts: Count = 4
    """Rollouts per example."""
    pass_k: Annotated[tuple[Count, ...], Field(min_length=1)] = (1,)
    """Values of k to report pass@k for; none above `rollouts`."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0 = greedy."""
    max_tokens: Count | None = None
    """Tokens the policy may write per turn; null = as in `[rollout]`."""
    env: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment itself."""
    env_addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; none is started here then."""


class EvalsSection(Section):
    """What is measured on held-out examples, and when."""

    eval_before_training: bool = False
    """Run every evaluation with the initial weights."""
    eval_after_training: bool = False
    """Run every evaluation with the final weights."""
    evals: tuple[EvalEntry, ...] = ()
    """The evaluations; `[[evals]]` at the top of a file is the same list."""


class RaySection(Section):
    """The cluster that the processes are placed on."""

    ray_address: str | None = None
    """Address of a running Ray cluster; null = start one on this machine."""
    ray_placement_timeout_s: Positive = 300.0
    """Seconds to wait for the cluster to have room."""
    ray_inference_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each inference server; without a GPU, also the threads it computes with."""
    ray_trainer_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each trainer process, and the threads it computes with on a CPU."""


class TrainConfig(Section):
    """All settings of one run, by section."""

    run: RunSection
    model: ModelSection
    environments: Annotated[tuple[EnvironmentEntry, ...], Field(min_length=1)]
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    scheduling: SchedulingSection = Field(default_factory=SchedulingSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    weights: WeightsSection = Field(default_factory=WeightsSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evals: EvalsSection = Field(default_factory=EvalsSection)
    ray: RaySection = Field(default_factory=RaySection)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, where no minibatch is left empty."""
        section = self.algorithm
        return self.run.number_of_steps * section.number_of_minibatches * section.ppo_epochs
