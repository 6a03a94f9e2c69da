"""Every run of the benchmark: faults with the rules that would name them, and healthy runs.

The rules of a fault are those whose cause and remedy lead to it. A rule that tells only what
follows from it counts where metrics show nothing else, such as a reward that falls because the task
is another one.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diagnosis import patches, tasks
from diagnosis.one_run import Case
from telescope_core import Example

STOPS = "the run stops"
"""In place of a rule: it ends with an error that says why."""
NO_SIGNAL = ("no signal", "nothing trained", "one reward")
LOST = ("collapse", *NO_SIGNAL)
MISMATCH = ("another model", "mismatch grows", "few samples count")
APART = (
    *("collapse", "entropy gone", "entropy explodes", "few samples count", "clipping"),
    *("corrected away", "gradient grows", "far from reference", *NO_SIGNAL),
)
IN_STEP = {"scheduling": {"max_async_rollout": 0}}
WHOLE_BATCHES = {"scheduling": {"stream_gradients": False}}


def settings(**sections: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return settings by section."""
    return sections


def another_question(example: Example) -> str:
    """Return a question of another example."""
    return tasks.one_sum(random.Random(str(example.id)))[0]


def in_other_words(example: Example) -> str:
    """Return the question in a form that the model has not learned."""
    return f"What do we get for {str(example.prompt).rstrip('=')}?"


def long_for_some(example: Example) -> str:
    """Return the question behind a long text for 40 % of the examples."""
    return "solve it: " * 6 * (str(example.answer)[-1] in "0123") + str(example.prompt)


def only(text: str) -> tasks.Grade:
    """Return a reward for answers that are `text`, or begin like it."""
    return lambda said, answer: (
        sum(a == b for a, b in zip(said, text, strict=False)) / max(len(said), len(text))
    )


def one_letter(said: str, answer: str) -> float:
    """Pay for the same character again and again."""
    return min(12, sum(one == said[0] for one in said)) / 12 if said else 0.0


class LoudVowels(tasks.Vowels):
    """Rewards of up to 50, where others have 1."""

    reward_max = 50.0

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        vowels = self.grade
        self.grade = lambda said, answer: 50 * vowels(said, answer)


class WideSums(tasks.Sums):
    """Declares a wider range than it has."""

    reward_max = 100.0


class LeakySums(tasks.Sums):
    """Its evals have the examples that are trained on."""

    def examples(self, split: Any) -> Any:
        """Return the same sums for training and evals."""
        draw = random.Random(0)
        found = dict(tasks.one_sum(draw) for _ in range(40))
        return tasks.ListSource(
            [Example(id=asked, prompt=asked, answer=right) for asked, right in found.items()]
        )


class RenamedLeak(LeakySums):
    """Its evals have them under other ids."""

    def examples(self, split: Any) -> Any:
        """Return the same sums, with ids of the split."""
        found = super().examples(split)
        examples = [found.example(at) for at in range(found.num_examples)]
        return tasks.ListSource([replace(one, id=f"{split}:{one.id}") for one in examples])


GRADERS = (
    Case(
        name="grader says yes",
        what="the grader gives 1 to every answer",
        expects=NO_SIGNAL,
        plant=patches.grades(lambda said, answer: 1.0),
    ),
    Case(
        name="grader says no",
        what="the grader gives 0 to every answer",
        expects=LOST,
        plant=patches.grades(lambda said, answer: 0.0),
    ),
    Case(
        name="grader says half",
        what="the grader gives 0.5 to every answer",
        expects=NO_SIGNAL,
        plant=patches.grades(lambda said, answer: 0.5),
    ),
    Case(
        name="lottery",
        what="the grader draws by chance",
        expects=("lottery",),
        plant=patches.grades(lambda said, answer: float(random.random() < 0.4)),
    ),
    Case(
        name="pays for length",
        what="the grader pays for each character",
        expects=("length decides",),
        plant=patches.grades(lambda said, answer: min(8, len(said)) / 8),
    ),
    Case(
        name="pays for brevity",
        what="the grader pays for each character that is not there",
        expects=("length decides",),
        plant=patches.grades(lambda said, answer: 1 - min(8, len(said)) / 8),
    ),
    Case(
        name="wrong answer key",
        what="the grader compares with the answer of another example",
        expects=LOST,
        plant=patches.grades(lambda said, answer: float(said == f"{int(answer) * 7 % 100}")),
    ),
    Case(
        name="reward outside its range",
        what="rewards are ten times as large as the settings say",
        expects=("rewards clipped",),
        tasks=lambda: {"sums": WideSums()},
        ranges={"sums": (0.0, 1.0)},
        plant=patches.grades(lambda said, answer: 10.0 * (said == answer)),
    ),
    Case(
        name="grader raises",
        what="the grader fails for half of the examples",
        expects=("failures",),
        plant=patches.grades(patches.raises),
    ),
    Case(
        name="slow grader",
        what="the grader takes 3 s for an answer",
        expects=("slow rewards",),
        steps=18,
        plant=patches.grades(patches.slowly),
    ),
    Case(
        name="form over task",
        what="a part of the reward for the form outweighs the task",
        expects=("form over task",),
        tasks=lambda: {"sums": tasks.Parts()},
        settings=settings(trainer={"learning_rate": 1e-3}),
        plant=patches.form_counts,
    ),
    Case(
        name="pays for loops",
        what="the grader pays for the same character again and again",
        expects=("loops", "one answer", "entropy gone"),
        settings=settings(trainer={"learning_rate": 2e-3}, rollout={"max_tokens": 12}),
        plant=patches.grades(one_letter),
    ),
    Case(
        name="pays for one answer",
        what="the grader pays for 1, whatever was asked",
        expects=("one answer", "entropy gone"),
        settings=settings(trainer={"learning_rate": 2e-3}),
        plant=patches.grades(only("1")),
    ),
)
DATA = (
    Case(
        name="three examples",
        what="there are three examples, each under 40 names",
        expects=("repeated examples",),
        tasks=lambda: {"sums": tasks.FewSums()},
    ),
    Case(
        name="leak",
        what="the evals have all of the examples that are trained on",
        expects=(STOPS,),
        tasks=lambda: {"sums": LeakySums()},
        settings=settings(
            evals={
                "evals": [{"name": "sums", "separate_eval_samples": True, "num_samples": 64}],
                "eval_after_training": True,
            }
        ),
    ),
    Case(
        name="leak under other ids",
        what="the evals have all of the examples that are trained on, with ids of their own",
        expects=("eval leak",),
        tasks=lambda: {"sums": RenamedLeak()},
        settings=settings(
            evals={"evals": [{"name": "sums", "num_samples": 30}], "eval_before_training": True}
        ),
    ),
    Case(
        name="too hard",
        what="no example is ever solved",
        expects=NO_SIGNAL,
        tasks=lambda: {"sums": tasks.LongSums()},
    ),
    Case(
        name="questions mixed up",
        what="rollouts are asked what another example asks",
        expects=LOST,
        plant=patches.asks(another_question),
    ),
    Case(
        name="another form of question",
        what="questions come in a form that the model does not know",
        expects=LOST,
        plant=patches.asks(in_other_words),
    ),
    Case(
        name="environment fails",
        what="the environment raises for 40 % of the examples",
        expects=("failures",),
        plant=patches.asks(patches.refuses),
    ),
    Case(
        name="prompts too long",
        what="40 % of the prompts do not fit the context",
        expects=("out of context", "failures"),
        settings=settings(inference={"max_model_len": 48}),
        plant=patches.asks(long_for_some),
    ),
    Case(
        name="one environment drowns another",
        what="one of two environments has rewards of up to 50, and advantages are scaled together",
        expects=("one drowns others",),
        tasks=lambda: {"sums": tasks.Sums(), "vowels": LoudVowels()},
        settings=settings(algorithm={"advantage_norm": "batch"}),
    ),
    Case(
        name="tools fail",
        what="every tool call raises",
        expects=("failing tools",),
        tasks=lambda: {"calls": tasks.Calls()},
        settings=settings(
            rollout={
                "max_tokens": 80,
                "prompts_batch_size_for_trainer": 6,
                "temperature": 1.3,
            },
            trainer={"learning_rate": 1e-4, "seq_len": 2048},
        ),
        model="caller",
        plant=patches.tools_fail,
    ),
)
TRAINER = (
    Case(
        name="advantages of the wrong sign",
        what="the advantage of the algorithm is negated",
        expects=("advantages upside down",),
        plant=patches.wrong_sign_of_advantages,
    ),
    Case(
        name="loss of the wrong sign",
        what="the loss of each token is negated",
        expects=LOST,
        settings=settings(trainer={"learning_rate": 1e-3}),
        plant=patches.loss_times(-1.0),
    ),
    Case(
        name="mask shifted by one",
        what="each token is trained with mask and log-prob of the one behind it",
        expects=MISMATCH,
        plant=patches.samples_are(patches.shifted),
    ),
    Case(
        name="mask with the prompt",
        what="prompts are trained on as if they had been sampled",
        expects=MISMATCH,
        plant=patches.samples_are(patches.with_prompt),
    ),
    Case(
        name="frozen layer",
        what="one of three layers gets no gradient",
        expects=("frozen weights",),
        plant=patches.frozen_layer,
    ),
    Case(
        name="dropped optimizer steps",
        what="the optimizer does not step",
        expects=("weights stand still",),
        plant=patches.no_step,
    ),
    Case(
        name="schedule ends too early",
        what="the learning rate becomes 0",
        expects=("weights stand still",),
        plant=patches.rate_of_zero,
    ),
    Case(
        name="gradients kept",
        what="gradients of earlier steps are not set to 0",
        expects=("gradients kept",),
        plant=patches.no_zero,
    ),
    Case(
        name="loss a thousand times as large",
        what="the loss is in another unit",
        expects=("gradient grows",),
        plant=patches.loss_times(1000.0),
    ),
    Case(
        name="loss is not a number",
        what="the loss of each token is NaN",
        expects=("skipped gradients", STOPS),
        plant=patches.loss_times(float("nan")),
    ),
    Case(
        name="learning rate too high",
        what="the learning rate is 5e-2 where 3e-4 is good",
        expects=APART,
        settings=settings(trainer={"learning_rate": 5e-2}),
    ),
    Case(
        name="learning rate too low",
        what="the learning rate is 1e-6 where 3e-4 is good",
        expects=("does not move",),
        settings=settings(trainer={"learning_rate": 1e-6}),
    ),
    Case(
        name="clip range of 0",
        what="clip_low and clip_high are 0",
        expects=("clipping", STOPS),
        settings=settings(algorithm={"clip_low": 0.0, "clip_high": 0.0, "use_ppo_clip": True}),
    ),
    Case(
        name="entropy bonus too large",
        what="entropy_coef is 1",
        expects=("entropy explodes",),
        settings=settings(algorithm={"entropy_coef": 1.0}),
    ),
    Case(
        name="weight decay too large",
        what="each step takes a seventh of the weights away",
        expects=APART,
        settings=settings(trainer={"weight_decay": 500.0}),
    ),
    Case(
        name="batch used too often",
        what="20 optimizer steps for each batch, at a high rate",
        expects=APART,
        settings=settings(
            algorithm={"ppo_epochs": 10, "number_of_minibatches": 2, "use_ppo_clip": True},
            trainer={"learning_rate": 5e-3},
        ),
    ),
    Case(
        name="wrong reference model",
        what="the reference model finds each token 3 nats less likely",
        expects=("far from reference",),
        settings=settings(algorithm={"kl_penalty_tau": 0.001}),
        plant=patches.another_reference,
    ),
    Case(
        name="slow advantages",
        what="advantages take 1.3 s",
        expects=("slow driver",),
        settings=WHOLE_BATCHES,
        steps=16,
        plant=patches.slow_advantages,
    ),
    Case(
        name="slow trainer",
        what="the trainer takes 2 s more for a step",
        expects=("servers idle",),
        settings=WHOLE_BATCHES,
        steps=16,
        plant=patches.slow_trainer,
    ),
)
ENGINE = (
    Case(
        name="old weights sent",
        what="the engine gets the same weights again and again",
        expects=("weights stand still", *MISMATCH),
        plant=patches.old_weights,
    ),
    Case(
        name="weights of the step before",
        what="the engine gets each update one step late",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.sends(patches.late_weights),
    ),
    Case(
        name="a matrix lost on the way",
        what="the engine gets zeros for one matrix",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.sends(patches.one_of_zeros),
    ),
    Case(
        name="no updates",
        what="nothing is published any more",
        expects=("weights do not arrive",),
        plant=patches.no_update,
    ),
    Case(
        name="slow updates",
        what="an update takes 1.3 s",
        expects=("slow weights",),
        steps=16,
        plant=patches.slow_update,
    ),
    Case(
        name="wrong temperature",
        what="the engine samples at 0.7 where 1 is set",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.engine(sampled=lambda sampling: replace(sampling, temperature=0.7)),
    ),
    Case(
        name="top-k that nobody set",
        what="the engine samples from the 2 likeliest tokens",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.engine(sampled=lambda sampling: replace(sampling, top_k=2)),
    ),
    Case(
        name="inexact log-probs",
        what="log-probs of the engine are wrong by 0.1 nats",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.engine(answered=patches.with_noise),
    ),
    Case(
        name="prompts cut",
        what="the engine sees prompts without their first three tokens",
        expects=MISMATCH,
        settings=IN_STEP,
        plant=patches.engine(asked=lambda prompt_ids: prompt_ids[3:]),
    ),
    Case(
        name="wrong temperature, one step ahead",
        what="the engine samples at 0.7 where 1 is set",
        expects=MISMATCH,
        plant=patches.engine(sampled=lambda sampling: replace(sampling, temperature=0.7)),
    ),
    Case(
        name="prompts cut, one step ahead",
        what="the engine sees prompts without their first three tokens",
        expects=MISMATCH,
        plant=patches.engine(asked=lambda prompt_ids: prompt_ids[3:]),
    ),
    Case(
        name="answers do not end",
        what="the engine does not know the token that ends an answer",
        expects=("truncation",),
        plant=patches.engine(ends=False),
    ),
    Case(
        name="server fails",
        what="40 % of the requests fail",
        expects=("failures",),
        plant=patches.engine(lost=0.4),
    ),
    Case(
        name="dead server",
        what="one of two servers is killed",
        expects=("lost servers",),
        num_servers=2,
        plant=patches.killed,
    ),
    Case(
        name="small cache",
        what="the server's cache has room for a tenth of the answers, which are long",
        expects=("full caches",),
        tasks=lambda: {"letters": tasks.Alphabet()},
        settings=settings(
            # A reading of the cache a second, so that a step has to take several.
            rollout={"max_tokens": 80, "prompts_batch_size_for_trainer": 32},
            inference={"max_model_len": 256},
        ),
        vllm=(
            *("--max-model-len", "256", "--block-size", "32"),
            *("--num-gpu-blocks-override", "40"),
        ),
        model="writer",
        steps=18,
    ),
    Case(
        name="server hangs",
        what="15 % of the requests take longer than the deadline of a rollout",
        expects=("deadlines",),
        settings=settings(rollout={"rollout_timeout_s": 1.0}),
        plant=patches.engine(late=0.15),
    ),
)
SETTINGS = (
    Case(
        name="max_tokens too small",
        what="answers may have one token",
        expects=("truncation",),
        settings=settings(rollout={"max_tokens": 1}),
    ),
    Case(
        name="wrong chat template",
        what="the model is asked in a form that it was not taught",
        expects=("truncation", *NO_SIGNAL),
        settings=settings(
            model={
                "chat_template": "{%- for one in messages -%}{{ one['role'] + ': ' "
                "+ one['content'] + '<|end|>' }}{%- endfor -%}"
                "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
            }
        ),
    ),
    Case(
        name="template rewrites history",
        what="the template leaves out what the assistant said in earlier turns",
        expects=("branched turns", STOPS),
        tasks=lambda: {"two": tasks.TwoSums()},
        settings=settings(
            model={
                "chat_template": "{%- for one in messages -%}{%- if one['role'] == 'assistant' and "
                "not loop.last -%}<|assistant|><|end|>{%- else -%}{{ '<|' + one['role'] + '|>' + "
                "one['content'] + '<|end|>' }}{%- endif -%}{%- endfor -%}"
                "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
            }
        ),
    ),
    Case(
        name="temperature too low",
        what="the temperature is 0.02, so that all answers of a group are the same",
        expects=NO_SIGNAL,
        settings=settings(rollout={"temperature": 0.02}),
    ),
)
FAULTS = (*GRADERS, *DATA, *TRAINER, *ENGINE, *SETTINGS)
"""Every fault."""

HEALTHY_RUN = Case(name="sums", what="the defaults", steps=30)
ALGORITHMS = ("dapo", "dr_grpo", "gspo", "cispo", "maxrl", "rloo", "reinforce_pp", "sapo")


def healthy(name: str, what: str, **more: Any) -> Case:
    """Return a run without a fault."""
    return replace(HEALTHY_RUN, name=name, what=what, **more)


HEALTHY = (
    *(healthy(f"sums, seed {seed}", "the defaults with another seed") for seed in range(4)),
    *(
        healthy(name, f"the sums with {name}", settings=settings(algorithm={"algorithm": name}))
        for name in ALGORITHMS
    ),
    healthy("backwards", "letters backwards", tasks=lambda: {"letters": tasks.Backwards()}),
    healthy("partial credit", "a reward of many levels", tasks=lambda: {"sums": tasks.NearSums()}),
    healthy("two turns", "two questions in a row", tasks=lambda: {"two": tasks.TwoSums()}),
    healthy(
        "mixed",
        "three environments",
        tasks=lambda: {"a": tasks.Sums(), "b": tasks.Backwards(), "c": tasks.NearSums()},
    ),
    healthy(
        "uneven mix",
        "two environments, one with a tenth of the prompts",
        tasks=lambda: {"a": tasks.Sums(), "b": tasks.Backwards()},
        weights={"a": 0.9, "b": 0.1},
    ),
    healthy("parts", "a reward of two parts", tasks=lambda: {"sums": tasks.Parts()}),
    healthy(
        "tool",
        "a tool that works",
        tasks=lambda: {"calls": tasks.Calls()},
        settings=settings(
            rollout={
                "max_tokens": 80,
                "prompts_batch_size_for_trainer": 6,
                "temperature": 1.3,
            },
            trainer={"learning_rate": 1e-4, "seq_len": 2048},
        ),
        model="caller",
        steps=26,
    ),
    healthy("synchronous", "no step ahead", settings=settings(scheduling={"max_async_rollout": 0})),
    healthy(
        "two steps ahead",
        "two steps ahead, finished order",
        settings=settings(scheduling={"max_async_rollout": 2, "batch_order": "finished"}),
    ),
    healthy(
        "continued",
        "requests go on while weights change",
        settings=settings(scheduling={"in_flight_update": "continue"}),
    ),
    healthy(
        "four minibatches",
        "four optimizer steps for a batch",
        settings=settings(algorithm={"number_of_minibatches": 4}, trainer={"learning_rate": 2e-4}),
    ),
    healthy(
        "two epochs",
        "each batch twice, with recomputed log-probs",
        settings=settings(
            algorithm={"ppo_epochs": 2, "use_decoupled_loss": True, "use_ppo_clip": True},
            trainer={"learning_rate": 2e-4},
        ),
    ),
    healthy("reference", "a KL penalty", settings=settings(algorithm={"kl_penalty_tau": 0.01})),
    healthy(
        "slow rate",
        "a tenth of the learning rate",
        settings=settings(trainer={"learning_rate": 3e-5}),
    ),
    healthy(
        "warm-up and decay",
        "the rate rises and falls to 0",
        settings=settings(trainer={"warmup_steps": 10, "lr_scheduler": "cosine"}),
    ),
    healthy("small groups", "groups of 4", settings=settings(rollout={"group_size": 4})),
    healthy(
        "large groups",
        "6 groups of 32",
        settings=settings(rollout={"group_size": 32, "prompts_batch_size_for_trainer": 6}),
    ),
    healthy("warm", "temperature 1.2", settings=settings(rollout={"temperature": 1.2})),
)
"""Runs in which nothing may be found."""
