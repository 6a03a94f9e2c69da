/** What the server sends; docs/reference/ui-addresses.md says what each means. */

import type { Cell, Columns } from "./columns.ts";

export interface RunOf {
  key: string;
  name: string;
  state: string;
}

export interface IndexState {
  files_done: number;
  files_total: number;
  is_complete: boolean;
  problems: string[];
}

export interface RunEntry {
  key: string;
  name: string;
  folder: string;
  state: string;
  reason: string | null;
  started_at: string | null;
  ended_at: string | null;
  step: number | null;
  number_of_steps: number | null;
  environments: string[] | null;
  model: string | null;
  algorithm: string | null;
  reward: number | null;
  recent_reward: number | null;
  seeds: string | null;
  changed_s: number | null;
  error: string | null;
  curve: { steps: number[]; values: (number | null)[]; is_thinned: boolean } | null;
}

/** Runs that differ in their seed alone. */
export interface Seeds {
  name: string;
  runs: string[];
  recent_reward: Record<"count" | "mean" | "deviation" | "minimum" | "maximum", number | null>;
}

/** An eval without a run. */
export interface EvalEntry {
  key: string;
  name: string;
  folder: string;
  state: string;
  reason: string | null;
  started_at: string | null;
  ended_at: string | null;
  environment: string | null;
  model: string | null;
  measure: string | null;
  mean: number | null;
  low: number | null;
  high: number | null;
  num_tasks: number | null;
  num_rollouts: number | null;
  num_scored: number | null;
  num_failed: number | null;
  changed_s: number | null;
  error: string | null;
}

export interface RunsPage {
  folders: string[];
  left_out: string[];
  runs: RunEntry[];
  seeds: Seeds[];
  evals: EvalEntry[];
  index: IndexState;
}

export interface RunVerdict {
  outcome: "learned" | "mixed" | "worse" | "collapsed" | "no gain" | "not shown" | "not trained" | "too early";
  text: string;
}

/** The reward of an environment over steps; of all of them where it is null. */
export interface RewardCourse {
  environment: string | null;
  steps: number[];
  mean: (number | null)[];
  smooth: (number | null)[];
  smooth_steps: number;
  times_s: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
  range: [number, number] | null;
  first: number | null;
  last: number | null;
  compared_steps: number;
  is_thinned: boolean;
}

export interface EvalEstimate {
  mean: number;
  low: number | null;
  high: number | null;
  num_tasks: number;
}

export interface MetricSection {
  name: string;
  metrics: string[];
}

export interface ComparePage {
  runs: (RunOf & { step: number | null; verdict: RunVerdict; started_s: number | null })[];
  evals: {
    environment: string;
    against: string;
    runs: ({
      run: string;
      moment: string;
      measure: string;
      versus: { change: number; is_shown: boolean; sentence: string; cautions: string[] } | null;
    } & { [name in keyof EvalEstimate]: EvalEstimate[name] | null })[];
  }[];
  rewards: { environment: string | null; runs: (RewardCourse & { run: string })[] }[];
  metric_names: string[];
  sections: MetricSection[];
  usual: string[];
  curves: Record<
    string,
    {
      run: string;
      steps: number[];
      times_s: (number | null)[];
      values: (number | null)[];
      smooth: (number | null)[];
      smooth_steps: number;
    }[]
  >;
  settings: { name: string; values: Record<string, unknown>; is_place: boolean; follows: boolean }[];
  num_equal_settings: number;
}

export interface StepCurves {
  steps: number[];
  metrics: Record<string, (number | null)[]>;
  is_thinned: boolean;
}

export interface Tile {
  name: string;
  value: number | null;
  unit: string;
  state: "good" | "watch" | "bad" | "none";
  explanation: string;
  metric: string;
  is_share: boolean;
  address: string;
}

export interface OverviewPage {
  run: RunOf;
  verdict: RunVerdict;
  identity: {
    started_at: string | null;
    ended_at: string | null;
    reason: string | null;
    host: string | null;
    step: number | null;
    number_of_steps: number | null;
    model: string | null;
    algorithm: string | null;
    last_change_s: number | null;
    left_s: number | null;
    report: string | null;
    folder: string;
    resumes: { at: string; step: number; checkpoint: string; changed: string[] }[];
  };
  metric_names: string[];
  sections: MetricSection[];
  usual: string[];
  curves: StepCurves & { smooth: Record<string, (number | null)[]>; smooth_steps: number; times_s: (number | null)[] };
  reward: RewardCourse & { untrained: [number, number][] };
  rewards: (RewardCourse & { environment: string; signal: number | null; truncated: number | null })[];
  evals: (EvalEstimate & { environment: string; folder: string; step: number; address: string })[];
  time: {
    parts: { name: string; seconds: number }[];
    step_s: { first: number | null; last: number | null };
    tokens_per_s: number | null;
    bound_by: string | null;
  };
  tiles: Tile[];
  diagnoses: {
    rule: string;
    kind: "broken" | "unhealthy" | "slow";
    first_step: number;
    last_step: number;
    is_over: boolean;
    environment: string | null;
    cause: string;
    remedy: string;
    metrics: string[];
    rollouts: Record<string, string>;
  }[];
  restarts: { time_s: number; reason: string; reached: number; step: number; checkpoint: string }[];
  eval_points: {
    time_s: number;
    name: string;
    tag: string;
    version: number;
    state: string;
    reward: number | null;
    folder: string | null;
  }[];
  self_tests: { name: string; value: number; limit: number; unit: string; note: string }[];
  checkpoints: { name: string; step: number; created_at: string }[];
  /** Newest first. */
  happened: { time_s: number | null; kind: string; text: string; why: string; address: string }[];
  index: IndexState;
}

export interface RolloutsPage {
  run: RunOf;
  index: IndexState;
  total: number | null;
  /** In an export: how many the run has. */
  num_of_run?: number;
  /** In an export: how many of them are there. */
  num_of_export?: number;
  columns: Columns & { address: string[] };
  scalar_columns: { name: string; kind: "number" | "text" | "truth" }[];
  choices: Record<"environment" | "status" | "stop_reason" | "status_reason" | "server", string[]>;
  steps: { first: number | null; last: number | null };
  search?: { next_cursor: string | null; steps_searched: [number, number] | null; is_complete: boolean };
}

export interface Distribution {
  name: string;
  kind: "number" | "text";
  total: number;
  missing: number;
  mean: number | null;
  minimum: number | null;
  maximum: number | null;
  quantiles: Record<string, number> | null;
  bins: { low?: number[]; high?: number[]; least?: (number | null)[]; most?: (number | null)[]; value?: Cell[]; count: number[] };
}

export interface ToolCall {
  id?: string;
  function?: { name?: string; arguments?: unknown };
}

export interface Picture {
  media_type: string;
  /** The file's bytes in base64. */
  data: string;
  /** How many characters of the content come before it. */
  at: number;
}

export interface Message {
  role: string;
  content: unknown;
  images?: Picture[] | null;
  reasoning?: string | null;
  tool_calls?: ToolCall[] | null;
  tool_call_id?: string | null;
  refusal?: string | null;
}

export interface RolloutRow {
  step: number | null;
  environment: string;
  example_id: string;
  group_id: string;
  index: number;
  attempt: number;
  status: string;
  status_reason: string;
  error: string | null;
  stop_reason: string;
  reward: number | null;
  advantage: number | null;
  rewards: Record<string, number>;
  metrics: Record<string, number>;
  tags: Record<string, string>;
  golden_answers: Record<string, unknown>;
  info: { turn: number | null; key: string; value: unknown; kind: string }[];
  num_turns: number;
  num_prompt_tokens: number | null;
  num_completion_tokens: number | null;
  is_truncated: boolean;
  is_refused: boolean;
  finish_reasons: string[];
  oldest_version: number | null;
  newest_version: number | null;
  generate_s: number | null;
  score_s: number | null;
}

export interface Chain {
  parent: number | null;
  num_shared: number;
  ids: number[];
  texts: string[] | null;
  is_sampled: boolean[];
  logprobs: (number | null)[];
  turns: (number | null)[];
  versions: (number | null)[] | null;
  advantage: number | null;
  mask: (number | null)[] | null;
  columns: Record<string, (number | null)[]>;
}

export interface Tokens {
  num_chains: number;
  chains: Chain[];
  turns: ({ chain: number; prompt_end: number; completion_end: number } | null)[];
  is_cut: boolean;
}

export interface RolloutPage {
  run: RunOf;
  row: RolloutRow;
  /** The reward is their weighted sum; empty where that is not known. */
  reward_parts: { name: string; weight: number; value: number }[];
  messages: Message[];
  conversations: Message[][];
  tools: { function?: { name?: string; description?: string; parameters?: unknown } }[];
  tokens: Tokens | null;
  calls: { columns: Columns };
  events: { columns: Columns };
  siblings: { columns: Columns };
  addresses: Partial<
    Record<"group" | "example" | "timeline" | "previous" | "next" | "eval", string | null>
  >;
}

export interface GroupPage {
  run: RunOf;
  group_id: string;
  environment: string;
  example_id: string;
  step: number;
  reward: Record<"mean" | "deviation" | "minimum" | "maximum" | "count", number | null>;
  golden_answers: Record<string, unknown>;
  prompt: Message[];
  rollouts: { row: RolloutRow; messages: Message[]; address: string }[];
  is_cut: boolean;
}

export interface ExamplePage {
  run: RunOf;
  environment: string;
  example_id: string;
  columns: Columns & { address: string[] };
  by_step: { columns: Record<"step" | "count" | "mean" | "minimum" | "maximum", number[]> };
  evals: { folder: string; tag: string; version: number | null; rewards: number[]; num_solved: number }[];
}

export interface DifferenceSide {
  run: RunOf;
  row: RolloutRow;
  messages: Message[];
  address: string;
}

export interface DifferencePage {
  left: DifferenceSide;
  right: DifferenceSide;
  settings: { name: string; values: { left?: unknown; right?: unknown } }[];
}

export interface EnvironmentRecord {
  id?: string;
  version?: string;
  place?: string;
  registry?: string;
  wheel_sha256?: string;
  lock_digest?: string;
  dependencies?: string[];
  files?: Record<string, string>;
}

export interface ConfigPage {
  run: RunOf;
  settings: { name: string; value: unknown; default?: unknown; is_set: boolean | null; is_default: boolean | null }[];
  versions: Record<string, string>;
  environments: Record<string, EnvironmentRecord>;
  inputs: Record<string, string>;
  chat_template: Record<string, unknown>;
  python: string | null;
  platform: string | null;
  host: string | null;
  resumes: { at: string; step: number; checkpoint: string; changed: string[] }[];
}
