/** What the color of a token means, for each value that it can have. */

import type { Chain } from "./types.ts";

/** `surprise`: from 0 down. `around`: two hues around 0. `range`: lowest to highest. `yes`: or no. */
export type Shade = "surprise" | "around" | "range" | "yes";

interface Meaning {
  shade: Shade;
  /** What the two ends of the scale are. */
  ends: [string, string];
  /** What the value is, in a sentence. */
  says: string;
}

const MEANINGS: Record<string, Meaning> = {
  "log-prob": {
    shade: "surprise",
    ends: ["sure", "surprised"],
    says: "How likely the server found each token when it sampled it.",
  },
  "trainer log-prob": {
    shade: "surprise",
    ends: ["sure", "surprised"],
    says: "How likely the trainer found each token when it began to train on it.",
  },
  "entropy": {
    shade: "range",
    ends: ["decided", "undecided"],
    says: "How open the trainer was at each token about what comes next, in nats.",
  },
  "ratio": {
    shade: "around",
    ends: ["less likely in the trainer", "likelier"],
    says: "How many times as likely the trainer found each token as the server did: 1 is the same.",
  },
  "advantage": {
    shade: "around",
    ends: ["below 0", "above 0"],
    says: "How much better its rollout was than what it is compared with.",
  },
  "effect": {
    shade: "around",
    ends: ["pushed down", "pushed up"],
    says:
      "How hard the loss pushed the log-prob of each token: the advantage, with ratios and corrections. " +
      "It is 0 where a clip or a mask took the token out.",
  },
  "weight": {
    shade: "range",
    ends: ["lowest", "highest"],
    says: "Share of each token in the loss of its optimizer step.",
  },
  "mask": {
    shade: "yes",
    ends: ["not in the loss", "in the loss"],
    says: "Which of the tokens that the model wrote the step was trained on.",
  },
  "version": {
    shade: "range",
    ends: ["oldest", "newest"],
    says: "Which weights sampled each token.",
  },
};

const UNKNOWN: Meaning = { shade: "around", ends: ["below 0", "above 0"], says: "" };

export const meaningOf = (name: string): Meaning => MEANINGS[name] ?? UNKNOWN;

/** The values that tokens of a chain can be colored by: those of which something is known. */
export function namesOf(chain: Chain): string[] {
  return [
    "log-prob",
    ...(chain.mask ? ["mask"] : []),
    ...(chain.versions ? ["version"] : []),
    ...(chain.advantage === null ? [] : ["advantage"]),
    ...Object.keys(chain.columns),
  ];
}

/** One value for each token of a chain, null where it has none. */
export function valuesOf(chain: Chain, name: string): (number | null)[] {
  if (name === "log-prob") return chain.logprobs;
  if (name === "mask") return chain.mask ?? [];
  if (name === "version") return chain.versions ?? [];
  if (name === "advantage" && !chain.columns["advantage"]) {
    return chain.is_sampled.map((one) => (one ? chain.advantage : null));
  }
  return chain.columns[name] ?? [];
}

/** Nats at which a fixed scale of surprise ends: one in fifty. What is rarer is all of one color. */
const RAREST = -4;

/** Which color each value has. The legend shows `steps`, so that it says what the colors say. */
export interface TokenScale {
  /** How strong the color of a value is, from -1 to 1. */
  levelOf: (value: number) => number;
  /** Values from one end of the scale to the other. */
  steps: number[];
  /** Whether it may be taken from the rollout in place of fixed values. */
  canFit: boolean;
}

/** Return the scale of a value. `fits`: it ends at the least likely token of the chain. */
export function scaleOf(chain: Chain, name: string, fits = false): TokenScale {
  const { shade } = meaningOf(name);
  const known = valuesOf(chain, name).filter((one) => one !== null && Number.isFinite(one)) as number[];
  const low = known.reduce((a, b) => Math.min(a, b), known[0] ?? 0);
  const high = known.reduce((a, b) => Math.max(a, b), low);
  if (shade === "yes") return { levelOf: (value) => value, steps: [0, 1], canFit: false };
  if (shade === "surprise") {
    const end = fits && low < 0 ? low : RAREST;
    return { levelOf: (value) => Math.min(1, value / end), steps: between(0, end, 5), canFit: true };
  }
  if (shade === "around") {
    // A ratio of 1 is what a token without a change has.
    const zero = name === "ratio" ? 1 : 0;
    const size = Math.max(Math.abs(low - zero), Math.abs(high - zero)) || 1;
    const levelOf = (value: number) => (value - zero) / size;
    return { levelOf, steps: between(zero - size, zero + size, 7), canFit: false };
  }
  if (low === high) return { levelOf: () => 0.5, steps: [low], canFit: false };
  return { levelOf: (value) => (value - low) / (high - low), steps: between(low, high, 6), canFit: false };
}

function between(from: number, to: number, count: number): number[] {
  return Array.from({ length: count }, (_, at) => from + ((to - from) * at) / (count - 1));
}

/** How strong the color of each token is, from -1 to 1; null = it has none. */
export function levelsOf(chain: Chain, name: string, fits = false): (number | null)[] {
  const { levelOf } = scaleOf(chain, name, fits);
  return valuesOf(chain, name).map((value) => (value === null ? null : levelOf(value)));
}

/** Positions of the tokens that the model found least likely, the least likely first. */
export function mostSurprising(chain: Chain, count: number): number[] {
  return chain.logprobs
    .map((value, at) => ({ value, at }))
    .filter((one): one is { value: number; at: number } => one.value !== null)
    .sort((one, other) => one.value - other.value)
    .slice(0, count)
    .map((one) => one.at);
}
