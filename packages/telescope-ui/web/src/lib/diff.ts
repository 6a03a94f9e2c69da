/** What differs between two texts, by words: the shortest edit of one into the other. */

export interface Piece {
  kind: "same" | "left" | "right";
  text: string;
}

/** Return how many characters two texts begin with alike, up to the end of a word. */
export function alikeUpTo(left: string, right: string): number {
  let at = 0;
  while (at < left.length && at < right.length && left[at] === right[at]) at++;
  if (at === left.length || at === right.length) return at;
  const word = /[\p{L}\p{N}_]*$/u.exec(left.slice(Math.max(0, at - 100), at));
  return at - (word?.[0].length ?? 0);
}

/** Edits beyond this are not looked for: the rest is then shown as changed as a whole. */
const MAX_EDITS = 800;

export function words(text: string): string[] {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

export function diffTexts(left: string, right: string): Piece[] {
  return diff(words(left), words(right));
}

export function diff(left: readonly string[], right: readonly string[]): Piece[] {
  let start = 0;
  while (start < left.length && start < right.length && left[start] === right[start]) start++;
  let end = 0;
  const most = Math.min(left.length, right.length) - start;
  while (end < most && left[left.length - 1 - end] === right[right.length - 1 - end]) end++;
  const pieces: Piece[] = [];
  add(pieces, "same", left.slice(0, start));
  middle(pieces, left.slice(start, left.length - end), right.slice(start, right.length - end));
  add(pieces, "same", left.slice(left.length - end));
  return pieces;
}

function add(pieces: Piece[], kind: Piece["kind"], parts: readonly string[]): void {
  if (!parts.length) return;
  const last = pieces[pieces.length - 1];
  const text = parts.join("");
  if (last?.kind === kind) last.text += text;
  else pieces.push({ kind, text });
}

/** Myers' greedy search: `reached[k]` is how far one gets on diagonal k with so many edits. */
function middle(pieces: Piece[], left: readonly string[], right: readonly string[]): void {
  const most = Math.min(MAX_EDITS, left.length + right.length);
  const reached = new Map<number, number>([[1, 0]]);
  const history: Map<number, number>[] = [];
  for (let edits = 0; edits <= most; edits++) {
    history.push(new Map(reached));
    for (let k = -edits; k <= edits; k += 2) {
      const down = reached.get(k + 1) ?? -1;
      const along = reached.get(k - 1) ?? -1;
      let x = k === -edits || (k !== edits && along < down) ? down : along + 1;
      while (x < left.length && x - k < right.length && left[x] === right[x - k]) x++;
      reached.set(k, x);
      if (x >= left.length && x - k >= right.length) {
        follow(pieces, left, right, history);
        return;
      }
    }
  }
  add(pieces, "left", left);
  add(pieces, "right", right);
}

function follow(
  pieces: Piece[],
  left: readonly string[],
  right: readonly string[],
  history: readonly Map<number, number>[],
): void {
  const steps: { kind: Piece["kind"]; text: string }[] = [];
  let x = left.length;
  let y = right.length;
  for (let edits = history.length - 1; edits >= 0; edits--) {
    const reached = history[edits] ?? new Map<number, number>();
    const k = x - y;
    const down = reached.get(k + 1) ?? -1;
    const along = reached.get(k - 1) ?? -1;
    const isDown = k === -edits || (k !== edits && along < down);
    const fromX = edits === 0 ? 0 : isDown ? down : along;
    const fromY = edits === 0 ? 0 : fromX - (isDown ? k + 1 : k - 1);
    while (x > fromX && y > fromY && left[x - 1] === right[y - 1]) {
      steps.push({ kind: "same", text: left[--x] ?? "" });
      y--;
    }
    if (edits === 0) break;
    if (isDown) steps.push({ kind: "right", text: right[--y] ?? "" });
    else steps.push({ kind: "left", text: left[--x] ?? "" });
  }
  for (const step of steps.reverse()) add(pieces, step.kind, [step.text]);
}
