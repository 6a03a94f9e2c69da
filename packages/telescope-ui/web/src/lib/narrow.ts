/** What an export answers of an address with a query: it has each page once, and some of it can be chosen here. */

import { numRows, type Cell, type Columns } from "./columns.ts";
import type { LogsPage } from "./machineTypes.ts";
import type { RolloutsPage } from "./types.ts";

/** Pages with curves have all metrics there, and draw of them what is asked for. */
const CURVES = ["metric", "section", "points", "from", "to", "smooth"];
/** Parameters that an export answers, by the kind of page. What only says how much is sent means nothing there. */
const ANSWERED: Record<string, readonly string[]> = {
  overview: CURVES,
  compare: [...CURVES, "run"],
  rollouts: [
    ...["step_from", "step_to", "reward_from", "reward_to", "environment", "status", "status_reason", "stop_reason"],
    ...["error", "example_id", "group_id", "truncated", "version", "where", "tag", "sort", "limit", "offset"],
  ],
  logs: ["component", "source", "life", "level", "q", "limit"],
  // Its page has the whole run, and shows a part of it by itself.
  timeline: ["from", "to", "width"],
};

function kindOf(path: string): string {
  const [first, , kind, ...rest] = path.split("/").slice(1);
  if (first === "compare") return "compare";
  if (first !== "runs" || rest.length) return "";
  return kind ?? "overview";
}

/** Names of parameters of `query` that the exported page at `path` cannot answer. */
export function unanswered(path: string, query: URLSearchParams): string[] {
  const known = ANSWERED[kindOf(path)] ?? [];
  return [...new Set(query.keys())].filter((name) => !known.includes(name));
}

/** Return the part of an exported page that `query` asks for. */
export function narrowed(path: string, data: unknown, query: URLSearchParams): unknown {
  if (kindOf(path) === "rollouts") return rolloutsOf(data as RolloutsPage, query);
  if (kindOf(path) === "logs") return linesOf(data as LogsPage, query);
  return data;
}

function chosen(columns: Columns, keep: (at: number) => boolean): number[] {
  return Array.from({ length: numRows(columns) }, (_, at) => at).filter(keep);
}

function taken<T extends Columns>(columns: T, places: readonly number[]): T {
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, places.map((at) => values[at] ?? null)])) as T;
}

const TEXTS = ["environment", "status", "status_reason", "stop_reason", "error", "example_id", "group_id"];
const COMPARED: Record<string, (value: number, than: number) => boolean> = {
  "<=": (value, than) => value <= than,
  ">=": (value, than) => value >= than,
  "!=": (value, than) => value !== than,
  "<": (value, than) => value < than,
  ">": (value, than) => value > than,
  "=": (value, than) => value === than,
};

function rolloutsOf(page: RolloutsPage, query: URLSearchParams): RolloutsPage {
  const columns: Columns = page.columns;
  const number = (name: string, at: number) => {
    const value = columns[name]?.[at] ?? null;
    return value === null ? null : Number(value);
  };
  const tests: ((at: number) => boolean)[] = [];
  const compare = (name: string, sign: string, than: number) =>
    tests.push((at) => {
      const value = number(name, at);
      return value !== null && (COMPARED[sign]?.(value, than) ?? false);
    });
  for (const name of ["step", "reward"]) {
    for (const [end, sign] of [["from", ">="], ["to", "<="]] as const) {
      const asked = query.get(`${name}_${end}`);
      if (asked !== null) compare(name, sign, Number(asked));
    }
  }
  for (const name of TEXTS) {
    const asked = query.getAll(name);
    if (asked.length) tests.push((at) => asked.includes(String(columns[name]?.[at])));
  }
  const truncated = query.get("truncated");
  if (truncated !== null) tests.push((at) => columns["is_truncated"]?.[at] === (truncated === "true"));
  const version = query.get("version");
  if (version !== null) {
    compare("oldest_version", "<=", Number(version));
    compare("newest_version", ">=", Number(version));
  }
  for (const text of query.getAll("where")) {
    // The name of a column may have signs in it, too.
    const match = [...text.matchAll(/<=|>=|!=|<|>|=/g)].find(({ index }) => Object.hasOwn(columns, text.slice(0, index).trim()));
    if (match) compare(text.slice(0, match.index).trim(), match[0], Number(text.slice(match.index + match[0].length)));
  }
  for (const text of query.getAll("tag")) {
    const names = [text, ...[...text.matchAll(/=/g)].map(({ index }) => text.slice(0, index))];
    const name = names.find((one) => Object.hasOwn(columns, `tags/${one}`)) ?? "";
    const own = columns[`tags/${name}`] ?? [];
    tests.push((at) => (own[at] ?? null) !== null && (name === text || String(own[at]) === text.slice(name.length + 1)));
  }
  const places = chosen(columns, (at) => tests.every((test) => test(at)));
  const sort = query.get("sort") ?? "-step";
  const by = columns[sort.replace(/^-/, "")] ?? [];
  places.sort((one, other) => ordered(by[one] ?? null, by[other] ?? null, sort.startsWith("-")) || one - other);
  const offset = Number(query.get("offset") ?? 0);
  const limit = Number(query.get("limit") ?? places.length);
  const counts = { total: places.length, num_of_run: page.total ?? places.length, num_of_export: numRows(columns) };
  return { ...page, ...counts, columns: taken(page.columns, places.slice(offset, offset + limit)) };
}

/** What is not known comes last, in either order. */
function ordered(one: Cell, other: Cell, isDown: boolean): number {
  if (one === null || other === null) return Number(one === null) - Number(other === null);
  const order = one < other ? -1 : one > other ? 1 : 0;
  return isDown ? -order : order;
}

const LEVELS = ["debug", "info", "warning", "error"];

function linesOf(page: LogsPage, query: URLSearchParams): LogsPage {
  const columns = page.lines.columns;
  const text = (query.get("q") ?? "").toLowerCase();
  const least = LEVELS.indexOf(query.get("level") ?? "debug");
  const [components, sources, lives] = ["component", "source", "life"].map((name) => query.getAll(name)) as [string[], string[], string[]];
  const places = chosen(columns, (at) => {
    const isOf = (asked: string[], value: unknown) => !asked.length || asked.includes(String(value));
    return (
      isOf(components, columns.component[at]) &&
      isOf(sources, columns.source[at]) &&
      isOf(lives, columns.life[at]) &&
      LEVELS.indexOf(columns.level[at] ?? "info") >= least &&
      (columns.message[at] ?? "").toLowerCase().includes(text)
    );
  });
  return { ...page, lines: { columns: taken(columns, places) } };
}
