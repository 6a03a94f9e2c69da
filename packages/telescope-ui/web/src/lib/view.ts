/** How the charts of a page are drawn: which steps, over what, how smooth. It is in the address. */

import type { Series } from "../components/Chart.tsx";
import { withQuery } from "./address.ts";

export interface View {
  /** Steps that are drawn, both included; null = all there are on that side. */
  from: number | null;
  to: number | null;
  isInHours: boolean;
  /** The axis of values: the whole range that a metric has, what is drawn of it, or powers of ten. */
  scale: "range" | "fit" | "log";
  /** Whether moving averages are drawn. */
  isSmooth: boolean;
}

const SCALES = ["range", "fit", "log"] as const;

function stepIn(query: URLSearchParams, name: string): number | null {
  const text = query.get(name);
  return text !== null && /^-?\d+$/.test(text) ? Number(text) : null;
}

export function viewOf(query: URLSearchParams): View {
  return {
    from: stepIn(query, "from"),
    to: stepIn(query, "to"),
    isInHours: query.get("ui.x") === "hours",
    scale: SCALES.find((one) => one === query.get("ui.y")) ?? "range",
    isSmooth: query.get("smooth") !== "1",
  };
}

export const isZoomed = (view: View): boolean => view.from !== null || view.to !== null;

/** The address of the page with another part of the run; null = all of it. */
export function zoomed(address: string, steps: [number, number] | null): string {
  return withQuery(address, { from: steps?.[0] ?? null, to: steps?.[1] ?? null });
}

interface Course {
  steps: number[];
  times_s?: (number | null)[];
  values: (number | null)[];
  smooth?: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
}

/** Hours from the beginning of the run to each step; null where that is not known. A fork has steps from before its own. */
export function hoursOf(times_s: readonly (number | null)[], started_s: number | null): (number | null)[] {
  const known = [started_s, times_s.find((one) => one !== null) ?? null].filter((one) => one !== null);
  const first = known.length ? Math.min(...known) : null;
  return times_s.map((one) => (one === null || first === null ? null : (one - first) / 3600));
}

/** Return what of a course is in the view. An export gives all of it, whatever the view is. */
export function seriesOf(name: string, course: Course, view: View, started_s: number | null): Series {
  const { steps, times_s = [] } = course;
  const hours = view.isInHours ? hoursOf(times_s, started_s) : null;
  const within = steps.flatMap((step, at) => {
    const isIn = (view.from === null || step >= view.from) && (view.to === null || step <= view.to);
    return isIn && (hours === null || (hours[at] ?? null) !== null) ? [at] : [];
  });
  const part = <T>(values: readonly T[] | undefined): T[] | undefined =>
    values?.length ? within.map((at) => values[at] as T) : undefined;
  return {
    name,
    xs: within.map((at) => (hours ? (hours[at] ?? 0) : (steps[at] ?? 0))),
    steps: within.map((at) => steps[at] ?? 0),
    ys: part(course.values) ?? [],
    smooth: view.isSmooth ? part(course.smooth) : undefined,
    low: part(course.low),
    high: part(course.high),
  };
}

/** Where a step is on the axis of `series`, or null if it is outside. */
export function placeOf(step: number, series: Series, view: View): number | null {
  if ((view.from !== null && step < view.from) || (view.to !== null && step > view.to)) return null;
  const steps = series.steps ?? series.xs;
  if (!view.isInHours) return step;
  const after = steps.findIndex((one) => one >= step);
  return series.xs[after < 0 ? steps.length - 1 : after] ?? null;
}
