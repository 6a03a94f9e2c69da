/** Colors that differ for most kinds of color vision, on light and dark grounds. */

/** Names of CSS variables; app.css gives them for both grounds. */
export const NUM_COLORS = 8;

export const seriesColor = (at: number): string => `var(--series-${at % NUM_COLORS})`;

/** Names that stand beside each other on a timeline, so that each has a color of its own. */
const FIXED: Record<string, number> = {
  "backward": 4,
  "call": 0,
  "drawn": 7,
  "environment": 2,
  "evals": 6,
  "forward": 2,
  "generate": 7,
  "generating": 0,
  "gradient norm": 6,
  "gradient reduction": 7,
  "log-probs": 5,
  "lost": 1,
  "optimizer": 3,
  "publish weights": 6,
  "scoring": 4,
  "send weights": 6,
  "train": 1,
  "updating": 6,
  "wait for rollouts": 7,
  "waiting": 7,
  "weights": 6,
};

/** A stable color for a name: the same on every page and in every run. */
export function nameColor(name: string): number {
  const fixed = FIXED[name];
  if (fixed !== undefined) return fixed;
  let hash = 2166136261;
  for (let at = 0; at < name.length; at++) {
    hash = Math.imul(hash ^ name.charCodeAt(at), 16777619);
  }
  return (hash >>> 0) % NUM_COLORS;
}

/** Part of a scale from -1 (one hue) over 0 (none) to 1 (another), as a class of 13 in app.css. */
export function shadeClass(value: number): string {
  const level = Math.round(Math.max(-1, Math.min(1, value)) * 6);
  return level < 0 ? `shade-n${-level}` : `shade-p${level}`;
}
