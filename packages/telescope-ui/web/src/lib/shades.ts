/** What the color of a token means, for each value that it can have. */

import { extent } from "./scales.ts";
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

/** How strong the color of each token is, from -1 to 1; null = it has none. */
export function levelsOf(chain: Chain, name: string): (number | null)[] {
  const { shade } = meaningOf(name);
  // A ratio of 1 is what a token without a change has.
  const zero = name === "ratio" ? 1 : 0;
  const values = valuesOf(chain, name).map((one) => (one === null ? null : one - zero));
  const [low, high] = extent([values]) ?? [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return values.map((value) => {
    if (value === null) return null;
    // -4 nats is one in fifty: what is rarer is all of one color.
    if (shade === "surprise") return Math.min(1, -value / 4);
    if (shade === "around") return value / size;
    if (shade === "yes") return value;
    return (value - low) / (high - low);
  });
}
