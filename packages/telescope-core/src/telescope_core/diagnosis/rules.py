"""The rules by which `diagnose` finds what is wrong with a run. Pure: metrics in, findings out.

A rule is silent unless it is sure: it asks for several steps in a row, or for a difference of four
standard errors. `benchmarks/results/diagnosis.md` shows which planted faults are named and how
often a good run is accused.
"""

import logging
from functools import partial
from itertools import pairwise
from statistics import fmean

from telescope_core.diagnosis import of_rewards
from telescope_core.diagnosis.history import Change, History, Stretch
from telescope_core.diagnosis.rule import Finding, Found, Kind, Rule, Series

_LOGGER = logging.getLogger(__name__)
_STANDS_STILL = 0.999
"""Share of unchanged weights from which on all of them count as unchanged."""


def diagnose(history: History) -> list[Finding]:
    """Return the findings in the metrics of a run, present and serious ones first.

    Nothing found is not a proof of health. A rule that fails is logged and finds nothing, because
    the run, its summary and its report do not depend on it.
    """
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule.find(rule, history)
        except Exception:
            _LOGGER.exception("the rule %r failed on these metrics; please report this", rule.name)
    going_on = [one for one in found if not one.is_over]
    if any(one.kind is Kind.BROKEN for one in going_on):
        # Lost time does not matter while nothing can be learned.
        found = [one for one in found if one.kind is not Kind.SLOW]
    collapses = [one for one in going_on if one.rule == "collapse" and one.environment is None]
    if collapses:
        # That no group teaches any more is what follows from it.
        found = [one for one in found if one.is_over or one.rule not in _FOLLOW_A_COLLAPSE]
    until = {one.rule: one.last_step for one in found}
    found = [
        one
        for one in found
        if all(until.get(other, 0) < one.last_step for other in _TOLD_BY.get(one.rule, ()))
    ]
    order = list(Kind)
    return sorted(found, key=lambda one: (one.is_over, order.index(one.kind), one.first_step))


_FOLLOW_A_COLLAPSE = ("nothing trained", "one reward", "no signal")
_TOLD_BY = {
    "ratio off one": ("another model", "mismatch grows", "few samples count", "corrected away"),
    "some answers cut": ("truncation",),
}
"""Rule -> those that say the same and more, so that it is silent of steps of which they speak."""


def _mismatch_grows(rule: Rule, history: History) -> Found:
    change = history.from_start("mismatch/mean")
    if change is None or not change.is_sure:
        return
    if change.after < 0.01 or change.after < 3 * change.before:
        return
    yield rule.since(
        change,
        history,
        f"The distance between engine and trainer grew from {change.before:.2g} to "
        f"{change.after:.2g} nats.",
        "Set fp32_lm_head, or use a correction (use_tis, or seq_is_masking where the loss has a "
        "ratio of its own); if it began after a restart of a server, compare the digests of its "
        "weights.",
        "mismatch/mean",
    )


def _ratio_off_one(rule: Rule, history: History) -> Found:
    """Find steps whose mean ratio is away from 1 although their tokens are of the newest weights.

    The mean of policy over sampler is 1 over tokens of the sampler, and engines that differ by less
    than `another model` allows, 0.1 nats, move it by about as much at most.
    """
    ages = dict(history.named("staleness/mean"))
    recomputed = history.named("behave_imp_weight/mean")
    for metric, is_to_sampler in (
        ("importance_weight/mean", not recomputed),
        ("behave_imp_weight/mean", True),
    ):
        means = history.named(metric)
        if is_to_sampler:
            means = [(step, mean) for step, mean in means if ages.get(step) == 0]
        stretch = history.stretch(means, lambda mean: abs(mean - 1) > 0.1, least=5)
        if stretch is None:
            continue
        remedies: list[str] = []
        if metric == "importance_weight/mean":
            remedies.append(
                "Lower number_of_minibatches, ppo_epochs or learning_rate: with one optimizer step "
                "per batch it is 1 but for rounding."
            )
        if is_to_sampler:
            remedies.append(
                "If that is not it, the log-probs of the engine are not those of the tokens that "
                "it draws: see mismatch/mean, and what vllm_arguments say about sampling."
            )
        yield rule.over(
            stretch,
            f"The mean importance weight is {fmean(stretch.values(means)):.3g} on tokens that "
            f"{'the newest weights' if is_to_sampler else 'any weights'} sampled, where it should "
            f"be 1 ({metric}).",
            " ".join(remedies),
            metric,
            "mismatch/mean",
        )
        return


def _failures(rule: Rule, history: History) -> Found:
    """Find that many attempts fail, relative to rollouts and failures together."""
    totals = dict(history.named("rollouts/total"))
    failed = [
        (step, number / (number + totals[step]))
        for step, number in history.named("rollouts/failed_attempts")
        if step in totals and number + totals[step]
    ]
    stretch = history.stretch(failed, lambda share: share > 0.2, least=3)
    if stretch is None:
        return
    causes = {
        name: sum(stretch.values(history.named(f"failures/{name}")))
        for name in history.parts("failures/")
    }
    most = max(causes, key=lambda one: causes[one], default="unknown")
    shares = stretch.values(failed)
    yield rule.over(
        stretch,
        f"{sum(shares) / len(shares):.0%} of all attempts at a rollout failed, most of them in: "
        f"{most}.",
        "Read the errors of failed rollouts; what fails often for one kind of example biases what "
        "is learned.",
        "rollouts/failed_attempts",
        f"failures/{most}",
    )


def _entropy_gone(rule: Rule, history: History) -> Found:
    change = history.from_start("entropy")
    if change is None or change.before < 0.05 or change.after > 0.1 * change.before:
        return
    if change.after > 0.02 or not change.is_sure:
        return
    yield rule.since(
        change,
        history,
        f"The entropy of the policy fell from {change.before:.3g} to {change.after:.2g} nats: it "
        "writes the same answer each time, and groups stop teaching.",
        'Lower learning_rate, set entropy_coef, use algorithm = "dapo", whose clip leaves more '
        "room upwards (clip_high, with use_ppo_clip), or use more varied examples.",
        "entropy",
    )


def _entropy_explodes(rule: Rule, history: History) -> Found:
    change = history.from_start("entropy")
    if change is None or not change.is_sure:
        return
    if change.after < max(3 * change.before, change.before + 0.5):
        return
    yield rule.since(
        change,
        history,
        f"The entropy of the policy rose from {change.before:.3g} to {change.after:.3g} nats: its "
        "text falls apart.",
        "Lower learning_rate or entropy_coef, and go back to a checkpoint from before.",
        "entropy",
        "task_reward/mean",
    )


def _length_without_reward(history: History) -> Change | None:
    """Return the change of the length of answers; None unless it is sure and no reward rose."""
    length = history.from_start("completion_len/mean")
    reward = history.from_start("task_reward/mean")
    if length is None or reward is None or (reward.is_sure and reward.size > 0):
        return None
    return length if length.is_sure else None


def _length_grows(rule: Rule, history: History) -> Found:
    length = _length_without_reward(history)
    if length is None or length.after < 2 * length.before:
        return
    yield rule.since(
        length,
        history,
        f"Answers grew from {length.before:.0f} to {length.after:.0f} tokens, and the reward did "
        "not rise.",
        "Look for padding or repetition in the longest answers; overlong_penalty_factor makes "
        "those cost something that come within overlong_buffer_tokens of max_tokens.",
        "completion_len/mean",
        "task_reward/mean",
    )


def _length_shrinks(rule: Rule, history: History) -> Found:
    length = _length_without_reward(history)
    if length is None or length.before < 8 or length.after > 0.25 * length.before:
        return
    yield rule.since(
        length,
        history,
        f"Answers shrank from {length.before:.0f} to {length.after:.1f} tokens, and the reward "
        "did not rise.",
        "The model has given up: see whether short answers get the same reward as thought-out "
        "ones, and whether long ones are cut.",
        "completion_len/mean",
        "task_reward/mean",
    )


def _corrected_away(rule: Rule, history: History) -> Found:
    for metric in (
        "behave_imp_weight/capped_fraction",
        "tis/masked_fraction",
        "seq_is_mask/fraction",
    ):
        stretch = history.stretch(history.named(metric), lambda share: share > 0.2, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                f"A correction left out more than 20 % of the tokens ({metric}).",
                "Engine and trainer are too far apart: see mismatch/mean and staleness/mean, and "
                "lower max_async_rollout or learning_rate before you raise the cap.",
                metric,
                "mismatch/mean",
            )
            return


def _filtered(rule: Rule, history: History) -> Found:
    for name in ("repetition", "gibberish", "overlong", "timeout"):
        metric = f"filtered/{name}"
        shares = history.share(metric, "rollouts/total")
        stretch = history.stretch(shares, lambda share: share > 0.3, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                f"The {name} filter left out more than 30 % of the rollouts.",
                "Read some of them: the filter is too strict, or the policy falls apart.",
                metric,
                "entropy",
            )


def _grad_norm(rule: Rule, history: History) -> Found:
    change = history.from_start("grad_norm")
    if change is None or not change.is_sure or change.after < 20 * change.before:
        return
    yield rule.since(
        change,
        history,
        f"The norm of the gradient rose from {change.before:.2g} to {change.after:.2g}.",
        "Lower learning_rate, and see whether rewards or advantages became very large.",
        "grad_norm",
        "advantage/std",
    )


def _changed_at_full_rate(history: History) -> Series:
    """Return the share of weights that each step changed, without steps of warm-up or decay."""
    rates = dict(history.named("learning_rate"))
    least = 0.5 * max(rates.values(), default=0.0)
    changed = history.named("optimizer/changed_weights")
    return [(s, share) for s, share in changed if rates.get(s, least) >= least]


def _left_by_steps(history: History) -> Series:
    """Return the share of weights that each step left unchanged, by the step that reports it."""
    skipped = dict(history.named("optimizer/skipped"))
    taken = {s for s, number in history.named("optimizer/steps") if number > skipped.get(s, 0.0)}
    return [(s, share) for s, share in history.named("weights/unchanged") if s - 1 in taken]


def _workers(rule: Rule, history: History) -> Found:
    """Find environments whose processes are replaced again and again, or hang."""
    for name in history.parts("workers/", "/workers"):
        restarts = history.named(f"workers/{name}/restarts")
        new = [(step, later - earlier) for (_, earlier), (step, later) in pairwise(restarts)]
        stretch = history.stretch(new, lambda number: number > 0, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                "Processes of the environment died, and were replaced, in every step.",
                "See the log of its workers for the cause: memory, a crash, or a hang.",
                f"workers/{name}/restarts",
                environment=name,
            )
            continue
        lag = history.named(f"workers/{name}/loop_lag_s")
        stretch = history.stretch(lag, lambda seconds: seconds > 5.0, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                "The event loop of the environment stood still for more than 5 s in every step.",
                "Something in it blocks: use async calls, asyncio.to_thread, or more workers.",
                f"workers/{name}/loop_lag_s",
                environment=name,
            )


def _stuck(rule: Rule, history: History) -> Found:
    for name in history.parts("workers/", "/workers"):
        metric = f"workers/{name}/stuck_threads"
        stretch = history.stretch(history.named(metric), lambda number: number > 0, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                "Threads of the environment are lost to code that does not end.",
                "See which tool or reward it is in the log of its workers, and give it a limit of "
                "its own.",
                metric,
                environment=name,
            )


def _evals_missing(rule: Rule, history: History) -> Found:
    missing = history.named("eval/missing")
    total = sum(number for _, number in missing)
    if total:
        first = next(step for step, number in missing if number)
        yield rule.over(
            Stretch(first, history.last_step, False),
            f"{total:g} evals were skipped or failed, so that the curve has holes.",
            "eval_points.jsonl has the reason of each; eval_num_servers gives evals servers of "
            "their own, out of inference_num_workers.",
            "eval/missing",
        )


def _evals_fall(rule: Rule, history: History) -> Found:
    for name in history.parts("eval/", "/reward/low"):
        lows, highs = (history.named(f"eval/{name}/reward/{end}") for end in ("low", "high"))
        if len(lows) < 2 or highs[-1][1] >= lows[0][1]:
            continue
        yield rule.over(
            Stretch(highs[-1][0], history.last_step, False),
            f"The newest eval is worse than the first one: at most {highs[-1][1]:.3g} where it was "
            f"at least {lows[0][1]:.3g} (95 % intervals).",
            "Training made the model worse at what this eval plays: see the examples that "
            "flipped to wrong, and go back to an earlier checkpoint.",
            f"eval/{name}/reward",
            environment=name,
        )


def _moved_away(history: History) -> Series:
    """Return how much the distance from the reference has grown, from a teacher's as from 0."""
    values = history.named("kl/reference")
    return [(step, nats - values[0][1]) for step, nats in values]


def _clipped_share(history: History) -> Series:
    highs = dict(history.named("clip_fraction/high"))
    return [(step, low + highs.get(step, 0.0)) for step, low in history.named("clip_fraction/low")]


def _fill_of_rows(history: History) -> Series:
    """Return how full rows are at the steps that have enough rows to fill them better."""
    batches = dict(history.share("pack/batches", "optimizer/steps"))
    return [(s, fill) for s, fill in history.named("pack/fill") if batches.get(s, 0.0) >= 4]


def _distance_of_old_tokens(history: History) -> Series:
    """Return 1 - effective sample size at the steps where most tokens come from older weights."""
    ages = dict(history.named("staleness/mean"))
    sizes = history.named("effective_sample_size")
    return [(step, 1 - size) for step, size in sizes if ages.get(step, 0.0) >= 0.5]


def _idle_share(history: History) -> Series:
    """Return the share of a step in which servers were idle; 0 where nobody waits long for them."""
    seconds, waits = (dict(history.named(f"time/{name}_s")) for name in ("step", "generate"))
    return [
        (step, 1 - batch_s / seconds[step] if waits.get(step, 0.0) < 0.1 * seconds[step] else 0.0)
        for step, batch_s in history.named("time/batch_s")
        if seconds.get(step, 0.0) >= 1.0
    ]


def _while_waiting(part: str, of: str, history: History) -> Series:
    """Return the share of `part` in the metric `of`; 0 where nothing waits for rollouts."""
    waits = dict(_step_share("time/generate_s", history))
    shares = history.share(part, of)
    return [(step, share if waits.get(step, 0.0) > 0.6 else 0.0) for step, share in shares]


def _thrown_out(history: History) -> Series:
    """Return the share of rollouts that are thrown out in four steps, while something waits.

    Four, because the driver lowers the number of requests when a cache is full, and raises it again
    over the next seconds.
    """
    shares = _while_waiting("servers/thrown_out", "rollouts/total", history)
    windows = [shares[at - 4 : at] for at in range(4, len(shares) + 1)]
    return [(window[-1][0], fmean(one for _, one in window)) for window in windows]


def _step_share(metric: str, history: History) -> Series:
    """Return the share of two steps' time that one part takes; 0 if it is less than a second.

    Two steps, because a step that waits for rollouts often alternates with one that does not.
    """
    seconds = dict(history.named("time/step_s"))
    parts = [
        (step, value, seconds[step]) for step, value in history.named(metric) if step in seconds
    ]
    # The first step has what every run waits for once.
    return [
        (step, (before + value) / (other_s + step_s) if before + value >= 1.0 else 0.0)
        for (_, before, other_s), (step, value, step_s) in pairwise(parts[1:])
        if other_s + step_s
    ]


RULES: tuple[Rule, ...] = (
    Rule(
        "nothing trained", Kind.BROKEN, "Was there an optimizer step?", of_rewards.nothing_trained
    ),
    Rule("one reward", Kind.BROKEN, "Does the reward tell answers apart?", of_rewards.one_reward),
    Rule("no signal", Kind.BROKEN, "Do groups have an advantage?", of_rewards.no_signal),
    Rule("skipped gradients", Kind.BROKEN, "Are gradients finite?").in_a_row(
        "Optimizer steps were skipped, because their gradient was not finite.",
        "Lower learning_rate or grad_clip, and see whether a reward or a log-prob is not a "
        'number; model_dtype = "float32" keeps the master weights exact.',
        "optimizer/skipped",
        "grad_norm/max",
        holds=lambda number: number > 0,
        least=2,
    ),
    Rule("advantages upside down", Kind.BROKEN, "Are better answers made likelier?").in_a_row(
        "Advantages have the opposite sign of rewards: answers that earned more become less "
        "likely.",
        "The advantage of the algorithm is wrong: see the module that `algorithm` names.",
        "advantage/reward_correlation",
        holds=lambda correlation: correlation < 0,
    ),
    Rule("weights stand still", Kind.BROKEN, "Do optimizer steps change weights?").in_a_row(
        "Optimizer steps were taken, and the weights that servers get stayed as they were.",
        "See learning_rate, which may be 0 or too low for the type of the weights "
        "(mixed_precision_dtype), and whether the optimizer of the backend steps at all.",
        "weights/unchanged",
        "learning_rate",
        holds=lambda share: share >= _STANDS_STILL,
        series=_left_by_steps,
    ),
    Rule("weights do not arrive", Kind.BROKEN, "Do servers get the newest weights?").in_a_row(
        "Rollouts were sampled by weights that had been replaced before their batch began: "
        "servers do not get the updates.",
        "See servers.jsonl and logs/inference-*.jsonl for what became of the last updates, and "
        "weight_transport for the way that they take.",
        "staleness/undelivered",
        "staleness/mean",
        holds=lambda share: share > 0.5,
    ),
    Rule("gradients kept", Kind.BROKEN, "Does each step begin without a gradient?").in_a_row(
        "Gradients of earlier steps were still there when the next step began, and were added "
        "to its own.",
        "The optimizer of the backend does not clear them: see its zero_grad.",
        "optimizer/kept_gradients",
        "grad_norm",
        holds=lambda number: number > 0,
        least=2,
    ),
    Rule("another model", Kind.BROKEN, "Do engine and trainer agree?").in_a_row(
        "Log-probs of the engine and of the trainer differ by {recent:.2g} nats in the mean on the "
        "same weights; below 0.05 is usual in bfloat16.",
        "The engine computes another model than the trainer: check inference_quantization, "
        "vllm_arguments (such as the attention backend), fp32_lm_head, and chat_template; a "
        "correction (use_tis) only hides it.",
        "mismatch/mean",
        "mismatch/max",
        holds=lambda nats: nats > 0.1,
    ),
    Rule("failures", Kind.BROKEN, "Do rollouts end?", _failures),
    Rule("collapse", Kind.BROKEN, "Is the reward near its best?", of_rewards.collapse),
    Rule("rewards clipped", Kind.UNHEALTHY, "Are rewards in their range?").in_a_row(
        "Rewards lie outside the range that an [[environments]] entry of the run gives, and were "
        "clipped to it.",
        "Correct the reward, or widen reward_min and reward_max there, or remove both.",
        "rewards/outside_range",
        holds=lambda number: number > 0,
    ),
    Rule("length decides", Kind.UNHEALTHY, "Does the reward see more than length?").in_a_row(
        "Of two answers to the same prompt, the length alone decides which one gets more, "
        "nearly always.",
        "The reward measures length: read what it gives to a long and to a short wrong answer.",
        "reward/length_order",
        "completion_len/mean",
        holds=lambda order: abs(order) > 0.9,
        least=5,
    ),
    Rule("lottery", Kind.UNHEALTHY, "Do equal answers get equal rewards?").in_a_row(
        "Equal answers to the same prompt get rewards as different as any two answers do.",
        "The reward does not depend on the answer: it draws by chance, or reads a state that "
        "rollouts share. `telescope env validate` grades the same answers twice.",
        "reward/noise",
        holds=lambda share: share > 0.7,
    ),
    Rule("one answer", Kind.UNHEALTHY, "Do answers depend on the prompt?").in_a_row(
        "Nine of ten rollouts say exactly the same, whatever they were asked.",
        "Either the reward pays for it, or the policy has lost its variety: read it, and see "
        "entropy. Make the reward ask for more, or lower learning_rate.",
        "answers/most_common",
        "entropy",
        holds=lambda share: share >= 0.9,
        least=5,
    ),
    Rule("loops", Kind.UNHEALTHY, "Do answers end in loops?").in_a_row(
        "More than 30 % of the answers end in the same few tokens again and again.",
        "Read some of them: either the reward pays for it, or the policy falls apart. "
        "filter_repetition keeps the longest out of training.",
        "answers/looping",
        "truncated/fraction",
        holds=lambda share: share > 0.3,
    ),
    Rule("repeated examples", Kind.UNHEALTHY, "Are examples different?").in_a_row(
        "Half of the groups of each batch are of an example that the batch has already.",
        "There are few examples, so that they are learned by heart: give the environment "
        "more, or lower prompts_batch_size_for_trainer.",
        "groups/repeated",
        "groups/total",
        holds=lambda share: share >= 0.5,
        of="groups/total",
    ),
    Rule("eval leak", Kind.UNHEALTHY, "Are evals held out?").in_a_row(
        "Groups of training ask what examples of evals ask, with the same right answers: evals "
        "show what was learned by heart.",
        "Unless it trains on them on purpose (split), take the examples of the evals out of the "
        "training data: the ids of an environment must follow from the content of its examples.",
        "groups/held_out",
        "groups/total",
        holds=lambda share: share > 0.05,
        of="groups/total",
    ),
    Rule("one drowns others", Kind.UNHEALTHY, "Do all environments count?", of_rewards.drowned),
    Rule("failing tools", Kind.UNHEALTHY, "Do tools work?", of_rewards.failing_tools),
    Rule("frozen weights", Kind.UNHEALTHY, "Are all weights trained?").in_a_row(
        "{last:.0%} of the weights lie in tensors that no optimizer step changes.",
        "A part of the model is not trained: see whether its code detaches it, sets "
        "requires_grad to False, or leaves it out of what is computed.",
        "weights/unchanged",
        holds=lambda share: 0.01 < share < _STANDS_STILL,
        least=5,
        series=_left_by_steps,
    ),
    Rule("rounded away", Kind.UNHEALTHY, "Are changes of weights kept?").in_a_row(
        "Steps change few of the bfloat16 weights: most changes are smaller than the distance "
        "between two such numbers, and are lost.",
        'Set model_dtype = "float32", or use_lora, whose weights are float32; or raise '
        "learning_rate.",
        "optimizer/changed_weights",
        "learning_rate",
        holds=lambda share: share < 0.1,
        least=5,
        series=_changed_at_full_rate,
    ),
    Rule("does not move", Kind.UNHEALTHY, "Do steps change probabilities?").in_a_row(
        "Tokens of older weights have the same probability under the present ones, to a "
        "thousandth: optimizer steps hardly change the policy.",
        "Raise learning_rate, ten times at first, or see whether warmup_steps are too many.",
        "effective_sample_size",
        "learning_rate",
        holds=lambda distance: distance < 1e-6,
        least=8,
        series=_distance_of_old_tokens,
    ),
    Rule("mismatch grows", Kind.UNHEALTHY, "Do they go on to agree?", _mismatch_grows),
    Rule("entropy gone", Kind.UNHEALTHY, "Does the policy still vary?", _entropy_gone),
    Rule("entropy explodes", Kind.UNHEALTHY, "Is its text still one?", _entropy_explodes),
    Rule("truncation", Kind.UNHEALTHY, "Do answers end by themselves?").in_a_row(
        "{recent:.0%} of the rollouts were cut by max_tokens before they ended.",
        "Raise max_tokens, ask for shorter answers in the prompt, or set overlong_penalty_factor "
        "(with overlong_buffer_tokens below max_tokens); an answer that is cut mostly gets the "
        "lowest reward, whatever it would have said.",
        "truncated/fraction",
        "completion_len/mean",
        holds=lambda share: share > 0.5,
        least=5,
        rollouts={"truncated": "true"},
    ),
    Rule("some answers cut", Kind.SLOW, "Do nearly all answers end by themselves?").in_a_row(
        "{recent:.0%} of the rollouts were cut by max_tokens before they ended: above 5 % the "
        "limit shapes what is learned, and what was sampled of them is mostly lost.",
        "Raise max_tokens, or see whether answers grow without a higher reward.",
        "truncated/fraction",
        "completion_len/mean",
        holds=lambda share: share > 0.05,
        least=5,
        rollouts={"truncated": "true"},
    ),
    Rule("out of context", Kind.UNHEALTHY, "Do conversations fit?").in_a_row(
        "More than a quarter of the rollouts reached the end of the model's context.",
        "Raise seq_len (and max_model_len, if it is set), lower the number of turns, or shorten "
        "what tools return.",
        "rollouts/out_of_context",
        holds=lambda share: share > 0.25,
        of="rollouts/total",
    ),
    Rule("deadlines", Kind.UNHEALTHY, "Do rollouts end in time?").in_a_row(
        "More than a tenth of the rollouts reached their deadline, or the time limit of their "
        "program.",
        "Raise rollout_timeout_s, or agent_timeout_s where tags of rollouts name it as their "
        "time_limit, or see which call is slow on the timeline; slow rollouts are mostly the hard "
        "ones, so losing them biases what is learned.",
        "rollouts/timed_out",
        holds=lambda share: share > 0.1,
        of="rollouts/total",
    ),
    Rule("length grows", Kind.UNHEALTHY, "Is a longer answer a better one?", _length_grows),
    Rule("length shrinks", Kind.UNHEALTHY, "Does it still try?", _length_shrinks),
    Rule("form over task", Kind.UNHEALTHY, "Do parts of the reward agree?", of_rewards.parts_apart),
    Rule("too old", Kind.UNHEALTHY, "Are rollouts thrown away?").in_a_row(
        "More than a quarter of the rollouts were stopped because their tokens became too old, "
        "and were played again.",
        "Raise max_off_policy_steps, lower max_async_rollout or max_tokens, or give rollouts "
        "more servers.",
        "rollouts/off_policy",
        "staleness/mean",
        holds=lambda share: share > 0.25,
        of="rollouts/total",
    ),
    Rule("few samples count", Kind.UNHEALTHY, "Do all samples count?").in_a_row(
        "A few tokens carry most of the weight of a batch: policy and sampler are far "
        "apart (effective_sample_size below 0.5).",
        "If it began from one step to the next, the engine and the trainer do not speak of the "
        "same tokens, weights or temperature any more: mismatch/mean shows how far they are "
        "apart. If it came slowly, lower max_async_rollout, learning_rate or "
        "number_of_minibatches, or set use_tis (seq_is_masking where the loss has a ratio of its "
        "own).",
        "effective_sample_size",
        "importance_weight/max",
        holds=lambda share: share < 0.5,
    ),
    Rule("ratio off one", Kind.UNHEALTHY, "Is what is trained on of the policy?", _ratio_off_one),
    Rule("clipping", Kind.UNHEALTHY, "Are steps small enough?").in_a_row(
        "The clip took effect on more than 75 % of the tokens; half is usual in GSPO.",
        "Steps are too large: lower learning_rate, number_of_minibatches or ppo_epochs.",
        "clip_fraction/high",
        "clip_fraction/low",
        holds=lambda share: share > 0.75,
        series=_clipped_share,
    ),
    Rule("corrected away", Kind.UNHEALTHY, "Do corrections leave enough?", _corrected_away),
    Rule("filtered", Kind.UNHEALTHY, "Do filters leave enough?", _filtered),
    Rule("gradient grows", Kind.UNHEALTHY, "Is the gradient steady?", _grad_norm),
    Rule("far from reference", Kind.UNHEALTHY, "Is it near its start?").in_a_row(
        "The policy has moved more than 1 nat a token away from the reference model.",
        "Lower learning_rate, raise kl_penalty_tau, or update the reference model.",
        "kl/reference",
        holds=lambda nats: nats > 1.0,
        least=5,
        series=_moved_away,
    ),
    Rule("short first", Kind.UNHEALTHY, "Are long answers trained on?").in_a_row(
        "Rollouts that were trained on are shorter than those that were drawn, by more than a "
        "fifth: short answers come first.",
        'Use batch_order = "drawn", or give rollouts more servers.',
        "length_bias",
        holds=lambda ratio: ratio < 0.8,
    ),
    Rule("evals fall", Kind.UNHEALTHY, "Do evals hold?", _evals_fall),
    Rule("evals missing", Kind.UNHEALTHY, "Were all evals played?", _evals_missing),
    Rule("branched turns", Kind.SLOW, "Do turns continue each other?").in_a_row(
        "{last:.0%} of later turns in the last step do not continue the tokens before them and "
        "become samples of their own. This is exact, but the history of each is computed again.",
        "Either the chat template rewrites earlier turns (the start of the run reports this; "
        "a template that only appends is set with chat_template), or interleaved_rollouts is "
        "off, or turns end with a text of `stop`, which callers do not get, or the agent edits "
        "its history or asks from several conversations, or turns that max_tokens cut hold special "
        "tokens, which a text of them loses.",
        "turns/branched",
        holds=lambda share: share > 0.05,
    ),
    Rule("waits for rollouts", Kind.SLOW, "Does the trainer wait?").in_a_row(
        "The trainer waited for rollouts in more than 60 % of each step.",
        "Add servers (inference_num_workers), raise max_async_rollout, or see on the timeline "
        "whether environments or the longest answers are what it waits for.",
        "time/generate_s",
        "time/step_s",
        holds=lambda share: share > 0.6,
        least=5,
        series=partial(_step_share, "time/generate_s"),
    ),
    Rule("slow rewards", Kind.SLOW, "Do rewards take long?").in_a_row(
        "The trainer waits for rollouts, and these spend more than half of the time of a batch "
        "in reward functions.",
        "Make the reward faster or async, or give the environment more env_workers.",
        "time/score_s",
        "time/batch_s",
        holds=lambda share: share > 0.5,
        least=5,
        series=partial(_while_waiting, "time/score_s", "time/batch_s"),
    ),
    Rule("servers idle", Kind.SLOW, "Are servers busy?").in_a_row(
        "All rollouts of a batch take less than 30 % of a step, so that servers wait for the "
        "trainer most of the time.",
        "Give the trainer more ranks (trainer_num_workers) and the servers fewer GPUs, or use "
        "the time: a larger group_size costs little.",
        "time/batch_s",
        "time/step_s",
        holds=lambda share: share > 0.7,
        least=5,
        series=_idle_share,
    ),
    Rule("lost servers", Kind.SLOW, "Are all servers there?").in_a_row(
        "At least one inference server was gone at the end of each step; the others do its work.",
        "servers.jsonl has the reason, and logs/inference-*.jsonl what it printed last: memory "
        "(gpu_memory_utilization, max_num_seqs), a crash, or a node that is gone.",
        "servers/lost",
        holds=lambda number: number > 0,
        least=5,
    ),
    Rule("full caches", Kind.SLOW, "Do requests keep their cache?").in_a_row(
        "The trainer waits for rollouts, and servers throw requests out of full key-value caches "
        "again and again: fewer requests fit into them than could be computed at once.",
        "Raise gpu_memory_utilization or the number of servers, or lower max_tokens or "
        "max_concurrent_prompts_per_server; the page of meters has vllm/kv_cache_used_share.",
        "servers/thrown_out",
        "time/generate_s",
        holds=lambda share: share > 0.02,
        least=5,
        series=_thrown_out,
    ),
    Rule("slow weights", Kind.SLOW, "Do weights take long?").in_a_row(
        "Sending weights took more than a quarter of each step.",
        "See weight_transport: nccl or ipc beat disk and gloo; with use_lora only the adapter "
        "is sent; evals on shared servers wait here, too (eval_num_servers gives them their "
        "own, out of inference_num_workers).",
        "time/sync_s",
        holds=lambda share: share > 0.25,
        least=5,
        series=partial(_step_share, "time/sync_s"),
    ),
    Rule("slow driver", Kind.SLOW, "Does the rest take long?").in_a_row(
        "Advantages, packing and records took more than a quarter of each step.",
        "The driver or its disk is too slow: see the timeline, and whether the run folder is "
        "on a network disk.",
        "time/wait_s",
        holds=lambda share: share > 0.25,
        least=5,
        series=partial(_step_share, "time/wait_s"),
    ),
    Rule("empty rows", Kind.SLOW, "Are rows full?").in_a_row(
        "Packed rows are less than half full.",
        "Lower seq_len, or raise it to a multiple of the longest samples.",
        "pack/fill",
        "seq_len/max",
        holds=lambda share: share < 0.5,
        least=5,
        series=_fill_of_rows,
    ),
    Rule("uneven ranks", Kind.SLOW, "Do ranks have equal work?").in_a_row(
        "A step takes over 1.3 times as long as if all ranks had equal work.",
        "Raise the number of groups of a batch (prompts_batch_size_for_trainer), use fewer ranks, "
        "or, for few long samples, set fsdp_context_parallel_size, of which trainer_num_workers "
        "must be a multiple.",
        "pack/flops_imbalance",
        holds=lambda times: times > 1.3,
        least=5,
    ),
    Rule("dying workers", Kind.SLOW, "Do environments stay alive?", _workers),
    Rule("stuck threads", Kind.SLOW, "Does code of environments end?", _stuck),
)
"""Every rule, what is broken first."""
