/** What is known of each turn of a conversation: how long it was and took, and whether it was cut. */

import { rowsOf, type Cell } from "./columns.ts";
import type { RolloutPage } from "./types.ts";

export interface Turn {
  /** 1 = the first. */
  number: number;
  finish: string;
  numTokens: number | null;
  duration_s: number | null;
  server: string;
}

/** Return the turns by the position of their message; none where it is not known which message is whose. */
export function turnsOf({ row, messages, conversations, calls, tokens }: RolloutPage): Map<number, Turn> {
  const found = new Map<number, Turn>();
  const places = messages.flatMap((message, at) => (message.role === "assistant" ? [at] : []));
  const count = row.finish_reasons.length;
  // The first messages may be of an example that the prompt shows; the last ones are those of the turns.
  if (conversations.length || count !== row.num_turns || places.length < count) return found;
  const answered = new Map<number, Record<string, Cell>>();
  for (const call of rowsOf<Record<string, Cell>>(calls.columns)) {
    if (!call["error"]) answered.set(Number(call["call"]), call);
  }
  row.finish_reasons.forEach((finish, turn) => {
    const call = answered.get(turn + 1);
    const place = tokens?.turns[turn];
    const counted = call?.["num_completion_tokens"] ?? (place ? place.completion_end - place.prompt_end : null);
    found.set(places[places.length - count + turn] ?? 0, {
      number: turn + 1,
      finish,
      numTokens: counted === null ? null : Number(counted),
      duration_s: typeof call?.["duration_s"] === "number" ? call["duration_s"] : null,
      server: String(call?.["server"] ?? ""),
    });
  });
  return found;
}
