import assert from "node:assert/strict";
import { test } from "node:test";
import { diff, diffTexts, words, type Piece } from "../src/lib/diff.ts";

const side = (pieces: Piece[], other: string) =>
  pieces.filter((piece) => piece.kind !== other).map((piece) => piece.text).join("");

/** The length of the longest common subsequence, the slow and obvious way. */
function longest(left: string[], right: string[]): number {
  const table = left.map(() => right.map(() => 0));
  const at = (i: number, j: number) => (i < 0 || j < 0 ? 0 : (table[i]?.[j] ?? 0));
  left.forEach((one, i) =>
    right.forEach((other, j) => {
      const row = table[i];
      if (row) row[j] = one === other ? at(i - 1, j - 1) + 1 : Math.max(at(i - 1, j), at(i, j - 1));
    }),
  );
  return at(left.length - 1, right.length - 1);
}

test("both sides can be read back, and no more than needed is changed", () => {
  let seed = 7;
  const random = (n: number) => (seed = (seed * 48271) % 2147483647) % n;
  for (let round = 0; round < 300; round++) {
    const text = () => Array.from({ length: random(14) }, () => "abc"[random(3)] ?? "a");
    const [left, right] = [text(), text()];
    const pieces = diff(left, right);
    assert.equal(side(pieces, "right"), left.join(""));
    assert.equal(side(pieces, "left"), right.join(""));
    const same = pieces.filter((piece) => piece.kind === "same").reduce((sum, piece) => sum + piece.text.length, 0);
    assert.equal(same, longest(left, right), `${left.join("")} ${right.join("")}`);
  }
});

test("texts without anything in common end soon", () => {
  const left = Array.from({ length: 20_000 }, (_, at) => `a${at}`).join(" ");
  const right = Array.from({ length: 20_000 }, (_, at) => `b${at}`).join(" ");
  const pieces = diffTexts(left, right);
  assert.equal(side(pieces, "right"), left);
  assert.equal(side(pieces, "left"), right);
});

test("words keep everything between them", () => {
  for (const text of ["", "a  b\n", "x=1;\u00e9t\u00e9 \ud83d\ude00!", "\u4e2d\u6587 text"]) {
    assert.equal(words(text).join(""), text);
  }
});
