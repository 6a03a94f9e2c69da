import assert from "node:assert/strict";
import { test } from "node:test";
import { spoken } from "../src/components/Chart.tsx";
import { solvedText } from "../src/pages/Eval.tsx";
import { canonical, dataAddress, ofRun, parseAddress, sideOf, withQuery } from "../src/lib/address.ts";
import { rowsOf } from "../src/lib/columns.ts";
import { folded, processOf, type LogLine } from "../src/lib/fold.ts";
import { formatBytes, formatByName, formatNumber, formatSeconds, formatTick, formatWindow, isShare, nameOfRun, quotedWord } from "../src/lib/format.ts";
import { ordered, paged } from "../src/lib/order.ts";
import { alone, byteTicks, distinct, extent, linear, logarithmic, logTicks, nearest, ticks, timeTicks } from "../src/lib/scales.ts";
import { parsed } from "../src/lib/data.ts";
import { narrowed, unanswered } from "../src/lib/narrow.ts";
import { momentOf } from "../src/lib/moment.ts";
import { levelsOf, mostSurprising, namesOf, scaleOf, valuesOf } from "../src/lib/shades.ts";
import type { Chain } from "../src/lib/types.ts";
import { placeOf, seriesOf, viewOf, zoomed } from "../src/lib/view.ts";
import { visible, visibleToken } from "../src/lib/visible.ts";

test("addresses keep odd names as one part, and repeated parameters", () => {
  const address = ofRun("demo", "examples", "a/b c", "x?&#");
  assert.equal(address, "/runs/demo/examples/a%2Fb%20c/x%3F%26%23");
  assert.deepEqual(parseAddress(address).parts, ["runs", "demo", "examples", "a/b c", "x?&#"]);
  const two = withQuery("/compare?run=old&points=5", { run: ["a", "b"], points: null });
  assert.deepEqual(parseAddress(two).query.getAll("run"), ["a", "b"]);
  assert.equal(parseAddress(two).query.has("points"), false);
  assert.equal(withQuery("/x", { a: 0, b: false, c: "" }), "/x?a=0&b=false");
  assert.deepEqual(parseAddress("/runs/%ZZ").parts, ["runs", "%ZZ"]);
});

test("what only the page knows is not asked of the server", () => {
  assert.equal(dataAddress("/runs/a?ui.view=tokens&tokens=false"), "/runs/a?tokens=false");
});

test("a side of a difference is the four parts of a rollout's address", () => {
  assert.equal(sideOf("/runs/a/rollouts/40-0/1/2"), "a/40-0/1/2");
  assert.equal(sideOf("/runs/a/rollouts/g%2F1/1/2"), "a/g%2F1/1/2");
  assert.equal(sideOf("/runs/a/evals/x/rollouts/g/0"), null);
});

test("columns become rows", () => {
  assert.deepEqual(rowsOf({ a: [1, 2], b: ["x", "y"] } as never), [
    { a: 1, b: "x" },
    { a: 2, b: "y" },
  ]);
  assert.deepEqual(rowsOf({}), []);
});

test("numbers are short and none is hidden", () => {
  const cases: [number | null, string][] = [
    [null, "-"], [0, "0"], [1234567, "1,234,567"], [0.123456, "0.1235"], [1e-9, "1.00e-9"],
    [-2.5, "-2.5"], [Number.NaN, "-"], [Infinity, "inf"], [12345.678, "12,345.7"],
  ];
  for (const [value, text] of cases) assert.equal(formatNumber(value), text);
  assert.equal(formatSeconds(0.0021), "2.1 ms");
  assert.equal(formatSeconds(3725), "1 h 2 min");
  // A value that is rounded up to the next unit is told in it.
  assert.deepEqual([0.9996, -0.9996, 0.0009999, 119.96, 999.96e-6].map(formatSeconds), ["1 s", "-1 s", "1 ms", "2 min 0 s", "1 ms"]);
  assert.deepEqual([999.96, -999.96, 999.94].map((value) => formatNumber(value)), ["1,000", "-1,000", "999.9"]);
  assert.equal(formatNumber(999.6, 3), "1,000");
  assert.equal(formatBytes(2 ** 20 - 1), "1 MiB");
  assert.equal(formatBytes(3 * 2 ** 30), "3 GiB");
  assert.equal(formatByName("gpu/used_share", 0.25), "25%");
  assert.equal(formatByName("network/sent_bytes_per_s", 2048), "2 KiB/s");
  assert.equal(formatByName("tokens/rollout_per_s", 2048), "2,048");
  assert.equal(formatByName("time/step_s", 0.5), "500 ms");
});

test("a word of a command is quoted where a shell would take it apart", () => {
  assert.deepEqual(["runs/a-1", "my runs/x", "it's $(x)", "-x", ""].map(quotedWord), ["runs/a-1", "'my runs/x'", `'it'"'"'s $(x)'`, "./-x", "''"]);
});

test("axes show nothing that cannot be", () => {
  assert.deepEqual(extent([[0, 0]]), [0, 0.5]);
  assert.deepEqual(extent([[10, 10]]), [9, 11]);
  assert.deepEqual(extent([[-1, -1]]), [-1.1, -0.9]);
  assert.ok(isShare("truncated/fraction") && !isShare("task_reward/mean"));
});

test("a curve is told by its own values and not by the ends of its axis", () => {
  const told = (ys: (number | null)[]) => spoken({ name: "a", ys }, formatNumber);
  assert.equal(told([10, null, 10]), "a is always 10");
  assert.equal(told([3, 1, 2]), "a from 1 to 3, newest 2");
  assert.equal(told([null]), "a has no values");
});

test("an eval without a result says of each example how much of it was played", () => {
  assert.equal(solvedText({ num_solved: 1, num_rollouts: 4, num_failed: 0 }, 4), "1 of 4");
  assert.equal(solvedText({ num_solved: null, num_rollouts: 1, num_failed: 1 }, 4), "2 of 4 played");
  assert.equal(solvedText({ num_solved: null, num_rollouts: 1, num_failed: 0 }, null), "1 played");
});

test("days are told where a window has several", () => {
  const at = (day: number, hour: number) => new Date(2026, 2, day, hour, 5 * (hour % 2), 7).getTime() / 1000;
  const midnight = new Date(2026, 2, 4).getTime() / 1000;
  assert.equal(formatTick(midnight, 43200), "03-04");
  assert.equal(formatTick(midnight + 43200, 43200), "12:00");
  assert.equal(formatTick(midnight, 600), "00:00");
  assert.equal(formatWindow(at(3, 13), at(3, 15)), "2026-03-03 13:05:07 to 15:05:07");
  assert.equal(formatWindow(at(3, 13), at(4, 15)), "2026-03-03 13:05:07 to 2026-03-04 15:05:07");
});

test("a value without one beside it is shown as a point", () => {
  assert.deepEqual(alone([1, null, 2, 3, null, 4, NaN]), [0, 5]);
  assert.deepEqual(alone([1, 2]), []);
  assert.deepEqual(alone([0]), [0]);
  assert.deepEqual(alone([null]), []);
});

test("labels of an axis are within it, evenly apart, and not too many", () => {
  for (const [from, to] of [[0, 1], [-3.2, 17], [1e-7, 3e-7], [5, 5.0001], [0, 123456]] as const) {
    const found = ticks(from, to, 5);
    assert.ok(found.length >= 2 && found.length <= 9, `${from} ${to}: ${found}`);
    assert.ok(found.every((one) => one >= from - 1e-12 && one <= to + (to - from) * 1e-6));
    const gap = (found[1] ?? 0) - (found[0] ?? 0);
    found.slice(1).forEach((one, at) => assert.ok(Math.abs(one - (found[at] ?? 0) - gap) < gap * 1e-6));
  }
  for (const seconds of [0.01, 1, 90, 7200, 86400 * 30]) {
    const { at, step_s } = timeTicks(1.75e9, 1.75e9 + seconds, 8);
    assert.ok(at.length >= 1 && at.length <= 9, `${seconds}: ${at.length} of ${step_s}`);
  }
});

test("labels of bytes are round in their unit", () => {
  const found = byteTicks(0, 8 * 2 ** 30, 4).map((one) => one / 2 ** 30);
  assert.deepEqual(found, [0, 2, 4, 6, 8]);
  const narrow = byteTicks(12 * 2 ** 30, 12.004 * 2 ** 30, 4);
  assert.deepEqual(distinct(narrow, formatBytes).map(formatBytes), ["12 GiB"]);
  assert.deepEqual(distinct([0.5, 1.5], formatNumber), [0.5, 1.5]);
});

test("a rollout is seen on the timeline, whole or by its longest call", () => {
  const whole = momentOf([100, 104], [2, 3]);
  assert.ok(whole && whole.from < 100 && whole.to > 107 && whole.to - whole.from < 14);
  const narrow = momentOf([100, 4000], [0.01, 0.02]);
  assert.ok(narrow && narrow.from > 3990 && narrow.to < 4010);
  assert.ok(narrow && 0.02 / (narrow.to - narrow.from) > 1 / 250);
  assert.equal(momentOf([], []), null);
  const none = momentOf([5], [0]);
  assert.ok(none && none.to > none.from);
});

test("a scale and its inverse agree, also when everything is one value", () => {
  const scale = linear(10, 30, 100, 200);
  assert.equal(scale(20), 150);
  assert.equal(scale.invert(150), 20);
  assert.equal(Number.isFinite(linear(5, 5, 0, 10)(5)), true);
  assert.equal(extent([[null, Number.NaN]]), null);
  assert.deepEqual(extent([[null, 2], [7]]), [2, 7]);
});

test("the nearest of a growing list", () => {
  const values = [1, 4, 9, 16];
  for (const wanted of [-5, 1, 2.4, 2.6, 12.4, 12.6, 99]) {
    const found = nearest(values, wanted);
    const best = Math.min(...values.map((one) => Math.abs(one - wanted)));
    assert.equal(Math.abs((values[found] ?? 0) - wanted), best);
  }
  assert.equal(nearest([], 3), 0);
});

test("characters without a shape are shown by their number", () => {
  assert.equal(visible("a\u0000\u001b[31m\u202eb\n\t"), "a<U+0000><U+001B>[31m<U+202E>b\n\t");
  assert.equal(visibleToken("\n"), "\u23ce\n");
  assert.equal(visible("\u0645\u06cc\u200c\u0631\u0648\u0645 \u200d\u200e"), "\u0645\u06cc\u200c\u0631\u0648\u0645 \u200d<U+200E>");
  assert.equal(visibleToken("a\u200cb\u200d"), "a<U+200C>b<U+200D>");
  assert.equal(visible("\u00e9\u4e2d\ud83d\ude00"), "\u00e9\u4e2d\ud83d\ude00");
});

test("colors of tokens: the advantage only where the model wrote, a ratio around 1", () => {
  const chain = {
    is_sampled: [false, true],
    advantage: -0.5,
    logprobs: [null, -1],
    mask: [null, 0],
    versions: [null, 3],
    columns: { ratio: [null, 1.25] },
  } as unknown as Chain;
  assert.deepEqual(valuesOf(chain, "advantage"), [null, -0.5]);
  assert.deepEqual(valuesOf(chain, "mask"), [null, 0]);
  assert.deepEqual(valuesOf(chain, "ratio"), [null, 1.25]);
  assert.deepEqual(levelsOf({ ...chain, columns: { ratio: [0.5, 1, 1.25] } }, "ratio"), [-1, 0, 0.5]);
  assert.deepEqual(levelsOf(chain, "log-prob"), [null, 0.25]);
  assert.deepEqual(namesOf(chain), ["log-prob", "mask", "version", "advantage", "ratio"]);
});

test("the legend of tokens is for each value the color that a token of that value has", () => {
  const values = [-0.002, -0.1, -0.799];
  const chain = {
    is_sampled: values.map(() => true),
    advantage: 0.5,
    logprobs: values,
    mask: [0, 1, 1],
    versions: [3, 4, 9],
    columns: { "ratio": [0.7, 1, 1.1], "effect": [-2, 0, 1], "entropy": [0, 0.4, 2], "trainer log-prob": values },
  } as unknown as Chain;
  for (const name of namesOf(chain)) {
    for (const fits of [false, true]) {
      const { levelOf, steps } = scaleOf(chain, name, fits);
      const legend = { ...chain, logprobs: [...steps, ...values], mask: [...steps, 0], versions: [...steps, 3, 9] } as Chain;
      legend.columns = Object.fromEntries(Object.entries(chain.columns).map(([key, own]) => [key, [...steps, ...own]]));
      if (name !== "advantage") assert.deepEqual(levelsOf(legend, name, fits).slice(0, steps.length), steps.map(levelOf), name);
      assert.ok(steps.every((value) => Math.abs(levelOf(value)) <= 1 + 1e-9), name);
    }
  }
  assert.deepEqual(scaleOf(chain, "log-prob").steps, [0, -1, -2, -3, -4]);
  assert.equal(levelsOf(chain, "log-prob", true)[2], 1);
  assert.deepEqual(mostSurprising(chain, 2), [2, 1]);
});

test("of a token only what is known is offered, and equal values have a color", () => {
  const chain = {
    is_sampled: [true, true],
    advantage: null,
    logprobs: [-1, -2],
    mask: null,
    versions: null,
    columns: {},
  } as unknown as Chain;
  assert.deepEqual(namesOf(chain), ["log-prob"]);
  const levels = levelsOf({ ...chain, versions: [4, 4] }, "version");
  assert.ok(levels.every((level) => level !== null && Math.abs(level - 0.5) < 1e-9));
});

test("lines that say the same are counted, also in turn and with other times, but no line that says something else", () => {
  const of = (message: string, rest: Partial<LogLine> = {}): LogLine => ({
    time_s: 1, level: "warning", component: "inference", source: "0", life: 1, message, ...rest,
  });
  const lines = [1, 2, 3].flatMap((second) => [
    of(`WARNING 11-26 19:19:0${second} no weights for a`, { time_s: second }),
    of(`WARNING 11-26 19:19:0${second} no weights for b`, { time_s: second }),
  ]);
  const found = folded([...lines, of("step 1"), of("step 2"), of("step 2", { source: "1" }), of("step 2", { level: "error" })]);
  assert.deepEqual(found.map((one) => one.count), [3, 3, 1, 1, 1, 1]);
  assert.deepEqual([found[0]?.line.time_s, found[0]?.last_s], [1, 3]);
  const apart = folded([of("x"), ...Array.from({ length: 40 }, (_, at) => of(`other ${at}`)), of("x")]);
  assert.equal(apart.length, 42);
  assert.deepEqual(
    [of(""), of("", { component: "trainer", source: "rank 0" }), of("", { component: "driver", source: "" })].map(processOf),
    ["inference-0", "trainer rank 0", "driver"],
  );
});

test("an export answers the filters that it can, and names those that it cannot", () => {
  const page = {
    total: 1000,
    columns: {
      step: [3, 3, 2, 1],
      environment: ["a", "b", "a", "a"],
      reward: [1, 0, null, 0.5],
      is_truncated: [false, true, false, true],
      oldest_version: [1, 1, 0, 0],
      newest_version: [2, 1, 1, 0],
      "metrics/n": [5, 6, 7, null],
      "tags/level": ["1", null, "2", "1"],
      "metrics/k=1": [0, 1, 2, 3],
      "tags/a=b": ["x", "y", "x=y", null],
      address: ["/3a", "/3b", "/2a", "/1a"],
    },
  };
  const found = (query: string) =>
    (narrowed("/runs/r/rollouts", page, new URLSearchParams(query)) as typeof page & { num_of_run: number; num_of_export: number });
  const cases: [string, string[]][] = [
    ["", ["/3a", "/3b", "/2a", "/1a"]],
    ["step_from=2&step_to=2", ["/2a"]],
    ["environment=b&environment=c", ["/3b"]],
    ["reward_from=0.5", ["/3a", "/1a"]],
    ["truncated=true&step_to=2", ["/1a"]],
    ["version=1", ["/3a", "/3b", "/2a"]],
    ["where=metrics/n>=6&where=metrics/n<7", ["/3b"]],
    ["tag=level=1", ["/3a", "/1a"]],
    ["tag=level", ["/3a", "/2a", "/1a"]],
    ["where=metrics/k=1>=2", ["/2a", "/1a"]],
    ["tag=a=b", ["/3a", "/3b", "/2a"]],
    ["tag=a=b=x=y", ["/2a"]],
    ["sort=reward", ["/3b", "/1a", "/3a", "/2a"]],
    ["sort=-reward&limit=2&offset=1", ["/1a", "/3b"]],
  ];
  for (const [query, addresses] of cases) assert.deepEqual(found(query).columns.address, addresses, query);
  const narrow = found("step_to=1");
  assert.deepEqual([narrow.total, narrow.num_of_export, narrow.num_of_run], [1, 4, 1000]);
  assert.deepEqual(unanswered("/runs/r/rollouts", new URLSearchParams("step_from=2&q=x&server=y")), ["q", "server"]);
  assert.deepEqual(unanswered("/runs/r/timeline", new URLSearchParams("from=1&to=2")), []);
  assert.deepEqual(unanswered("/runs/r", new URLSearchParams("section=reward&from=3&other=1")), ["other"]);
  assert.deepEqual(unanswered("/compare", new URLSearchParams("run=a&run=b&metric=entropy")), []);
  assert.deepEqual(unanswered("/runs/r/evals/x", new URLSearchParams("against=y")), ["against"]);
  assert.deepEqual(unanswered("/runs/r/rollouts/g/0/1", new URLSearchParams("step_from=2")), ["step_from"]);
  const lines = { level: ["info", "error"], component: ["a", "b"], source: ["", "0"], life: [1, 2], message: ["Yes", "no"] };
  const logs = (query: string) =>
    (narrowed("/runs/r/logs", { lines: { columns: lines } }, new URLSearchParams(query)) as { lines: { columns: typeof lines } }).lines.columns.message;
  assert.deepEqual([logs("q=yes"), logs("level=warning"), logs("life=2&component=a"), logs("source=0")], [["Yes"], ["no"], [], ["no"]]);
});

test("an address of ours and one of the server are the same", () => {
  assert.equal(canonical("/runs/a/examples/a%2Fb/x(1)~*'!"), "/runs/a/examples/a%2Fb/x%281%29%7E%2A%27%21");
  assert.equal(canonical("/runs/a/examples/\u00e9"), "/runs/a/examples/%C3%A9");
});

test("rows without a value come last in both orders, and numbers in names count", () => {
  const rows = ["b10", null, "b9", ""];
  assert.deepEqual(ordered(rows, (one) => one, false), ["b9", "b10", null, ""]);
  assert.deepEqual(ordered(rows, (one) => one, true), ["b10", "b9", null, ""]);
  assert.deepEqual(ordered([0, NaN, -1, 2], (one) => one, true), [2, 0, -1, NaN]);
});

test("a page that is not there is the nearest one that is", () => {
  const rows = [1, 2, 3, 4, 5];
  assert.deepEqual(paged(rows, 2, 2), { page: 2, pages: 3, rows: [3, 4] });
  assert.deepEqual(paged(rows, 99, 2), { page: 3, pages: 3, rows: [5] });
  assert.deepEqual(paged(rows, Number.NaN, 2).page, 1);
  assert.deepEqual(paged([], 1, 2), { page: 1, pages: 1, rows: [] });
});

test("a stretch of a run is in the address in steps, whatever the axis shows", () => {
  const address = zoomed("/runs/a?metric=entropy&ui.x=hours", [20, 40]);
  assert.equal(address, "/runs/a?metric=entropy&ui.x=hours&from=20&to=40");
  assert.equal(zoomed(address, null), "/runs/a?metric=entropy&ui.x=hours");
  const view = viewOf(parseAddress(address).query);
  assert.deepEqual([view.from, view.to, view.isInHours, view.scale], [20, 40, true, "range"]);
  assert.equal(viewOf(parseAddress("/runs/a?from=x&ui.y=log").query).from, null);
  // An export gives the whole run.
  const steps = [10, 20, 30, 40, 50];
  const times_s = [3600, 7200, null, 14400, 18000];
  const course = { steps, times_s, values: [1, 2, 3, null, 5], smooth: [1, 1.5, 2, null, 3] };
  const found = seriesOf("reward", course, view, 0);
  assert.deepEqual(found.xs, [2, 4]);
  assert.deepEqual(found.steps, [20, 40]);
  assert.deepEqual(found.ys, [2, null]);
  assert.deepEqual(found.smooth, [1.5, null]);
  assert.equal(placeOf(40, found, view), 4);
  assert.equal(placeOf(50, found, view), null);
  const plain = viewOf(parseAddress("/runs/a?smooth=1").query);
  assert.deepEqual(seriesOf("reward", course, plain, null).xs, steps);
  assert.equal(seriesOf("reward", course, plain, null).smooth, undefined);
});

test("a logarithmic axis has equal steps for powers of ten, and labels that are round", () => {
  const scale = logarithmic(0.01, 100, 0, 400);
  assert.deepEqual([0.01, 1, 100].map((value) => Math.round(scale(value))), [0, 200, 400]);
  assert.ok(Number.isNaN(scale(0)));
  assert.ok(Math.abs(scale.invert(200) - 1) < 1e-9);
  for (const [from, to] of [[1e-6, 1], [0.5, 40], [0.3, 0.9], [1e-30, 1e30]] as const) {
    const found = logTicks(from, to, 4);
    assert.ok(found.length >= 2 && found.length <= 10, `${from} ${to}: ${found}`);
    assert.ok(found.every((one) => one >= from && one <= to * 1.000001));
  }
});

test("runs with the same name are told apart by their keys", () => {
  assert.equal(nameOfRun({ name: "x", key: "x" }), "x");
  assert.equal(nameOfRun({ name: "x", key: "x-2" }), "x (x-2)");
  assert.equal(nameOfRun({ name: "", key: "x" }), "x");
});


test("an axis of values that differ in their last digits alone has an end", () => {
  for (const [from, to] of [[0.3, 0.1 + 0.2], [-0.1 - 0.2, -0.3], [9.999999999999999e-7, 1e-6], [2 ** 60, 2 ** 60 + 256], [0, 5e-324]] as const) {
    const found = ticks(from, to, 4);
    assert.ok(found.length >= 1 && found.length <= 9, `${from} ${to}`);
    assert.ok(found.every((one) => one >= from - 1e-12 * Math.abs(from) && one <= to + 1e-12 * Math.abs(to)));
    if (from > 0) assert.ok(logTicks(from, to, 4).length <= 9);
  }
});


test("whole numbers that would be rounded stay as they are written", () => {
  const text = '{"seed": 9007199254740993, "far": -123456789012345678901, "near": 12, "part": 0.30000000000000004, "large": 1e300, "said": "9007199254740993"}';
  const context = JSON.parse("[1]", ((_: string, value: unknown, one?: { source?: string }) => (value === 1 ? one?.source : value)) as never) as unknown[];
  const isTold = context[0] === "1";
  const found = parsed(text) as Record<string, unknown>;
  assert.equal(found["seed"], isTold ? "9007199254740993" : 9007199254740992);
  assert.equal(found["far"], isTold ? "-123456789012345678901" : -123456789012345680000);
  assert.deepEqual([found["near"], found["part"], found["large"], found["said"]], [12, 0.1 + 0.2, 1e300, "9007199254740993"]);
});
