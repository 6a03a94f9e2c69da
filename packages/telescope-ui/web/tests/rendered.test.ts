import assert from "node:assert/strict";
import { test } from "node:test";
import { alikeUpTo } from "../src/lib/diff.ts";
import { formulaOf, type MathNode } from "../src/lib/latex.ts";
import { blocksOf, indentedJson, inlinesOf, type Block, type Inline } from "../src/lib/markdown.ts";
import { turnsOf } from "../src/lib/turns.ts";
import type { RolloutPage } from "../src/lib/types.ts";

/** All text of a tree, in order. */
function textOf(tree: unknown): string {
  if (typeof tree === "string") return tree;
  if (Array.isArray(tree)) return tree.map(textOf).join("");
  if (tree === null || typeof tree !== "object") return "";
  const { text, children, items, head, rows } = tree as Record<string, unknown>;
  return [text, children, items, head, rows].map((one) => (one === undefined ? "" : textOf(one))).join("");
}

/** Short names of blocks and inlines. */
function shape(text: string): unknown {
  const inline = (one: Inline): unknown => ("children" in one ? [one.kind, ...one.children.map(inline)] : one.kind === "text" ? one.text : [one.kind, one.text]);
  const block = (one: Block): unknown => {
    if (one.kind === "list") return [one.start === null ? "ul" : `ol ${one.start}`, ...one.items.map((item) => item.map(block))];
    if (one.kind === "table") return ["table", one.head.map((cell) => cell.map(inline)), ...one.rows.map((row) => row.map((cell) => cell.map(inline)))];
    if (one.kind === "code") return ["code", one.language, one.text];
    if (one.kind === "math") return ["math", one.text];
    if (one.kind === "quote") return ["quote", ...one.children.map(block)];
    if (one.kind === "rule") return ["rule"];
    return [one.kind === "heading" ? `h${one.level}` : "p", ...one.children.map(inline)];
  };
  return blocksOf(text).map(block);
}

test("Markdown of answers becomes blocks", () => {
  const cases: [string, unknown][] = [
    ["a\nb\n\nc", [["p", "a\nb"], ["p", "c"]]],
    ["## So **bold** and `x*y`", [["h2", "So ", ["strong", "bold"], " and ", ["code", "x*y"]]]],
    ["```python\nif a < b:\n    x = '$1 $2'\n```\nend", [["code", "python", "if a < b:\n    x = '$1 $2'"], ["p", "end"]]],
    ["~~~\nnever closed", [["code", "", "never closed"]]],
    ["- a\n- b\n  - c\n\nd", [["ul", [["p", "a"]], [["p", "b"], ["ul", [["p", "c"]]]]], ["p", "d"]]],
    ["3. x\n4. y", [["ol 3", [["p", "x"]], [["p", "y"]]]]],
    ["> so\n> it is", [["quote", ["p", "so\nit is"]]]],
    ["| a | b |\n|---|:-:|\n| 1 | *2* |", [["table", [["a"], ["b"]], [["1"], [["em", "2"]]]]]],
    ["---", [["rule"]]],
    ["$$\nx^2\n$$", [["math", "\nx^2\n"]]],
    ["\\[ a = b \\]", [["math", " a = b "]]],
    ["so \\(x\\) and $y_1$, but $5 and $10.", [["p", "so ", ["math", "x"], " and ", ["math", "y_1"], ", but $5 and $10."]]],
  ];
  for (const [text, expected] of cases) assert.deepEqual(shape(text), expected, text);
});

test("what is no Markdown stays the text that it is", () => {
  for (const text of [
    "3*4*5 = 60", "a_b_c and __init__x", "** not bold **", "<think>x</think>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))",
    "![a](http://evil.example/x.png)", "http://evil.example", "a | b", "2 > 1", "#hashtag", "-5", "$", "$$", "`", "*", "100% & more", "\\frac{1}{2}",
  ]) {
    assert.deepEqual(shape(text), [["p", text]], text);
  }
});

test("nothing of a text is lost, and hostile ones take no longer than others", () => {
  const parts = ["*", "**", "_", "`", "```\n", "$", "$$", "\\[", "\\(", "> ", "- ", "1. ", "|", "\n", "a ", "~~", "#", "  ", "\\", "]", "}"];
  let seed = 1;
  const next = (below: number) => (seed = (seed * 48271) % 2147483647) % below;
  for (let round = 0; round < 300; round++) {
    const text = Array.from({ length: 1 + next(60) }, () => parts[next(parts.length)] ?? "").join("");
    const letters = (one: string) => one.replace(/[^a]/g, "");
    // A word behind ``` is the name of a language.
    if (!text.includes("```")) assert.equal(letters(textOf(blocksOf(text))), letters(text), JSON.stringify(text));
  }
  for (const part of [...parts, "**a", "*a ", "`a``b", "$a ", "\\[ x\n", "> > ", "[x](y) ", "<b>", "- - "]) {
    const text = part.repeat(100_000 / part.length);
    assert.ok(blocksOf(text).length > 0 || !text.trim(), part);
    formulaOf(text);
  }
});

/** A formula as nested names: `mfrac(1, 2)`. */
const written = ({ tag, text, children }: MathNode): string =>
  text === undefined ? `${tag}(${(children ?? []).map(written).join(", ")})` : text;
const formula = (source: string): string | null => {
  const found = formulaOf(source);
  return found && written({ tag: "mrow", children: found.children ?? [] }).slice(5, -1);
};

test("formulas become trees", () => {
  const cases: [string, string | null][] = [
    ["\\frac{1}{2}", "mfrac(mrow(1), mrow(2))"],
    ["\\frac12", "mfrac(1, 2)"],
    ["x_1^{2n}", "msubsup(x, 1, mrow(2, n))"],
    ["2^10", "msup(2, 1), 0"],
    ["\\sqrt[3]{8} \\le \\pi", "mroot(mrow(8), mrow(3)), \u2264, \u03c0"],
    ["\\sum_{i=1}^n i", "munderover(\u2211, mrow(i, =, 1), n), i"],
    ["\\boxed{42}", "mrow(mrow(42))"],
    ["\\left( \\frac{a}{b} \\right]", "mrow((, mfrac(mrow(a), mrow(b)), ])"],
    ["\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "mrow((, mtable(mtr(mtd(mrow(1)), mtd(mrow(2))), mtr(mtd(mrow(3)), mtd(mrow(4)))), ))"],
    ["\\text{if } x", "if , x"],
    ["f'(x)", "msup(f, \u2032), (, x, )"],
    ["\\unknown{x}", "\\unknown, mrow(x)"],
    ["5\\%", "5, %"],
    ["{", null], ["}", null], ["\\frac{1}", null], ["x^", null], ["a & b", null], ["\\left(", null], ["\\begin{x}y\\end{x}", null],
    ["{".repeat(1000) + "}".repeat(1000), null], ["x".repeat(5000), null],
  ];
  for (const [source, expected] of cases) assert.equal(formula(source), expected, source.slice(0, 60));
});

test("a formula has no element and no attribute but those of formulas", () => {
  const tags = new Set<string>();
  const attributes = new Set<string>();
  const walk = (node: MathNode) => {
    tags.add(node.tag);
    for (const name of Object.keys(node.attributes ?? {})) attributes.add(name);
    node.children?.forEach(walk);
  };
  for (const source of [
    "\\href{javascript:alert(1)}{x}", "\\url{x}", "\\html{<script>}", "\\htmlStyle{a}{b}", "\\includegraphics{x}", "\\class{a}{b}", "<script>alert(1)</script>",
    "\\def\\x{\\x\\x}\\x", "\\newcommand{\\a}{b}", "\\text{<img src=x onerror=alert(1)>}", "\\constructor \\__proto__ \\toString", "\\sqrt[n]{x}\\binom{n}{k}\\bar{x}",
    "\\begin{cases} a \\\\ b \\end{cases}\\left|x\\right|\\quad\\mathbf{x}\\sum\\boxed{1}",
  ]) {
    const found = formulaOf(source);
    if (found) walk(found);
  }
  assert.ok([...tags].every((tag) => /^m[a-z]+$/.test(tag) && tag !== "maction" && tag !== "mglyph"), [...tags].join(" "));
  assert.deepEqual([...attributes].filter((name) => !["stretchy", "largeop", "width", "accent", "linethickness", "class"].includes(name)), []);
  assert.ok(written(formulaOf("\\href{javascript:alert(1)}{x}") as MathNode).includes("\\href"));
});

test("JSON has a line for each member, with its digits and texts as they were", () => {
  assert.equal(indentedJson('{"a":[1,{"b":"x, \\"y\\": {}"}],"big":12345678901234567890.10,"e":{},"l":[]}'),
    '{\n  "a": [\n    1,\n    {\n      "b": "x, \\"y\\": {}"\n    }\n  ],\n  "big": 12345678901234567890.10,\n  "e": {},\n  "l": []\n}');
  for (const text of ["{", "x", '{"a": 1} and more', "", "12", "[1,]"]) assert.equal(indentedJson(text), null, text);
});

test("each turn has its message, its tokens and its time, and the first one that the prompt shows has none", () => {
  const page = {
    row: { num_turns: 2, finish_reasons: ["tool_calls", "length"] },
    messages: ["user", "assistant", "user", "assistant", "tool", "assistant"].map((role) => ({ role })),
    conversations: [],
    calls: { columns: { call: [1, 1, 2], error: ["late", "", ""], duration_s: [9, 1.5, 2], num_completion_tokens: [0, 30, 40], server: ["a", "b", "c"] } },
    tokens: null,
  } as unknown as RolloutPage;
  const found = turnsOf(page);
  assert.deepEqual([...found.keys()], [3, 5]);
  assert.deepEqual([found.get(3)?.numTokens, found.get(3)?.duration_s, found.get(3)?.server], [30, 1.5, "b"]);
  assert.equal(found.get(5)?.finish, "length");
  assert.equal(turnsOf({ ...page, messages: page.messages.slice(0, 2) }).size, 0);
  const tokens = { turns: [{ chain: 0, prompt_end: 3, completion_end: 5 }, null] } as never;
  const without = turnsOf({ ...page, tokens, calls: { columns: {} } });
  assert.deepEqual([without.get(3)?.numTokens, without.get(5)?.numTokens, without.get(3)?.duration_s], [2, null, null]);
});

test("texts are alike up to the end of a word", () => {
  assert.equal(alikeUpTo("the answer is 42", "the answer is 17"), 14);
  assert.equal(alikeUpTo("the answers are", "the answer is"), 4);
  assert.equal(alikeUpTo("same", "same"), 4);
  assert.equal(alikeUpTo("same", "same and more"), 4);
  assert.equal(alikeUpTo("", "x"), 0);
});

test("emphasis is read inside of other emphasis", () => {
  assert.deepEqual(inlinesOf("**a *b* c**"), [
    { kind: "strong", children: [{ kind: "text", text: "a " }, { kind: "em", children: [{ kind: "text", text: "b" }] }, { kind: "text", text: " c" }] },
  ]);
});
