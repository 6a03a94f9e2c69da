/** What the server sends of the machines of a run: timeline, meters and logs; docs/reference/ui-addresses.md says what each means. */

import type { Columns } from "./columns.ts";
import type { IndexState, RunOf, StepCurves } from "./types.ts";

export interface TimelineRow {
  source: string;
  kind: string;
  label: string;
  num_lanes: number;
  bars: {
    columns: {
      start_s: number[];
      duration_s: number[];
      lane: number[];
      name: string[];
      step: (number | null)[];
      version: (number | null)[];
      note: (string | null)[];
      address: string[];
    };
  };
  density: { bucket: number[]; busy: number[]; name: string[] } | null;
  is_too_wide: boolean;
}

export interface TimelinePage {
  run: RunOf;
  extent: { from: number; to: number } | null;
  from: number;
  to: number;
  bucket_s: number;
  rows: TimelineRow[];
  marks: { time_s: number; kind: string; label: string; address: string }[];
  steps: { columns: { step: number[]; end_s: number[] } };
  /** Of the driver, by the names of its bars; "" = nothing is recorded. */
  time: { name: string; seconds: number }[];
  index: IndexState;
  num_spans: number;
  max_trace_spans: number;
}

export interface InfraPage {
  run: RunOf;
  extent: { from: number; to: number } | null;
  from: number;
  to: number;
  sources: { source: string; kind: string; latest: Record<string, number> }[];
  names: string[];
  is_fleet: boolean;
  series: {
    source: string;
    name: string;
    times_s: number[];
    mean: (number | null)[];
    minimum: (number | null)[];
    maximum: (number | null)[];
  }[];
  fleet: { kind: string; name: string; times_s: number[]; p10: number[]; p50: number[]; p90: number[] }[];
  outliers: { source: string; name: string; value: number; median: number; deviations: number }[];
  servers: {
    server: string;
    role: string;
    life: number;
    state: string;
    version: number | null;
    since_s: number | null;
    reason: string;
    num_lives: number;
    states: { columns: Columns };
  }[];
  queues: StepCurves;
  workers: { environment: string; latest: Record<string, number | null>; curves: StepCurves }[];
}

export interface LogsPage {
  run: RunOf;
  components: { name: string; file: string; bytes: number }[];
  sources: string[];
  lives: number[];
  lines: {
    columns: {
      time_s: (number | null)[];
      level: string[];
      component: string[];
      source: string[];
      life: (number | null)[];
      message: string[];
    };
  };
  older: string | null;
  newer: string;
  is_cut: boolean;
  /** How far back the search got; null if it did not look back. */
  reached_s: number | null;
}
