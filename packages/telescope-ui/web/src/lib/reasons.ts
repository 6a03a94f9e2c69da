/** What became of rollouts, in words: reasons of runs and of their ends are identifiers. */

const REASONS: Record<string, string> = {
  all_at_maximum: "every rollout of its group got the highest reward, so there is nothing to learn from their difference",
  all_at_minimum: "every rollout of its group got the lowest reward, so there is nothing to learn from their difference",
  all_equal: "every rollout of its group got the same reward, so there is nothing to learn from their difference",
  too_few: "failures left too few rollouts of its group to compare",
  any_k_alike: "any pass_at_k of its rollouts hold one of the best, so there is nothing to learn from their difference",
  all_filtered: "filters left none of the rollouts of its group",
  overlong: "it was cut off, so it is not known how it would have ended",
  timeout: "it was still being played at its deadline",
  gibberish: "a token was sampled that was less likely than in a uniform draw",
  repetition: "its text repeats the same thing over and over",
  off_policy: "it was sampled by weights that are too old by now",
  run_ended: "the run ended before it was trained on",
  rejected: "the run's own should_accept_fn rejected its group",
  cancelled: "it was stopped before its end",
};

const STOPS: Record<string, string> = {
  completed: "the environment: nothing was left to do",
  length: "the limit of tokens in one turn (max_tokens)",
  context_length: "the end of the model's context",
  max_turns: "the limit of turns",
  timeout: "its deadline",
  error: "an error",
  cancelled: "the run, or a person",
};

const FINISHES: Record<string, string> = {
  stop: "the model ended it",
  length: "cut at max_tokens",
  tool_calls: "calls tools",
  content_filter: "stopped by a content filter",
};

const inWords = (table: Record<string, string>, name: string): string => (Object.hasOwn(table, name) ? (table[name] ?? name) : name);

/** Why a rollout has its status, with the identifier that filters take. */
export function reasonOf(name: string): string {
  const words = inWords(REASONS, name);
  return words === name ? name : `${words} (${name})`;
}

export const stopOf = (name: string): string => inWords(STOPS, name);
export const finishOf = (name: string): string => inWords(FINISHES, name);
