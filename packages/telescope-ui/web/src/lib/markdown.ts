/**
 * Markdown as a tree of blocks. Only what people and models use in answers is read: markup, links and pictures
 * stay the text that they are, and every line end stays one. Time grows as the text does, whatever is in it.
 */

export type Inline =
  | { kind: "text" | "code"; text: string }
  | { kind: "math"; text: string; isDisplay: boolean }
  | { kind: "strong" | "em" | "strike"; children: Inline[] };

export type Block =
  | { kind: "paragraph"; children: Inline[] }
  | { kind: "heading"; level: number; children: Inline[] }
  | { kind: "code"; language: string; text: string }
  | { kind: "math"; text: string }
  | { kind: "list"; start: number | null; items: Block[][] }
  | { kind: "quote"; children: Block[] }
  | { kind: "table"; head: Inline[][]; rows: Inline[][][] }
  | { kind: "rule" };

const MAX_DEPTH = 8;
/** Lines that are longer are never more than text. */
const MAX_LINE = 4000;
const MAX_FORMULA_LINES = 200;

export function blocksOf(text: string): Block[] {
  return blocks(text.split("\n"), 0);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[ \t]*$/;
const HEADING = /^(#{1,6})[ \t]+(\S.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(\S.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})[ \t]*$/;
const MATH: [RegExp, string][] = [
  [/^[ \t]*\$\$/, "$$"],
  [/^[ \t]*\\\[/, "\\]"],
];

function blocks(lines: readonly string[], depth: number): Block[] {
  const found: Block[] = [];
  let said: string[] = [];
  const flush = () => {
    if (said.length) found.push({ kind: "paragraph", children: inlinesOf(said.join("\n")) });
    said = [];
  };
  const readers = [fenced, formula, heading, rule, ...(depth < MAX_DEPTH ? [quote, list] : []), table];
  const unclosed = new Set<string>();
  for (let at = 0; at < lines.length; ) {
    const line = lines[at] ?? "";
    let next = at;
    if (line.length <= MAX_LINE) {
      for (const read of readers) {
        const one = read(lines, at, depth, unclosed);
        if (!one) continue;
        flush();
        found.push(one.block);
        next = one.next;
        break;
      }
    }
    if (next > at) at = next;
    else {
      if (line.trim()) said.push(line);
      else flush();
      at++;
    }
  }
  flush();
  return found;
}

type Read = { block: Block; next: number } | null;

function fenced(lines: readonly string[], at: number): Read {
  const open = FENCE.exec(lines[at] ?? "");
  if (!open) return null;
  const [, mark = "", language = ""] = open;
  let end = at + 1;
  while (end < lines.length) {
    const close = FENCE.exec((lines[end] ?? "").slice(0, MAX_LINE));
    if (close && !close[2] && close[1]?.startsWith(mark)) break;
    end++;
  }
  // One that the model did not close goes on to the end.
  return { block: { kind: "code", language, text: lines.slice(at + 1, end).join("\n") }, next: end + 1 };
}

function formula(lines: readonly string[], at: number, _depth: number, unclosed: Set<string>): Read {
  for (const [open, close] of MATH) {
    const line = lines[at] ?? "";
    const match = open.exec(line);
    if (!match || unclosed.has(close)) continue;
    const parts = [line.slice(match[0].length)];
    const lastLine = Math.min(lines.length, at + MAX_FORMULA_LINES);
    for (let end = at; end < lastLine; end++) {
      if (end > at) parts.push(lines[end] ?? "");
      const last = parts[parts.length - 1] ?? "";
      const place = last.indexOf(close);
      if (place < 0) continue;
      // What stands behind it on its line makes it a part of a sentence.
      if (last.slice(place + close.length).trim()) return null;
      parts[parts.length - 1] = last.slice(0, place);
      return { block: { kind: "math", text: parts.join("\n") }, next: end + 1 };
    }
    if (lastLine === lines.length) unclosed.add(close);
  }
  return null;
}

function heading(lines: readonly string[], at: number): Read {
  const match = HEADING.exec(lines[at] ?? "");
  if (!match) return null;
  return { block: { kind: "heading", level: (match[1] ?? "").length, children: inlinesOf(match[2] ?? "") }, next: at + 1 };
}

function rule(lines: readonly string[], at: number): Read {
  return RULE.test(lines[at] ?? "") ? { block: { kind: "rule" }, next: at + 1 } : null;
}

function quote(lines: readonly string[], at: number, depth: number): Read {
  let end = at;
  while (/^ {0,3}>/.test(lines[end] ?? "")) end++;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { block: { kind: "quote", children: blocks(inner, depth + 1) }, next: end };
}

function list(lines: readonly string[], at: number, depth: number): Read {
  const first = ITEM.exec(lines[at] ?? "");
  if (!first) return null;
  const [, indent = "", mark = ""] = first;
  const isNumbered = /^\d/.test(mark);
  const items: string[][] = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end] ?? "";
    const item = line.length > MAX_LINE ? null : ITEM.exec(line);
    const inner = items[items.length - 1];
    if (item && (item[1] ?? "").length <= indent.length + 1 && /^\d/.test(item[2] ?? "") === isNumbered) items.push([item[3] ?? ""]);
    else if (inner && !line.trim() && /^ {2,}\S/.test(lines[end + 1] ?? "")) inner.push("");
    else if (inner && /^ {2,}\S/.test(line) && line.search(/\S/) > indent.length) inner.push(line.slice(Math.min(line.search(/\S/), indent.length + mark.length + 1)));
    else break;
  }
  const start = isNumbered ? Number.parseInt(mark, 10) : null;
  return { block: { kind: "list", start, items: items.map((one) => blocks(one, depth + 1)) }, next: end };
}

const cellsOf = (line: string): string[] =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|");

function table(lines: readonly string[], at: number): Read {
  const [head = "", below = ""] = [lines[at], lines[at + 1]];
  if (!head.includes("|") || !below.includes("-") || below.length > MAX_LINE) return null;
  const heads = cellsOf(head);
  const marks = cellsOf(below);
  if (marks.length !== heads.length || !marks.every((one) => /^\s*:?-+:?\s*$/.test(one))) return null;
  let end = at + 2;
  while (end < lines.length && (lines[end] ?? "").includes("|") && (lines[end] ?? "").length <= MAX_LINE) end++;
  const rows = lines.slice(at + 2, end).map((line) => cellsOf(line).map((cell) => inlinesOf(cell.trim())));
  return { block: { kind: "table", head: heads.map((one) => inlinesOf(one.trim())), rows }, next: end };
}

const WORD = /[\p{L}\p{N}]/u;
const ESCAPED = /[!"#%&'*+,\-./:;<=>?@[\]^_`{|}~]/;
const MARKS: [string, "strong" | "em" | "strike"][] = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "strike"],
  ["*", "em"],
  ["_", "em"],
];

export function inlinesOf(text: string, depth = 0): Inline[] {
  const found: Inline[] = [];
  let plain = "";
  const add = (one: Inline) => {
    if (plain) found.push({ kind: "text", text: plain });
    plain = "";
    found.push(one);
  };
  /** Ends that do not come any more, so that each is looked for once. */
  const missing = new Set<string>();
  const find = (end: string, from: number): number => {
    if (missing.has(end)) return -1;
    const place = text.indexOf(end, from);
    if (place < 0) missing.add(end);
    return place;
  };
  for (let at = 0; at < text.length; ) {
    const one = special(text, at, find, depth);
    if (one) {
      add(one.inline);
      at = one.next;
    } else if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else plain += text[at++];
  }
  if (plain) found.push({ kind: "text", text: plain });
  return found;
}

type Find = (end: string, from: number) => number;

function special(text: string, at: number, find: Find, depth: number): { inline: Inline; next: number } | null {
  const sign = text[at];
  if (sign === "\\") {
    const [open, close] = text[at + 1] === "(" ? ["\\(", "\\)"] : ["\\[", "\\]"];
    if (!text.startsWith(open, at)) return null;
    const end = find(close, at + 2);
    if (end < 0) return null;
    return { inline: { kind: "math", text: text.slice(at + 2, end), isDisplay: open === "\\[" }, next: end + 2 };
  }
  if (sign === "`") {
    let width = 1;
    while (text[at + width] === "`") width++;
    const mark = "`".repeat(width);
    const end = find(mark, at + width);
    if (end < 0) return { inline: { kind: "text", text: mark }, next: at + width };
    return { inline: { kind: "code", text: text.slice(at + width, end) }, next: end + width };
  }
  if (sign === "$") return dollars(text, at, find);
  if (depth >= MAX_DEPTH) return null;
  for (const [mark, kind] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    // 3*4*5 and a_b_c are no emphasis: an end of it has something else than a word beside it.
    const before = text[at - 1] ?? "";
    const inside = text[at + mark.length] ?? "";
    if (WORD.test(before) || before === mark[0] || !inside || /\s/.test(inside) || inside === mark[0]) return null;
    const end = find(mark, at + mark.length);
    if (end < 0) return null;
    const [last, after] = [text[end - 1] ?? "", text[end + mark.length] ?? ""];
    if (/\s/.test(last) || WORD.test(after) || after === mark[0]) return null;
    return { inline: { kind, children: inlinesOf(text.slice(at + mark.length, end), depth + 1) }, next: end + mark.length };
  }
  return null;
}

/** A formula between dollars, which amounts of money are not. */
function dollars(text: string, at: number, find: Find): { inline: Inline; next: number } | null {
  const isDisplay = text[at + 1] === "$";
  const mark = isDisplay ? "$$" : "$";
  const start = at + mark.length;
  const end = find(mark, start);
  if (end <= start) return null;
  const inner = text.slice(start, end);
  if (!isDisplay && (/^\s|\s$/.test(inner) || /\d/.test(text[end + 1] ?? "") || inner.includes("\n\n"))) return null;
  return { inline: { kind: "math", text: inner, isDisplay }, next: end + mark.length };
}

/** JSON with a line for each member, digits and texts as they are; null for anything else. */
export function indentedJson(text: string): string | null {
  const trimmed = text.trim();
  if (!/^[{[]/.test(trimmed)) return null;
  try {
    JSON.parse(trimmed);
  } catch {
    return null;
  }
  const tokens = trimmed.match(/"(?:[^"\\]|\\.)*"|[^\s{}[\],:"]+|[{}[\],:]/g) ?? [];
  let shown = "";
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  tokens.forEach((token, at) => {
    const next = tokens[at + 1] ?? "";
    if (token === "{" || token === "[") {
      shown += token;
      if (next === "}" || next === "]") return;
      depth++;
      shown += line();
    } else if (token === "}" || token === "]") {
      const before = tokens[at - 1];
      if (before !== "{" && before !== "[") {
        depth--;
        shown += line();
      }
      shown += token;
    } else if (token === ",") shown += `,${line()}`;
    else if (token === ":") shown += ": ";
    else shown += token;
  });
  return shown;
}
