/** What the color of a token means, for each value that it can have. */

import type { Chain } from "./types.ts";

/** `surprise`: from 0 down. `around`: two hues around 0. `range`: lowest to highest. `yes`: or no. */
export type Shade = "surprise" | "around" | "range" | "yes";

export function shadesOf(name: string): Shade {
  if (name === "log-prob" || name.endsWith("logprob")) return "surprise";
  if (name === "mask") return "yes";
  return name === "version" || name === "entropy" ? "range" : "around";
}

/** One value for each token of a chain, null where it has none. */
export function valuesOf(chain: Chain, name: string): (number | null)[] {
  if (name === "log-prob") return chain.logprobs;
  if (name === "mask") return chain.is_sampled.map((one) => (one ? 1 : 0));
  if (name === "version") return chain.versions ?? [];
  if (name === "advantage" && !chain.columns["advantage"]) {
    return chain.is_sampled.map((one) => (one ? chain.advantage : null));
  }
  const values = chain.columns[name] ?? [];
  // A ratio of 1 is what a token without a change has.
  return name === "ratio" ? values.map((one) => (one === null ? null : one - 1)) : values;
}
