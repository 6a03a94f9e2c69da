/** What the server sends about evals; docs/reference/ui-addresses.md says what each means. */

import type { Columns } from "./columns.ts";
import type { RunOf } from "./types.ts";

export interface Verdict {
  measure: string;
  change: number;
  is_shown: boolean;
  sentence: string;
  against: string;
}

export interface Estimate {
  mean: number;
  low: number;
  high: number;
  num_tasks: number;
}

export interface EvalPoint {
  folder: string | null;
  tag: string;
  version: number | null;
  state: string;
  reason: string;
  time_s: number | null;
  measure: string | null;
  mean: number | null;
  low: number | null;
  high: number | null;
  num_tasks: number | null;
  reward: Estimate | null;
  pass_at: Record<string, Estimate | null>;
  num_scored: number | null;
  num_failed: number | null;
  duration_s: number | null;
  versus_first: Verdict | null;
  versus_previous: Verdict | null;
  address: string | null;
}

export interface EvalsPage {
  run: RunOf;
  evals: { name: string; points: EvalPoint[] }[];
}

/** Rollouts of an eval in which somebody says something. */
export interface EvalRolloutsPage {
  columns: Columns;
  search: { next_cursor: string | null; num_searched: number; num_rollouts: number; is_complete: boolean };
}

export interface EvalPage {
  run: RunOf;
  folder: string;
  tag: string;
  version: number | null;
  environment: string | null;
  result: Record<string, unknown> | null;
  so_far: { num_rollouts: number; num_scored: number; reward: number | null };
  against: string | null;
  verdicts: Verdict[];
  cautions: string[];
  flips: { columns: Columns };
  /** Null, as `num_lost`, where nothing was compared. */
  num_gained: number | null;
  num_lost: number | null;
  tasks: { columns: Columns };
  others: string[];
  /** What it and the others are called, by their folders or keys. */
  titles: Record<string, string>;
  /** What an eval without a run was started with. */
  settings: Record<string, unknown>;
  address: string;
  problems: string[];
}
