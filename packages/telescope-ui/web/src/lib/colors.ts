/** Colors that differ for most kinds of color vision, on light and dark grounds. */

/** Names of CSS variables; app.css gives them for both grounds. */
export const NUM_COLORS = 8;

export const seriesColor = (at: number): string => `var(--series-${at % NUM_COLORS})`;

/** How a name looks on a timeline: a color, and lines over it. */
export interface Look {
  color: number;
  /** 0 = plain, 1 = upright lines, 2 = a line along the middle, 3 = dots. */
  pattern: number;
}

export const NUM_PATTERNS = 4;

/** What matters for where the time goes is plain; its parts have lines. No two look alike. */
const FIXED: Record<string, Look> = {
  "call": { color: 0, pattern: 0 },
  "train": { color: 1, pattern: 0 },
  "forward": { color: 2, pattern: 0 },
  "evals": { color: 3, pattern: 0 },
  "backward": { color: 4, pattern: 0 },
  "environment": { color: 5, pattern: 0 },
  "publish weights": { color: 6, pattern: 0 },
  "wait for rollouts": { color: 7, pattern: 0 },
  "logprobs": { color: 0, pattern: 1 },
  "optimizer": { color: 1, pattern: 1 },
  "forward and backward": { color: 2, pattern: 1 },
  "lost": { color: 3, pattern: 1 },
  "write checkpoint": { color: 4, pattern: 1 },
  "scoring": { color: 5, pattern: 1 },
  "send weights": { color: 6, pattern: 1 },
  "credit and packing": { color: 7, pattern: 1 },
  "starting": { color: 0, pattern: 2 },
  "gradient norm": { color: 1, pattern: 2 },
  "given up": { color: 3, pattern: 2 },
  "copy for checkpoint": { color: 4, pattern: 2 },
  "drawn": { color: 5, pattern: 2 },
  "updating": { color: 6, pattern: 2 },
  "after the step": { color: 7, pattern: 2 },
  "loading": { color: 0, pattern: 3 },
  "gradient reduction": { color: 1, pattern: 3 },
  "load checkpoint": { color: 4, pattern: 3 },
  "waiting": { color: 5, pattern: 3 },
  "stage weights": { color: 6, pattern: 3 },
  "metrics": { color: 7, pattern: 3 },
};

/** How each of `names`, which stand on one page, looks: always the same, and no two alike as long as there are looks left. */
export function looksOf(names: Iterable<string>): Map<string, Look> {
  const found = new Map<string, Look>();
  const taken = new Set<number>();
  const others: string[] = [];
  for (const name of new Set(names)) {
    const look = Object.hasOwn(FIXED, name) ? FIXED[name] : undefined;
    if (look) {
      found.set(name, look);
      taken.add(look.pattern * NUM_COLORS + look.color);
    } else others.push(name);
  }
  const count = NUM_COLORS * NUM_PATTERNS;
  for (const name of others.sort()) {
    let hash = 2166136261;
    for (let at = 0; at < name.length; at++) hash = Math.imul(hash ^ name.charCodeAt(at), 16777619);
    let at = (hash >>> 0) % count;
    while (taken.has(at) && taken.size < count) at = (at + 1) % count;
    taken.add(at);
    found.set(name, { color: at % NUM_COLORS, pattern: Math.floor(at / NUM_COLORS) });
  }
  return found;
}

/** Part of a scale from -1 (one hue) over 0 (none) to 1 (another), as a class of 13 in app.css. */
export function shadeClass(value: number): string {
  const level = Math.round(Math.max(-1, Math.min(1, value)) * 6);
  return level < 0 ? `shade-n${-level}` : `shade-p${level}`;
}
